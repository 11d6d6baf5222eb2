"""Balances engines."""
