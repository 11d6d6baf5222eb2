"""What any process needs: logs, faults told to one request, fair turns on threads, the garbage collector."""
