"""The core in virtual time, with a model that shows any wrong token.

Scheduler, KV cache manager and policies are the real ones. The worker is a hash function, the clock a number, and
faults come from a seed. Run it with `python -m simulation` in the tests folder, or `make simulate`.
"""
