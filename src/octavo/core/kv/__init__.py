"""The KV cache as the scheduler sees it: blocks, who holds them, and which prefixes can be found."""
