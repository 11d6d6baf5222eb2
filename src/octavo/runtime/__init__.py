"""Services for every process: logs, faults of requests, fair scheduling on threads."""
