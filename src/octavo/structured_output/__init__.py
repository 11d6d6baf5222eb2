"""Computes which tokens may come next."""
