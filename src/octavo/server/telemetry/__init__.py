"""Metrics, traces and the dashboard. They only read the server's state."""
