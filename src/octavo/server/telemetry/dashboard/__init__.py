"""A page that shows an engine's work live."""
