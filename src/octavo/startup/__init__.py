"""Reads checkpoints and starts the engine core's process."""
