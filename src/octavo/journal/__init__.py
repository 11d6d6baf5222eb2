"""Recordings of all calls into the core."""
