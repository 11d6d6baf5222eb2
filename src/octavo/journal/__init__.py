"""Recorded core calls."""
