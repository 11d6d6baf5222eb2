"""The scheduler's KV cache: blocks, the requests that hold them, and findable prefixes."""
