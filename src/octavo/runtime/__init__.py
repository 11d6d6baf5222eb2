"""Services for every process: logs, per-request faults, fair scheduling on threads, garbage collection."""
