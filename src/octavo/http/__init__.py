"""HTTP for server and router. Knows no engine."""
