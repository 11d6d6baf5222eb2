"""Prompts to answers, and how their text is read: reasoning, calls of tools and structures, in any cut."""
