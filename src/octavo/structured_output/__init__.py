"""Structured output: which tokens may follow. The engine checks and compiles grammars, the worker applies them."""
