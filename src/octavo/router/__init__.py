"""Serves many engines at one address: chooses an engine for each request, and retries if an engine is lost."""
