"""Ollama's API. No route loads or changes a model."""
