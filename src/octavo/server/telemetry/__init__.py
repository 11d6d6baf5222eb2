"""What is seen of a server: metrics, traces, the dashboard. Reads events and requests, changes nothing."""
