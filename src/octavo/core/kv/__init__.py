"""The KV cache of the scheduler: blocks, the requests that hold them, and the prefixes that can be found."""
