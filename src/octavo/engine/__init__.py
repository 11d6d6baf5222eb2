"""One step of an engine, and the ways to drive it."""
