"""Mutants: every statement of a room is changed in every way, one at a time, and its tests have to see each change.

`rooms` names the rooms, `mutator` makes the mutants, `checks` are the tests that judge them, `sweep` judges many.
"""
