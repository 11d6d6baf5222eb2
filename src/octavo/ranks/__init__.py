"""Runs one model in several processes, its ranks (see `octavo.models.split`).

Rank 0 is the engine's worker. It starts the other ranks, and sends them each step before it computes its own share.
"""
