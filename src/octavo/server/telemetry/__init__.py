"""Metrics, traces and the dashboard. None changes the server's state."""
