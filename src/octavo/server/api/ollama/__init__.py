"""Ollama's API: chat, generate, embeddings, and descriptions of models. No route loads or changes a model."""
