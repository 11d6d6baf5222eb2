"""Ids are unique and cannot be guessed."""

from __future__ import annotations

import re

from octavo.runtime.ids import new_id


def test_ids_are_unique_32_digit_hex() -> None:
    ids = {new_id() for _ in range(10_000)}
    assert len(ids) == 10_000
    assert all(re.fullmatch("[0-9a-f]{32}", each) for each in ids)
