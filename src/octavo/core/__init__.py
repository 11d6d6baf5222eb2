"""Decides which requests run next, and on which KV blocks. Imports only the standard library. The clock is injected."""
