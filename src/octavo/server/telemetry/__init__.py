"""Metrics, traces and the dashboard of a server. Reads events and requests, changes nothing."""
