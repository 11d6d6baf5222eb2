"""The flight recorder: what went into the core, enough to repeat every decision; and what can be read from it."""
