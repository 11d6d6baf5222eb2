"""Whether fetching KV is faster than computing it, by measured times of both."""

from __future__ import annotations

import pytest

from octavo.core.transfer_cost import TransferCost


def test_unmeasured_load_is_tried():
    cost = TransferCost()
    assert cost.is_worth_loading(8)
    cost.learn_load(8, 100.0)
    assert cost.is_worth_loading(8)
    cost = TransferCost()
    cost.learn_step(100, 0.001)
    assert cost.is_worth_loading(8)


@pytest.mark.parametrize(("seconds", "is_worth"), [(0.0955, True), (0.0965, False)])
def test_load_is_worth_it_if_faster_than_average_compute(seconds, is_worth):
    cost = TransferCost()
    cost.learn_step(100, 1.0)
    cost.learn_step(100, 2.0)  # 10 ms a token, then 20: 12
    cost.learn_load(8, seconds)
    assert cost.is_worth_loading(8) is is_worth
