"""Ollama's API: chat, generate, embeddings, and what its clients ask of models. Nothing here loads or changes one."""
