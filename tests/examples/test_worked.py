"""The worked cases of examples/worked give exactly the results in their text."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

WORKED = Path(__file__).parents[2] / "examples" / "worked"


@pytest.fixture
def worked(monkeypatch):
    monkeypatch.syspath_prepend(str(WORKED))

    def run(name: str):
        sys.modules.pop(name, None)
        return importlib.import_module(name).run()

    return run


def test_mixed_batch_gives_documented_result(worked):
    assert worked("mixed_batch") == {
        "step_totals": [17, 3],
        "decode_positions": [9, 3, 5],
        "finished": {"three": "length"},
        "mixed_total": 14,
        "mixed": {"nine": 1, "five": 1, "twelve": 12},
    }


def test_token_budget_gives_documented_result(worked):
    assert worked("token_budget") == {
        "prompt_and_output": [(2, 2), (4, 1)],
        "positions": [3, 4],
        "scheduled": {"two": 1, "four": 1, "five": 5, "three": 3},
        "total": 10,
    }


def test_shared_blocks_gives_documented_result(worked):
    assert worked("shared_blocks") == {
        "table_a": [0, 1, 2],
        "table_b": [0, 1, 3],
        "num_cached_tokens_b": 8,
        "references": [2, 2],
        "free_after_a": [2, 4, 5, 6, 7],
    }


def test_full_hit_gives_documented_result(worked):
    assert worked("full_hit") == {
        "blocks_of_16": {"from_cache": 47, "computed": 1, "block_table": [0, 1, 3], "copied": [(0, 2, 3)]},
        "blocks_of_256": {"from_cache": 255, "computed": 1, "block_table": [1], "copied": [(0, 0, 1)]},
    }


def test_static_and_continuous_gives_documented_result(worked):
    result = worked("static_and_continuous")
    drawing = result.pop("svg")
    assert result["busy_of_one_batch"] == (28, 60)
    assert result["steps_of_five"] == {"sequential": 28, "static": 18, "continuous": 11}
    assert result["static_occupancy"] == 0.395
    assert result["static_steps"] == 400
    assert result["continuous_steps"] == 208
    assert drawing.count("<rect") == 1 + 2 * 16


def test_chunked_prefill_gives_documented_result(worked):
    assert worked("chunked_prefill") == {
        "chunks": [2048, 2048, 2048, 2048],
        "first_sample_in_step": 4,
        "beside_two_decodes": [[1, 1, 2048]] * 4,
    }


def test_prefill_first_gives_documented_result(worked):
    assert worked("prefill_first") == {
        "steps": [["A", "B"], ["C"], ["A", "B", "C"], ["D"], ["B", "C", "D"]],
        "totals": [14, 10, 3, 5, 3],
        "finished": {"A": "length"},
    }


def test_speculation_gives_documented_result(worked):
    result = worked("speculation")
    assert result.pop("measured") == pytest.approx((1 - 0.8**6) / 0.2, rel=0.02)
    assert result == {
        "exact": [4, 5, 9, -1, -1, -1],
        "third_rejected": [4, 5, 9, -1, -1, -1],
        "tokens_per_step": 3.69,
    }


def test_reservation_gives_documented_result(worked):
    assert worked("reservation") == {
        "first_step": ["first", "second"],
        "left_after_first_step": 1748,
        "second_step": {"first": 1, "second": 1, "third": 400},
        "left_after_second_step": 548,
        "ended_meanwhile": ["second"],
        "returned": 1536,
    }


@pytest.mark.turn(8)
def test_shared_pool_gives_documented_result(worked):
    assert worked("shared_pool") == {
        "found_by_a": 0,
        "published": (96, ["A"] * 6),
        "found_by_b": 96,
        "same_answer": True,
        "told": [("copy", True)],
        "copy_of": ("C", 16),
        "blocks_of_b_and_c": [6, 6],
    }
