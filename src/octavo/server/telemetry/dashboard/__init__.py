"""A page that shows what the engine does while it does it."""
