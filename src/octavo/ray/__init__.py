"""Engines on a Ray cluster, and in Ray Serve LLM."""
