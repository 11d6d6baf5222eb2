"""Metrics, traces and the dashboard. This package does not change the server's state."""
