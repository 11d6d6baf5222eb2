"""KV beyond the device: stores of blocks by key, and the threads that move bytes between them and the KV cache."""
