"""The core in virtual time, against a model that would show any wrong token.

Scheduler, KV cache manager and policies are the real ones; the worker is a hash function, the clock a number, and
faults come from a seed. `python -m simulation` from the tests folder, or `make simulate`.
"""
