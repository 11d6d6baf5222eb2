"""HTTP for server and router, without any engine."""
