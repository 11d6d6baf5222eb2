"""Serves many engines at one address."""
