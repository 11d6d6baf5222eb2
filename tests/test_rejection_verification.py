"""Engines that verify by rejection sampling: their answers have the distribution of answers without drafts."""

from __future__ import annotations

import functools
from collections import Counter

import numpy as np
import pytest
import torch
from alone_and_crowd import needs_kernels
from scripted_drafts import verify_all

from octavo import LLM, SamplingParams
from octavo.assets import BUILT_IN_DRAFT
from octavo.config import SpeculativeConfig
from octavo.errors import ConfigError
from octavo.sampling_params import StructuredOutputsParams
from octavo.worker.drafting import Drafting
from octavo.worker.verification import ExactVerification

A, B, C = 67, 68, 69  # "abc"
END = 2
PROMPT = {"prompt_token_ids": [A, B, C, A, A]}  # after it the model is uncertain
PROMPTS = [PROMPT, "Once upon a time there was a little fox who", "one two three one two three"]
NUM_ANSWERS = 600
LEAST_P = 1e-4
WAYS: dict[str, dict[str, object]] = {
    "plain": {"allowed_token_ids": [A, B, C]},
    "filters": {"allowed_token_ids": [A, B, C], "top_k": 2, "top_p": 0.9, "min_p": 0.05, "temperature": 3.0},
    "penalties": {"allowed_token_ids": [A, B, C], "frequency_penalty": 0.7, "logit_bias": {A: 1.0}, "logprobs": 1},
    "stop": {"allowed_token_ids": [A, B, C], "stop_token_ids": [B], "min_tokens": 1, "temperature": 2.0},
    "grammar": {
        "structured_outputs": StructuredOutputsParams(regex="(a|b){2,3}c?a?"),
        "allowed_token_ids": [A, B, C, A + 4, END],
        "temperature": 3.0,
        "ignore_eos": False,
    },
    "typical": {"allowed_token_ids": [A, B, C], "typical_p": 0.9, "temperature": 3.0},
}


class Drawing:
    """A draft model that prefers b, then a, then c, and sometimes a token that no grammar allows, after any tokens."""

    num_speculative_tokens = 3
    num_bytes = num_passes = 0
    computed, computes = frozenset(), True

    def __init__(self, llm: LLM) -> None:
        self.runner = llm.llm_engine.core.executor.worker.runner
        self.logits = torch.full((self.runner.model.lm_head.out_features,), -20.0)
        self.logits[[B, A, C, A + 4]] = torch.tensor([1.0, 0.5, 0.0, -1.0])

    def propose(self, tasks) -> list[list[int]]:
        batch = self.runner.batch
        rows = np.array([batch.requests[task.request_id].row for task in tasks])
        known = np.array([len(task.token_ids) for task in tasks])
        logits, positions = self.logits.repeat(len(tasks), 1), torch.from_numpy(known.astype(np.int32))
        drawn = [
            self.runner.verification.draw_drafts(logits + 0.3 * i, batch.sampling.gather(rows, positions + i))
            for i in range(3)
        ]
        probs = torch.stack([probs for _, probs in drawn], dim=1)
        for task, of_task in zip(tasks, probs, strict=True):
            self.runner.drafting.draft_probs[task.request_id] = of_task[: task.max_drafts]
        return torch.stack([ids for ids, _ in drawn], dim=1).tolist()

    def forget(self, request_ids) -> None:
        pass

    def finish(self, ended) -> None:
        pass


def make(method: str | None) -> LLM:
    config = {"method": "none"}
    if method == "model":
        config = {"method": "draft_model", "model": BUILT_IN_DRAFT, "verification": "rejection"}
    elif method:
        config = {"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 3, "verification": "rejection"}
    llm = LLM(max_num_seqs=192, num_gpu_blocks_override=2048, speculative_config=config)
    if method:
        verify_all(llm.llm_engine)
    if method == "drawn":
        llm.llm_engine.core.executor.worker.runner.drafting.proposer = Drawing(llm)
    return llm


@pytest.fixture(scope="module")
def plain():
    return make(None)


@pytest.fixture(scope="module")
def found():
    return make("ngram")


@pytest.fixture(scope="module")
def drawn():
    return make("drawn")


@pytest.fixture(scope="module")
def model():
    """Drafts drawn by a draft model."""
    return make("model")


def ask(llm: LLM, way: str, first_seed: int) -> tuple[Counter, float]:
    """Return the count of each answer, and the share of accepted drafts."""
    defaults = {"temperature": 1.0, "max_tokens": 4, "ignore_eos": True, "detokenize": False}
    seeds = range(first_seed, first_seed + NUM_ANSWERS)
    params = [SamplingParams(**{**defaults, **WAYS[way]}, seed=seed) for seed in seeds]
    outputs = llm.generate([PROMPT] * NUM_ANSWERS, params, use_tqdm=False)
    num_drafted = sum(output.metrics.num_draft_tokens for output in outputs)
    num_accepted = sum(output.metrics.num_accepted_tokens for output in outputs)
    return Counter(tuple(output.outputs[0].token_ids) for output in outputs), num_accepted / max(num_drafted, 1)


def p_value(counts: Counter, others: Counter) -> float:
    """Return the p-value of a chi-square test that both have one distribution; rare answers are merged."""
    cells = {key for key in counts | others if counts[key] + others[key] >= 20}
    assert len(cells) > 4, "they tell nothing"
    table = [[each[key] for key in cells] for each in (counts, others)]
    for row, each in zip(table, (counts, others), strict=True):
        row.append(each.total() - sum(row))
    observed = torch.tensor(table, dtype=torch.float64)
    observed = observed[:, observed.sum(dim=0) > 0]
    expected = observed.sum(dim=0) * observed.sum(dim=1, keepdim=True) / observed.sum()
    chi_square = ((observed - expected) ** 2 / expected).sum()
    return torch.special.gammaincc(torch.tensor((observed.shape[1] - 1) / 2).double(), chi_square / 2).item()


@pytest.fixture(scope="module")
def expected(plain):
    """Answers without drafts, with other seeds."""
    return functools.cache(lambda way: ask(plain, way, 1_000_000)[0])


@pytest.mark.turn(8)
@pytest.mark.sweep(72)
@pytest.mark.parametrize("drafts", ["found", "drawn", "model"])
@pytest.mark.parametrize("way", WAYS)
def test_rejection_sampling_keeps_distribution_of_answers(request, expected, drafts, way):
    counts, share = ask(request.getfixturevalue(drafts), way, 0)
    assert 0.02 < share < 0.98
    assert p_value(counts, expected(way)) > LEAST_P


@pytest.mark.turn(12)
def test_cutting_drafts_by_their_tokens_changes_distribution(drawn, expected, monkeypatch):
    """Exact verification drops them, and there it makes no difference."""
    cut = Drafting._cut

    def cut_all(drafting: Drafting, task, drafts: list[int]) -> list[int]:
        probs, drafting.draft_probs = drafting.draft_probs, {}
        try:
            return cut(drafting, task, drafts)
        finally:
            drafting.draft_probs = probs

    assert p_value(ask(drawn, "stop", 0)[0], expected("stop")) > LEAST_P
    monkeypatch.setattr(Drafting, "_cut", cut_all)
    assert p_value(ask(drawn, "stop", 0)[0], expected("stop")) < LEAST_P


@pytest.mark.turn(12)
@pytest.mark.parametrize("drafts", ["found", "drawn", "model"])
def test_greedy_and_undrafted_requests_equal_run_without_drafts(request, plain, drafts):
    """The same holds for requests without drafts, and for the log probabilities of any answer."""
    llm = request.getfixturevalue(drafts)
    greedy = [SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=2) for _ in PROMPTS]
    without = [
        SamplingParams(seed=seed, max_tokens=8, ignore_eos=True, logprobs=1, num_speculative_tokens=0)
        for seed, _ in enumerate(PROMPTS)
    ]
    for params in (greedy, without):
        got, right = (each.generate(PROMPTS, params, use_tqdm=False) for each in (llm, plain))
        assert [each.outputs[0].token_ids for each in got] == [each.outputs[0].token_ids for each in right]
        assert [each.outputs[0].logprobs for each in got] == [each.outputs[0].logprobs for each in right]
    assert right[0].metrics.num_draft_tokens == got[0].metrics.num_draft_tokens == 0


@needs_kernels
def test_logprobs_of_accepted_drafts_are_target_logprobs(drawn, plain):
    params = SamplingParams(seed=3, temperature=1.5, top_k=9, max_tokens=12, ignore_eos=True, logprobs=0)
    (output,) = drawn.generate(PROMPT, params, use_tqdm=False)
    answer = output.outputs[0]
    whole = {"prompt_token_ids": PROMPT["prompt_token_ids"] + answer.token_ids}
    (scored,) = plain.generate(whole, SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    right = scored.prompt_logprobs[-len(answer.token_ids) :]
    assert [position[token].logprob for position, token in zip(answer.logprobs, answer.token_ids, strict=True)] == [
        position[token].logprob for position, token in zip(right, answer.token_ids, strict=True)
    ]


def test_finished_or_aborted_request_releases_draft_probs(drawn):
    engine = drawn.llm_engine
    kept = engine.core.executor.worker.runner.drafting.draft_probs
    for name in ("a", "b"):
        engine.add_request(name, PROMPT, SamplingParams(seed=1, max_tokens=9, ignore_eos=True))
    engine.step()
    engine.step()
    assert set(kept) == {"a", "b"}
    engine.abort_request("a")
    engine.step()  # returns the end of the request
    engine.step()
    assert set(kept) == {"b"}
    while engine.has_unfinished_requests():
        engine.step()
    engine.step()
    assert not kept


def test_nan_logits_end_only_their_request(found, monkeypatch):
    engine = found.llm_engine
    runner = engine.core.executor.worker.runner
    compute = runner._compute_logits

    def broken(hidden):
        logits = compute(hidden)
        logits[-1, 5] = torch.nan
        return logits

    for name in ("a", "b"):
        engine.add_request(name, PROMPT, SamplingParams(seed=1, max_tokens=9, ignore_eos=True, top_k=4))
    engine.step()
    monkeypatch.setattr(runner, "_compute_logits", broken)
    told = []
    while engine.has_unfinished_requests():
        told += [output for output in engine.step() if output.finished]
        if told:
            monkeypatch.setattr(runner, "_compute_logits", compute)
    assert sorted(output.error or "" for output in told) == ["", "the logits are NaN"]


def test_unknown_verification_option_is_refused():
    with pytest.raises(ConfigError, match="verification of speculative_config must be one of exact, rejection"):
        SpeculativeConfig.parse({"method": "ngram", "verification": "typical"})
    assert SpeculativeConfig(method="ngram").verification == "exact"


def test_memory_plan_includes_draft_distributions(plain, found):
    """A row of float32 for each draft, and a slice in float64; none if verification is exact."""
    exact, rejection = (each.llm_engine.core.executor.worker for each in (plain, found))
    vocab_size = rejection.model.architecture.vocab_size
    more = rejection._scratch_bytes(1 << 20) - exact._scratch_bytes(1 << 20) - rejection.proposer.num_bytes
    assert more >= 192 * 3 * vocab_size * 4 + 33 * vocab_size * 8
    assert ExactVerification(exact.kernels).num_bytes(100, vocab_size) == 0
