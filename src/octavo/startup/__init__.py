"""Reads a checkpoint's files, and starts the core's process."""
