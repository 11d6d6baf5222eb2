"""Drives engine steps."""
