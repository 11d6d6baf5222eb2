"""Mutants: every statement of a room is changed in every way, one at a time, and the room's tests must fail.

`rooms` names the rooms, `mutator` makes the mutants, `checks` are the tests that judge them, `sweep` judges many.
"""
