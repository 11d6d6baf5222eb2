"""Structured output: computes which tokens may come next."""
