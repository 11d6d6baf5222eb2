"""Runs models on a device."""
