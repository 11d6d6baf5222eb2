"""Structured output: which tokens may follow."""
