"""Journals of all calls into the core."""
