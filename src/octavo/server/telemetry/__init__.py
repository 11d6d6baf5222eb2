"""Metrics, traces and the dashboard. Nothing here changes the server's state."""
