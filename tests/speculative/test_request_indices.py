"""Indices of running requests share one limit."""

from octavo.speculative.request_indices import RequestIndices


def test_index_growth_and_removal_change_capacity_for_other_requests():
    indices = RequestIndices[str](10)
    indices.keep("a", "first", 6)
    assert (indices.free_tokens("a"), indices.free_tokens("b")) == (10, 4)
    indices.keep("a", "grown", 9)
    assert (indices.get("a"), indices.free_tokens("b")) == ("grown", 1)
    indices.forget(["a", "unknown"])
    assert (indices.get("a"), indices.free_tokens("b")) == (None, 10)
