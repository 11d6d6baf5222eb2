"""Indices of running requests share one limit."""

from octavo.speculative.request_indices import RequestIndices


def test_index_that_grows_or_is_dropped_changes_the_room_of_the_others():
    indices = RequestIndices[str](10)
    indices.keep("a", "first", 6)
    assert (indices.room("a"), indices.room("b")) == (10, 4)
    indices.keep("a", "grown", 9)
    assert (indices.get("a"), indices.room("b")) == ("grown", 1)
    indices.forget(["a", "unknown"])
    assert (indices.get("a"), indices.room("b")) == (None, 10)
