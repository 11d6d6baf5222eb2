"""HTTP APIs. Functions that read request fields raise `RequestError` with the path of an invalid field."""
