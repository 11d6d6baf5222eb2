"""Reads checkpoints and starts the core's process."""
