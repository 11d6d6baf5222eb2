"""Stages of tools/gpu_check.py for engine and server: they pass, and detect errors."""

import io
import json
import sys
import types
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

TOOLS = Path(__file__).parents[2] / "tools"
sys.path.insert(0, str(TOOLS))
import gpu_device  # noqa: E402
import gpu_engine  # noqa: E402
import gpu_memory  # noqa: E402
import gpu_service  # noqa: E402
import gpu_stages  # noqa: E402
import gpu_transformers  # noqa: E402
from triton_interpreter import interpreted_kernels  # noqa: E402

from octavo.core import invariants  # noqa: E402
from octavo.data.kv_groups import RecurrentStates  # noqa: E402
from octavo.worker.kv_cache import PagedKVCache  # noqa: E402
from octavo.worker.worker import Worker  # noqa: E402

pytestmark = pytest.mark.filterwarnings(
    "ignore::RuntimeWarning:triton.runtime.interpreter", "ignore:octavo was installed without:RuntimeWarning"
)


@pytest.fixture
def check(tmp_path):
    return gpu_device.Check(torch.device("cpu"), gpu_device.DRY, tmp_path, None, soak_s=0.4)


def found(check, stage):
    entries = gpu_device.Entries(check.device, lambda _entry: None)
    stage(check, entries)
    return entries.found


@pytest.mark.turn(12)
def test_soak_stage_passes_for_engine_under_load(check):
    entry = found(check, gpu_service.soak)["soak"]
    assert entry["is_right"], entry
    assert entry["num_requests"] >= 4


def engine_with_compilations(make, *args, **options):
    engine = make(*args, **options)
    engine.core.metrics.stats.num_compilations = 2
    return engine


@pytest.mark.sweep(16)
@pytest.mark.parametrize("trouble", ["leak", "growth", "compilation", "silence"])
def test_soak_stage_detects_leaks_growth_compilations_and_lost_requests(check, monkeypatch, trouble):
    if trouble == "leak":
        monkeypatch.setattr(invariants, "check", lambda _scheduler: ["block 3 is nobody's"])
    elif trouble == "growth":
        levels = iter([(0, 0), (gpu_service.MOST_GROWTH + 1, 0)])
        monkeypatch.setattr(gpu_service, "memory_levels", lambda _check: next(levels))
    elif trouble == "compilation":
        monkeypatch.setattr(gpu_service, "make_engine", partial(engine_with_compilations, gpu_service.make_engine))
    else:
        monkeypatch.setattr(gpu_service, "_load", lambda _check, _engine, _end, sent, _told: sent.update(["1"]) or [])
    entry = found(check, gpu_service.soak)
    wrong = {
        "leak": "block 3",
        "growth": "memory grew by",
        "compilation": "2 kernels were compiled",
        "silence": "1 began 2 times and ended 0 times",
    }[trouble]
    assert wrong in entry["soak"]["wrong"][0]
    assert gpu_stages.failures(entry) == ["soak"]


def test_wrong_ends_reports_missing_duplicate_and_unknown_ends():
    once = Counter(["a", "b"])
    assert gpu_service.wrong_ends(once, once) == []
    assert len(gpu_service.wrong_ends(once, Counter(["a"]))) == 1
    assert len(gpu_service.wrong_ends(once, Counter(["a", "b", "b", "c"]))) == 2


class Server:
    """A server with known answers. streams: "break" when killed, "hang", "end" before the kill, or "fail"."""

    answers, streams, made = ("one", "one"), "break", 0

    def __init__(self, _check):
        self.start_s, self.answer = 1.0, self.answers[type(self).made]
        type(self).made += 1
        self.is_killed = gpu_service.threading.Event()

    def complete(self, _prompt, max_tokens):
        assert max_tokens < 100
        return self.answer

    def stream(self, _prompt, max_tokens, num_choices):
        assert max_tokens * num_choices > 10_000
        if self.streams == "fail":
            raise ConnectionRefusedError
        yield "a token"
        if self.streams == "end":
            yield "[DONE]"
            return
        self.is_killed.wait(5.0)
        raise ConnectionResetError

    def kill(self):
        if self.streams != "hang":
            self.is_killed.set()


@pytest.mark.sweep(12)
@pytest.mark.parametrize(
    ("answers", "streams", "expected"),
    [
        (("one", "one"), "break", (True, True)),
        (("one", "two"), "break", (False, True)),
        (("one", "one"), "hang", (True, False)),
        (("one", "one"), "end", (True, False)),
        (("one", "one"), "fail", (True, False)),
    ],
)
def test_restart_stage_judges_answers_and_streams_of_killed_server(check, monkeypatch, answers, streams, expected):
    monkeypatch.setattr(gpu_service, "_Server", type("Fake", (Server,), {"answers": answers, "streams": streams}))
    monkeypatch.setattr(gpu_service, "_GONE_S", 0.1 if streams == "hang" else 20.0)
    entry = found(check, gpu_service.restart)["killed"]
    assert (entry["is_equal"], entry["is_right"]) == expected
    assert entry["num_lost"] == (streams == "break")
    assert entry["num_clients_that_hang"] == (streams == "hang")


def test_restart_stage_is_skipped_without_uvicorn(check, monkeypatch):
    monkeypatch.setattr(gpu_service.importlib.util, "find_spec", lambda name: None if name == "uvicorn" else name)
    assert "no uvicorn" in found(check, gpu_service.restart)["killed"]["left_out"]


@pytest.mark.turn(12)
def test_swap_stage_gives_equal_tokens(check):
    entries = found(check, gpu_memory.swap)
    assert list(entries) == ["swapped", "swapped with states"]
    for entry in entries.values():
        assert (entry["is_equal"], entry["is_right"]) == (True, True)
        assert entry["saved_gb_per_s"] > 0
        assert entry["loaded_gb_per_s"] > 0


@pytest.mark.turn(12)
@pytest.mark.parametrize("states", [False, True])
def test_swap_stage_detects_corrupt_swapped_block(check, monkeypatch, states):
    copy = PagedKVCache.copy

    def broken(self, copies):
        moves = copy(self, copies)
        for group, _, block in copies.swap_in:
            if isinstance(self.groups[group].kind, RecurrentStates) == states:
                self.groups[group].blocks[block].mul_(-5)
        return moves

    monkeypatch.setattr(PagedKVCache, "copy", broken)
    assert not found(check, gpu_memory.swap)["swapped with states" if states else "swapped"]["is_equal"]


@pytest.mark.turn(8)
def test_memory_stage_confirms_memory_plan(check):
    entries = found(check, gpu_memory.memory)
    assert [entry["is_right"] for entry in entries.values()] == [True, True]
    assert gpu_memory.is_near(102, 100)
    assert not gpu_memory.is_near(103, 100)
    assert not gpu_memory.is_near(97, 100)


@pytest.mark.parametrize(
    ("taken", "planned", "is_right"),
    [(3 << 30, 3 << 30, True), (3 << 30, 5 << 30, True), (3 << 30, 7 << 30, False), (4 << 30, 3 << 30, False)],
)
def test_memory_of_steps_is_compared_with_its_own_plan(taken, planned, is_right):
    assert gpu_memory.is_step_right(taken, planned) is is_right


@pytest.mark.turn(12)
def test_carried_packages_stay_below_size_limit(check):
    entry = found(check, gpu_memory.carried)["bytes"]
    assert entry["is_right"], entry
    sizes = gpu_memory.sizes_to_carry()
    assert sizes.keys() >= {"octavo", "tools", "tokenizers", "uvicorn", "starlette"}
    assert not sizes.keys() & {"torch", "triton", "numpy", "transformers", "pytest"}
    assert not gpu_memory.weighed(sizes | {"cuda": gpu_memory.MOST_CARRIED})["is_right"]


@pytest.mark.turn(8)
def test_transformers_stage_finds_equal_tokens(check):
    pytest.importorskip("transformers")
    assert found(check, gpu_transformers.transformers) == {
        "Qwen3ForCausalLM": {"is_equal": True, "num_requests": 2, "num_too_close": 0}
    }


def test_transformers_stage_is_skipped_without_transformers(check, monkeypatch):
    monkeypatch.setattr(gpu_transformers.importlib.util, "find_spec", lambda _name: None)
    assert found(check, gpu_transformers.transformers) == {"transformers": {"left_out": "it is not installed"}}


@pytest.mark.parametrize(
    ("gap", "num_wrong", "is_equal"), [(1.0, 1, False), (1e-5, 1, True), (1e-5, 2, False), (1e-5, 0, True)]
)
def test_transformers_stage_detects_different_tokens(gap, num_wrong, is_equal):
    """In one prompt of ten, a choice between two almost equal logits may differ."""

    def model(input_ids):
        """Prefer the last token + 1, narrowly before the last token + 2."""
        logits = torch.zeros(1, input_ids.shape[1], 50)
        logits.scatter_(2, ((input_ids + 2) % 50).unsqueeze(2), 9.0 - gap)
        return types.SimpleNamespace(logits=logits.scatter_(2, ((input_ids + 1) % 50).unsqueeze(2), 9.0))

    answers = [[4, 5, 7] if index < num_wrong else [4, 5, 6] for index in range(10)]
    entry = gpu_transformers.compared(model, torch.device("cpu"), [[1, 3]] * 10, answers)
    assert entry["is_equal"] == is_equal
    assert entry.get("differ", []) == ([[2, 2, 0]] if gap == 1.0 else [])


ENGINE_STAGES = {
    "tokens": gpu_engine.tokens,
    "transformers": gpu_transformers.transformers,
    "memory": gpu_memory.memory,
    "swap": gpu_memory.swap,
    "workloads": gpu_engine.workloads,
    "peers": gpu_engine.peers,
    "soak": gpu_service.soak,
}


@pytest.mark.sweep(16)
@pytest.mark.parametrize("stage", ENGINE_STAGES)
def test_stage_fails_if_every_step_fails(check, monkeypatch, stage):
    """Requests of failed steps end with the reason "error" and no tokens: they must not count as equal or as fast."""

    def fail(*_arguments):
        raise ValueError("the device is broken")

    monkeypatch.setattr(Worker, "execute", fail)
    monkeypatch.setattr(Worker, "launch", fail)
    with interpreted_kernels():
        entries = found(check, ENGINE_STAGES[stage])
    measured = {name: entry for name, entry in entries.items() if "left_out" not in entry}
    assert measured
    assert gpu_stages.failures(measured) == list(measured), entries
    assert "'error' after 0 of" in str(measured)


@pytest.mark.parametrize("change", [{"finish_reason": "stop"}, {"logprobs": {"tokens": ["a"]}}])
def test_early_completion_end_fails_restart_stage(monkeypatch, change):
    choice = {"finish_reason": "length", "logprobs": {"tokens": ["a", "b"]}}
    server = gpu_service._Server.__new__(gpu_service._Server)
    monkeypatch.setattr(server, "_ask", lambda *_, **__: io.StringIO(json.dumps({"choices": [choice | change]})))
    with pytest.raises(RuntimeError, match="of 2 tokens ended otherwise"):
        server.complete([1], 2)
    monkeypatch.setattr(server, "_ask", lambda *_, **__: io.StringIO(json.dumps({"choices": [choice]})))
    assert server.complete([1], 2) == [choice]
