"""Stages of tools/gpu_check.py for recurrent layers: they pass, and detect errors."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

TOOLS = Path(__file__).parents[2] / "tools"
sys.path.insert(0, str(TOOLS))
import gpu_correctness  # noqa: E402
import gpu_device  # noqa: E402
import gpu_engine  # noqa: E402
import gpu_stages  # noqa: E402
import gpu_states  # noqa: E402
from triton_interpreter import interpreted_kernels  # noqa: E402

from octavo.worker.kv_cache import PagedKVCache  # noqa: E402

pytestmark = [
    pytest.mark.turn(8),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
]


@pytest.fixture
def check(tmp_path):
    with interpreted_kernels():
        yield gpu_device.open_check(tmp_path, is_dry=True)


def found(check, stage, *arguments):
    entries = gpu_device.Entries(check.device, lambda _entry: None)
    stage(check, entries, *arguments)
    return entries.found


def test_rows_have_equal_bits_in_all_steps(check):
    entries = found(check, gpu_states.exact_states)
    assert entries == {f"{name} torch.float32": {"is_equal": True} for name in ("short_conv", "gated_delta", "mamba2")}


@pytest.mark.sweep(4)
@pytest.mark.parametrize(
    ("mistake", "detected_by"),
    [
        (lambda batch: replace(batch, read_slots=batch.read_slots * 0 - 1), "steps of 1"),
        (lambda batch: replace(batch, sources=batch.sources.clamp(min=-1)), "steps with replayed rows"),
        (lambda batch: replace(batch, write_rows=batch.query_start.diff()), "steps of 1 with replayed rows"),
        (lambda batch: replace(batch, read_slots=batch.read_slots[:1].expand(2).contiguous()), "steps with other rows"),
    ],
)
def test_mistakes_with_states_are_detected(check, mistake, detected_by):
    *_, case = gpu_states.state_cases(check, torch.float32, 6)

    def compute(*arguments):
        *inputs, batch, out = arguments
        is_alone = len(batch.read_slots) == 1
        case.compute(*inputs, batch if is_alone and "other" in detected_by else mistake(batch), out)

    entry = gpu_states.is_exact_in_steps(check, replace(case, compute=compute))
    assert not entry["is_equal"]
    assert detected_by in entry["differ"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_operations_are_compared_with_torch(check, dtype):
    entries = found(check, gpu_states.states_against_torch, dtype, gpu_correctness.units_off)
    assert len(entries) == 9
    assert not gpu_stages.failures(entries)


@pytest.mark.parametrize("family", gpu_states.FAMILIES)
def test_models_give_equal_tokens_twice(check, family):
    entry = gpu_engine._same_tokens(check, gpu_states.recurrent_model(check, family), num_rounds=2)
    assert entry == {"is_equal": True, "is_right": True, "num_requests": 2}


def test_wrong_saved_states_are_detected(check, monkeypatch):
    copy = PagedKVCache.copy

    def broken(self, copies):
        moves = copy(self, copies)
        for group, _, slot in copies.block_copies:
            self.groups[group].blocks[slot].fill_(64)  # as a float, 3.0
        return moves

    monkeypatch.setattr(PagedKVCache, "copy", broken)
    entry = gpu_engine._same_tokens(check, gpu_states.recurrent_model(check, "Qwen3_5ForCausalLM"), num_rounds=2)
    assert (entry["is_equal"], entry["is_right"]) == (False, True)
