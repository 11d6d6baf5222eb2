"""HTTP APIs. Functions that read fields raise `RequestError`, which names the field's path."""
