"""The HTTP server of one engine, with all APIs."""
