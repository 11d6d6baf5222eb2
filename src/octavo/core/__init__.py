"""Decides which requests run next, and on which blocks. Standard library only; clock and randomness are injected."""
