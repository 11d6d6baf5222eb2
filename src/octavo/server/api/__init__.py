"""The HTTP APIs. Functions that read a request's fields raise `RequestError`, which names the field's path."""
