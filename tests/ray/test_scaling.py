"""The wanted number of engines over curves of load."""

from __future__ import annotations

import itertools
import math

import pytest

from octavo.ray.scaling import DOWN_AFTER_S, UP_AFTER_S, Load, ScalingLimits, choose_size

LIMITS = ScalingLimits(min_replicas=1, max_replicas=4, target_queue_time_s=1.0)
NUM_SEQS = 8.0
AT = 1000.0


def loads(queue_time_s, num_running, seconds):
    return [Load(AT + at, queue_time_s, num_running, NUM_SEQS) for at in range(seconds + 1)]


@pytest.mark.parametrize(
    ("queue_time_s", "size", "expected"),
    [(0.9, 1, 1), (1.0, 1, 1), (1.1, 1, 2), (9.0, 1, 2), (1.1, 2, 3), (9.0, 2, 4), (1.2, 3, 4), (9.0, 4, 4)],
)
def test_long_queue_time_adds_engines_in_proportion_up_to_twice(queue_time_s, size, expected):
    assert choose_size(loads(queue_time_s, 8, 3), size, 0.0, LIMITS) == expected


def test_one_short_queue_time_prevents_growth():
    curve = [*loads(9.0, 8, 2), Load(AT + 3, 0.1, 8, NUM_SEQS), Load(AT + 4, 9.0, 8, NUM_SEQS)]
    assert choose_size(curve, 1, 0.0, LIMITS) == 1


@pytest.mark.parametrize(("seconds", "expected"), [(int(UP_AFTER_S) - 1, 1), (int(UP_AFTER_S), 2)])
def test_queue_time_counts_only_after_it_lasted(seconds, expected):
    assert choose_size(loads(9.0, 8, seconds), 1, 0.0, LIMITS) == expected


def test_engines_are_added_only_while_all_are_ready():
    assert choose_size(loads(9.0, 8, 10), 1, AT + 9, LIMITS) == 1
    assert choose_size(loads(9.0, 8, 10), 1, AT + 8, LIMITS) == 2
    assert choose_size(loads(9.0, 8, 10), 1, AT + 11, LIMITS) == 1
    assert choose_size(loads(9.0, 8, 10), 1, None, LIMITS) == 1
    assert choose_size([], 1, 0.0, LIMITS) == 1


@pytest.mark.parametrize(
    ("num_running", "size", "expected"),
    [(5.6, 2, 1), (5.7, 2, 2), (0.0, 1, 1), (11.1, 3, 2), (11.3, 3, 3)],
)
def test_engine_is_removed_if_the_others_have_room(num_running, size, expected):
    assert choose_size(loads(0.5, num_running, int(DOWN_AFTER_S)), size, 0.0, LIMITS) == expected


def test_engine_is_removed_only_after_a_long_calm():
    assert choose_size(loads(0.0, 0, int(DOWN_AFTER_S) - 1), 2, 0.0, LIMITS) == 2
    curve = loads(0.0, 0, int(DOWN_AFTER_S))
    assert choose_size(curve, 2, 0.0, LIMITS) == 1
    curve[3] = Load(AT + 3, 0.6, 0, NUM_SEQS)
    assert choose_size(curve, 2, 0.0, LIMITS) == 2


def test_engine_is_removed_although_one_is_missing():
    for size, num_running, expected in ((3, 11.2, 2), (3, 11.3, 3), (2, 5.6, 1), (1, 0.0, 1)):
        assert choose_size(loads(0.0, num_running, int(DOWN_AFTER_S)), size, None, LIMITS) == expected


def test_unknown_capacity_prevents_removal():
    curve = [Load(float(at), 0.0, 0, None) for at in range(40)]
    assert choose_size(curve, 2, 0.0, LIMITS) == 2


def test_size_follows_a_curve_up_and_down_without_oscillation():
    """A model of engines that run 8 requests each, of which an engine ends 4 a second."""
    size, queue, since, sizes = 1, 0.0, 0.0, []
    curve: list[Load] = []
    for second in range(400):
        arrivals = 14.0 if 20 <= second < 200 else 1.0
        served = min(queue + arrivals, 4.0 * size)
        queue += arrivals - served
        curve.append(Load(float(second), queue / (4.0 * size), min(2 * served, NUM_SEQS * size), NUM_SEQS))
        wanted = choose_size(curve[-60:], size, since, LIMITS)
        if wanted != size:
            size, since = wanted, second + 5.0  # a new engine starts
            curve.clear()
        sizes.append(size)
    assert sizes[:20] == [1] * 20
    assert max(sizes) == sizes[199] == 4
    assert sizes[-1] == 1
    changes = [b - a for a, b in itertools.pairwise(sizes) if a != b]
    assert changes == sorted(changes, key=lambda change: -math.copysign(1, change))
