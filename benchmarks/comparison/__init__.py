"""Comparison of octavo with other engines: see benchmarks/compare.py."""
