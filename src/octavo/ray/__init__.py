"""Engines on a Ray cluster, and octavo as an engine of Ray Serve LLM. Needs the package `ray`."""
