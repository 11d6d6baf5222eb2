"""The APIs. Functions that read a request's fields raise `RequestError` with the field's place."""
