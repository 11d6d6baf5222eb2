"""Shows an engine live."""
