"""octavo beside other engines: see benchmarks/compare.py."""
