"""OpenAI's API, with vLLM's fields."""
