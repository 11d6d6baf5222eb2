"""Draft models: what their passes compute, which of their keys and values count as present, and what a fault costs."""

from __future__ import annotations

import functools
import json
import shutil

import numpy as np
import pytest
import torch
from alone_and_crowd import has_swapped, needs_kernels
from scripted_drafts import verify_all

from octavo import CacheConfig, LLMEngine, ModelConfig, SamplingParams, SchedulerConfig
from octavo.assets import BUILT_IN_DRAFT, built_in_draft_path, built_in_model_path
from octavo.config import SpeculativeConfig
from octavo.data.events import DraftsVerified, KVLoadEnded
from octavo.kv_transfer.memory import GlobalKVPool, MemoryStore
from octavo.speculative.suffix import SuffixProposer
from octavo.worker.draft_model import _within
from octavo.worker.forward_pass import ForwardPass

pytestmark = needs_kernels
ITSELF = {"method": "draft_model", "model": str(built_in_model_path())}
SMALLER = {"method": "draft_model", "model": BUILT_IN_DRAFT}
QUANTIZED = {"method": "quantized"}
BLOCK = 16
PROMPT = [7 + i * 31 % 900 for i in range(10 * BLOCK + 3)]  # its answer does not repeat itself
DRAFTS = 4


class Watched:
    """An engine that records the rows of each pass of the draft model, and counts its drafts and accepted drafts."""

    def __init__(
        self, monkeypatch, speculative: dict[str, str], budget: int = 512, kv_store=None, **cache: object
    ) -> None:
        self.rows: list[int] = []
        self.lengths: list[int] = []
        self.drafted = self.accepted = self.loaded = 0
        compute = ForwardPass.__call__

        def watch(forward_pass, token_ids, batch):
            if forward_pass is self.drafts.forward_pass:
                self.rows.append(len(token_ids))
                self.lengths += batch.seq_lens.tolist()
            return compute(forward_pass, token_ids, batch)

        self.engine = LLMEngine(
            ModelConfig(),
            SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=budget, mixed_step_ms=0.0, preemption="swap"),
            cache_config=CacheConfig(**{"num_gpu_blocks": 64, "block_size": BLOCK, **cache}),
            speculative_config=SpeculativeConfig(**speculative, num_speculative_tokens=DRAFTS),
            kv_store=kv_store,
            sink=self,
        )
        verify_all(self.engine)
        self.worker = self.engine.core.executor.worker
        self.runner = self.worker.runner
        self.drafts = self.runner.draft_runner
        monkeypatch.setattr(ForwardPass, "__call__", watch)

    def emit(self, event) -> None:
        if isinstance(event, DraftsVerified):
            self.drafted += event.num_drafted
            self.accepted += event.num_accepted
        if isinstance(event, KVLoadEnded):
            self.loaded += event.num_tokens

    def add(self, name: str, prompt: list[int] = PROMPT, **asked: object) -> None:
        params = SamplingParams(**{"temperature": 0.0, "ignore_eos": True, "max_tokens": 40, **asked})
        self.engine.add_request(name, {"prompt_token_ids": prompt}, params)

    def step(self) -> list[int]:
        """Step once; return the numbers of rows of the drafting passes."""
        first = len(self.rows)
        self.outputs = self.engine.step()
        return self.rows[first:]

    def finish(self) -> dict[str, list[int]]:
        """Step until no request remains; return the tokens."""
        tokens = {}
        while self.engine.has_unfinished_requests():
            self.step()
            for output in self.outputs:
                if output.finished:
                    assert output.error is None
                    tokens[output.request_id] = output.outputs[0].token_ids
        return tokens


@pytest.fixture(scope="module")
def right() -> list[int]:
    """Return the tokens that follow the prompt."""
    engine = LLMEngine(
        ModelConfig(),
        SchedulerConfig(max_num_seqs=1),
        cache_config=CacheConfig(num_gpu_blocks=64),
        speculative_config=SpeculativeConfig(method="none"),
    )
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=40)
    return engine.generate({"prompt_token_ids": PROMPT}, params).outputs[0].token_ids


def test_draft_pass_computes_only_tokens_without_kv(monkeypatch, right):
    """First the prompt, then the tokens since then. All drafts are accepted, and the last one was never fed back."""
    watched = Watched(monkeypatch, ITSELF)
    watched.add("a")
    assert watched.step() == [len(PROMPT) + 1, 1, 1, 1]
    assert watched.step() == [2, 1, 1, 1]
    assert watched.step() == [2, 1, 1, 1]
    # Rows after the request's last block at that time are computed again: they were written into scratch blocks.
    assert watched.step() == [3, 1, 1, 1]
    assert watched.finish() == {"a": right}
    assert watched.accepted == watched.drafted


def test_quantized_draft_shares_prompt_kv_of_target(monkeypatch, right):
    watched = Watched(monkeypatch, QUANTIZED)
    watched.add("a")
    assert watched.step() == [1, 1, 1, 1]
    assert watched.finish() == {"a": right}
    assert 0 < watched.accepted < watched.drafted
    assert watched.runner.draft_runner.kv.cache is watched.runner.kv_cache


def test_draft_kv_of_shared_prefix_is_computed_once(monkeypatch, right):
    watched = Watched(monkeypatch, ITSELF)
    watched.add("a")
    watched.step()
    watched.add("b", PROMPT[: 5 * BLOCK] + [3] * 20)
    assert watched.step()[0] == 2 + 20 + 1
    watched.finish()
    watched.add("c")
    assert watched.step()[0] == 3 + 1, "what is behind the full blocks, as of the target, and the newest token"
    assert watched.finish() == {"c": right}
    assert watched.accepted == watched.drafted


def test_missing_draft_kv_of_shared_block_is_computed(monkeypatch, right):
    """A request without drafts has no keys and values of the draft model."""
    watched = Watched(monkeypatch, ITSELF)
    watched.add("a", num_speculative_tokens=0)
    watched.finish()
    assert watched.rows == []
    watched.add("b")
    assert watched.step()[0] == len(PROMPT) + 1
    watched.add("c")  # another request learned from it meanwhile
    assert watched.step()[0] == 2 + 2
    assert watched.finish() == {"b": right, "c": right}
    assert watched.accepted == watched.drafted


def test_reallocated_blocks_hold_no_draft_kv(monkeypatch):
    watched = Watched(monkeypatch, ITSELF, num_gpu_blocks=16, enable_prefix_caching=False)
    for name, shift in (("a", 0), ("b", 1)):
        watched.add(name, [token + shift for token in PROMPT])
        assert watched.step()[0] == len(PROMPT) + 1
        watched.finish()
    assert watched.accepted == watched.drafted


@pytest.mark.turn(8)
def test_swapped_request_restores_draft_kv(monkeypatch, right):
    watched = Watched(monkeypatch, ITSELF, swap_space_bytes=64 << 20, enable_prefix_caching=False)
    watched.add("a")
    watched.step()
    watched.step()
    watched.engine.core.scheduler.faults.preempt(["a"])
    watched.step()
    watched.drafts.kv.cache.groups[0].blocks.fill_(torch.nan)  # only the copy on the host remains
    watched.drafts.kv._filled[:] = 0
    assert watched.step()[0] <= BLOCK
    assert watched.finish() == {"a": right}
    assert watched.accepted == watched.drafted > 25
    assert has_swapped(watched.engine)


@pytest.mark.turn(8)
def test_draft_kv_of_blocks_loaded_from_store_is_computed(monkeypatch, right):
    """The store has only the target's keys and values; the loaded blocks held stale ones of the draft model."""
    pool = GlobalKVPool(500)
    first = Watched(monkeypatch, ITSELF, kv_store=functools.partial(MemoryStore, pool, "a"), num_gpu_blocks=128)
    first.add("a")
    first.finish()
    while first.engine.core.has_work():
        first.step()
    second = Watched(monkeypatch, ITSELF, kv_store=functools.partial(MemoryStore, pool, "b"), num_gpu_blocks=16)
    second.add("b", [token + 1 for token in PROMPT])
    second.finish()
    second.add("c")
    rows = []
    while not rows:
        rows = second.step()
    assert (second.loaded, rows[0]) == (10 * BLOCK, len(PROMPT) + 1)
    assert second.finish() == {"c": right}
    assert second.accepted == second.drafted


def test_missing_draft_kv_is_computed_within_step_budget(monkeypatch, right):
    """Requests that lack the least come first, and each drafts once it has caught up."""
    watched = Watched(monkeypatch, ITSELF, budget=64)
    watched.add("a", PROMPT[:3])
    watched.step()
    watched.add("b")
    passes = [watched.step() for _ in range(7)]
    assert all(max(rows) <= 64 for rows in passes)
    assert watched.finish()["b"] == right
    assert watched.accepted == watched.drafted >= 60


def test_draft_budget_prefers_requests_with_fewest_missing_tokens():
    assert _within(10, np.array([7, 2, 30, 2])).tolist() == [6, 2, 0, 2]
    assert _within(10, np.array([12, 1])).tolist() == [9, 1]


def test_request_with_enough_drafts_is_in_no_further_pass(monkeypatch):
    watched = Watched(monkeypatch, QUANTIZED)
    watched.add("a", [5, 6, 7])
    watched.add("b", [5, 6, 8], max_tokens=3)  # only one of these tokens can be a draft
    watched.add("c", [5, 6, 9], num_speculative_tokens=2)
    watched.add("d", [5, 6, 10], num_speculative_tokens=0)
    assert watched.step() == [3, 2, 1, 1]


def test_scheduler_max_drafts_limits_draft_passes(monkeypatch):
    watched = Watched(monkeypatch, SMALLER)
    schedule = watched.engine.core.scheduler.schedule

    def bound():
        scheduled = schedule()
        scheduled.max_drafts["a"] = 1
        scheduled.max_drafts["b"] = 0
        return scheduled

    monkeypatch.setattr(watched.engine.core.scheduler, "schedule", bound)
    watched.add("a", [5, 6, 7])
    watched.add("b", [5, 6, 8])
    assert watched.step() == [4]


def test_step_result_reports_draft_passes_and_time(monkeypatch):
    watched = Watched(monkeypatch, SMALLER)
    results, update = [], watched.engine.core.scheduler.update_from_output

    def keep(scheduled, result):
        results.append(result)
        return update(scheduled, result)

    monkeypatch.setattr(watched.engine.core.scheduler, "update_from_output", keep)
    watched.add("a")
    watched.step()
    assert results[0].num_drafting_passes == len(results[0].draft_token_ids["a"]) == DRAFTS
    assert results[0].drafting_s > 0


@pytest.mark.turn(12)
@pytest.mark.parametrize(("speculative", "least"), [(QUANTIZED, 0.8), (SMALLER, 0.6)], ids=["quantized", "draft_model"])
def test_most_drafts_of_built_in_models_are_accepted(monkeypatch, speculative, least):
    watched = Watched(monkeypatch, speculative)
    for topic in ("a fox and a lighthouse", "a boat", "the sea"):
        message = {"role": "user", "content": f"Tell me a story about {topic}."}
        prompt = watched.engine.input_processor.chat_prompt([message])
        watched.engine.add_request(topic, prompt, SamplingParams(temperature=0.0, max_tokens=60))
    watched.finish()
    assert watched.drafted > 60
    assert watched.accepted > least * watched.drafted


@pytest.mark.turn(12)
def test_drafts_in_scratch_blocks_do_not_change_tokens(monkeypatch):
    """Blocks of two tokens: most drafts are in scratch blocks, after the blocks of their requests."""
    alone = [PROMPT[i : i + 3] for i in range(4)]
    for speculative in (ITSELF, QUANTIZED):
        expected = {}
        watched = Watched(monkeypatch, speculative, block_size=2, num_gpu_blocks=512)
        for name, prompt in enumerate(alone):
            watched.add(str(name), prompt)
            expected |= watched.finish()
        for name, prompt in enumerate(alone):
            watched.add(str(name), prompt)
        assert watched.finish() == expected
        assert speculative is QUANTIZED or watched.accepted == watched.drafted
        assert watched.accepted > 0.5 * watched.drafted


@pytest.mark.turn(12)
@pytest.mark.parametrize("speculative", [SMALLER, QUANTIZED], ids=["draft_model", "quantized"])
def test_failing_draft_model_does_not_change_tokens(monkeypatch, caplog, right, speculative):
    watched = Watched(monkeypatch, speculative)
    watched.add("a")
    watched.step()
    forward = watched.drafts.forward_pass.recorded
    calls = []

    def fail(*inputs):
        calls.append(inputs)
        if len(calls) % 2:
            raise RuntimeError("on purpose")
        return forward(*inputs)

    watched.drafts.forward_pass.recorded = fail
    assert watched.finish() == {"a": right}
    assert len(calls) > 2
    assert "no tokens are drafted in this step" in caplog.text


@pytest.mark.turn(12)
@pytest.mark.parametrize("speculative", [SMALLER, QUANTIZED], ids=["draft_model", "quantized"])
def test_nan_draft_kv_does_not_change_target_tokens(monkeypatch, right, speculative):
    """All keys and values of the draft model become NaN, and those of the target that are written while it drafts."""
    watched = Watched(monkeypatch, speculative)
    choose = watched.drafts.choose_next

    def poison(indices):
        cache, rows = watched.drafts.kv.cache, watched.drafts._rows
        if speculative is SMALLER:
            cache.groups[0].blocks.fill_(torch.nan)
        else:
            cache.groups[0].blocks[cache.num_blocks :].fill_(torch.nan)
            for row, known in zip(rows, watched.drafts._num_known, strict=True):
                block = watched.runner.batch.block_tables[0][row, (known - 1) // BLOCK]
                for index in range(len(watched.runner.model.layers)):
                    for rows_of_layer in cache.layer(index):
                        rows_of_layer[block, :, (known - 1) % BLOCK :].fill_(torch.nan)
        return choose(indices)

    monkeypatch.setattr(watched.drafts, "choose_next", poison)
    watched.add("a")
    assert watched.finish() == {"a": right}


def test_draft_model_with_shorter_context_stops_drafting_at_its_limit(monkeypatch, tmp_path, right):
    shutil.copytree(built_in_draft_path(), tmp_path / "short")
    config = json.loads((tmp_path / "short" / "config.json").read_text())
    (tmp_path / "short" / "config.json").write_text(json.dumps(config | {"max_position_embeddings": len(PROMPT) + 12}))
    watched = Watched(monkeypatch, {"method": "draft_model", "model": str(tmp_path / "short")})
    watched.add("a")
    assert watched.finish() == {"a": right}
    assert len(watched.rows) >= 3
    assert max(watched.lengths) == len(PROMPT) + 12


@pytest.mark.turn(8)
def test_engine_start_runs_first_draft_pass_despite_lookup_hit(monkeypatch, right):
    """The first pass is recorded, and captured on a GPU, so that the first request does not wait for it."""
    asked = []
    with monkeypatch.context() as patch:
        patch.setattr(SuffixProposer, "propose", lambda _self, tasks: asked.extend(tasks) or [[0] for _ in tasks])
        watched = Watched(monkeypatch, {"method": "suffix", "model": str(built_in_model_path())})
    assert len(asked) == 1
    assert watched.drafts.forward_pass.has_run
    watched.add("a")
    assert watched.step()[0] == len(PROMPT) + 1
    assert watched.finish() == {"a": right}


@pytest.mark.turn(8)
def test_suffix_lookup_hit_needs_no_draft_model_pass(monkeypatch, right):
    """The lookup is scripted: a real one depends on the tokens of one instruction set."""
    watched = Watched(monkeypatch, {"method": "suffix", "model": str(built_in_model_path())})

    def find(_self, tasks):
        answered = [len(task.token_ids) - len(PROMPT) for task in tasks]
        return [right[count : count + DRAFTS] for count in answered]

    with monkeypatch.context() as patch:
        patch.setattr(SuffixProposer, "propose", find)
        num_rows = len(watched.rows)
        watched.add("a")
        assert watched.finish() == {"a": right}
        assert len(watched.rows) == num_rows
        assert watched.accepted == watched.drafted > 0
        patch.setattr(SuffixProposer, "propose", lambda _self, tasks: [[] for _ in tasks])
        watched.add("b")
        assert watched.step()[0] == len(PROMPT) + 1, "the model catches up with all that it has not seen"
        assert watched.finish() == {"b": right}


REJECTION = {"verification": "rejection"}


@pytest.mark.turn(12)
@pytest.mark.parametrize("asked", [{"temperature": 1.3, "seed": 3, "top_p": 0.9}, {}], ids=["sampled", "greedy"])
def test_rejection_sampling_accepts_every_draft_of_target_itself(monkeypatch, right, asked):
    watched = Watched(monkeypatch, ITSELF | REJECTION)
    watched.add("a", **asked)
    tokens = watched.finish()
    assert (tokens["a"] == right) == (not asked)
    watched.step()
    assert not watched.runner.drafting.draft_probs, "of requests that ended nothing is kept"
    assert watched.accepted == watched.drafted >= 30


@pytest.mark.turn(8)
def test_rejection_sampling_verifies_draft_stop_token(monkeypatch, right):
    """Otherwise verification would depend on which token the draft is."""
    stop = right[3]
    for verification, expected in ({}, [right[1:3]]), (REJECTION, [right[1:4]]):
        watched = Watched(monkeypatch, ITSELF | verification)
        watched.add("a", stop_token_ids=[stop])
        watched.step()
        assert [list(request.spec_token_ids) for request in watched.engine.core.scheduler.running] == expected
        assert watched.finish() == {"a": right[:4]}
