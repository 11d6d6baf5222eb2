"""The scheduler's KV cache."""
