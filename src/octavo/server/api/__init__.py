"""The APIs: what clients may send, what they get, and the routes. A package or file for each, shared parts beside."""
