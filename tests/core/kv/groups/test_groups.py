"""A prefix hit covers the same positions in every KV group."""

from __future__ import annotations

import pytest

from octavo.core.kv.groups import longest_hit, num_covered


class Group:
    """A group with hits of certain lengths only. asked: the limits of its calls."""

    def __init__(self, *lengths, covered=0):
        self.lengths, self.covered, self.asked = lengths, covered, []

    def longest_hit(self, blocks, host_blocks, num_tokens, limit):
        assert (len(blocks), len(host_blocks), num_tokens) == (3, 3, 40)
        self.asked.append(limit)
        return max(length for length in self.lengths if length <= limit)

    def num_covered(self, blocks, num_tokens):
        return min(self.covered, len(blocks), num_tokens)


def hit(*groups):
    return longest_hit(groups, [None] * 3, [None] * 3, 40)


def test_all_blocks_hit_without_bounded_groups():
    assert hit() == 6


@pytest.mark.parametrize(("lengths", "expected", "asked"), [((0, 6), 6, [6]), ((0, 4), 4, [6])])
def test_single_group_is_queried_once(lengths, expected, asked):
    group = Group(*lengths)
    assert hit(group) == expected
    assert group.asked == asked


def test_groups_are_queried_until_hit_stops_shrinking():
    first, second = Group(0, 2, 5), Group(0, 2, 4)
    assert hit(first, second) == 2
    assert (first.asked, second.asked) == ([6, 4, 2], [5, 2, 2])


def test_groups_that_agree_are_queried_twice():
    first, second = Group(0, 5), Group(0, 5)
    assert hit(first, second) == 5
    assert (first.asked, second.asked) == ([6, 5], [5, 5])


def test_num_covered_is_minimum_over_groups():
    assert num_covered([], [None] * 3, 9) == 3
    assert num_covered([Group(covered=2), Group(covered=1)], [None] * 3, 9) == 1
