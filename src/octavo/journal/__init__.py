"""Journals of all calls into the core, which suffice to repeat its decisions."""
