"""Mutants of the core: every statement changed in every way, one at a time, and tests that have to see it.

`mutator` makes them, `checks` are what judges them, `sweep` judges many.
"""
