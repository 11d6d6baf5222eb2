"""The device: KV memory, ragged batches, sampling."""
