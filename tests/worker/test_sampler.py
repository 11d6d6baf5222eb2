from __future__ import annotations

import collections
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from kernels_available import COMPILED

from octavo.kernels import create_kernels
from octavo.kernels.interface import SamplingRows
from octavo.sampling_params import SamplingParams, StructuredOutputsParams
from octavo.worker.host_copies import SharedMemory
from octavo.worker.sampler import Sampled, Sampler, SampleTask, SamplingColumns

VOCAB = 300
BACKENDS = ["reference", *(["cpu"] if COMPILED else [])]


@dataclass(frozen=True)
class Request:
    """A request as the worker knows it."""

    params: SamplingParams
    seed: int
    known: np.ndarray
    num_prompt: int
    stop_token_ids: frozenset[int]


class RequestSampler:
    """Puts requests into columns and samples a row of logits for each; requests with special parameters get a task."""

    def __init__(self, backend: str) -> None:
        self.sampler = Sampler(create_kernels(torch.device("cpu"), backend))

    def sample(self, logits: torch.Tensor, requests: list[Request]) -> Sampled:
        columns = SamplingColumns(len(requests) + 1, SharedMemory())
        rows = np.arange(len(requests), 0, -1)
        for row, request in zip(rows, requests, strict=True):
            columns.set(row, request.params, request.seed, 0)
        tasks = {
            i: SampleTask(each.params, each.stop_token_ids, each.known, each.num_prompt)
            for i, each in enumerate(requests)
            if not columns.is_plain[rows[i]]
        }
        gathered = columns.gather(rows, torch.tensor([len(r.known) for r in requests], dtype=torch.int32))
        return self.sampler.choose(logits, gathered, tasks).read()


@pytest.fixture(params=BACKENDS)
def sampler(request):
    return RequestSampler(request.param)


def request_of(known=(1, 2, 3), num_prompt=3, seed=0, stop_token_ids=(), **params) -> Request:
    params = SamplingParams(**{"temperature": 0.0, **params})
    return Request(params, seed, np.array(known, dtype=np.int64), num_prompt, frozenset(stop_token_ids))


@pytest.mark.parametrize(
    "asked",
    [
        {"logprobs": 1},
        {"logprobs": 0},
        {"typical_p": 0.5},
        {"min_tokens": 1},
        {"allowed_token_ids": [1]},
        {"logit_bias": {1: 2.0}},
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": -0.1},
        {"structured_outputs": StructuredOutputsParams(regex="a")},
    ],
)
def test_options_beyond_sampling_kernel_make_row_special(asked):
    columns = SamplingColumns(2, SharedMemory())
    columns.set(0, SamplingParams(temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, max_tokens=5), 0, 0)
    columns.set(1, SamplingParams(max_tokens=5, **asked), 0, 0)
    assert columns.is_plain.tolist() == [True, False]
    reads = any("penalty" in name or name == "structured_outputs" for name in asked)
    assert columns.reads_tokens.tolist() == [False, reads]
    columns.set(1, SamplingParams(), 0, 0)  # the next request in that row
    assert columns.is_plain.all()
    assert not columns.reads_tokens.any()


def test_sampling_columns_are_gathered_again_after_changes():
    columns = SamplingColumns(3, SharedMemory())
    for row, temperature in enumerate((0.5, 1.0, 1.5)):
        columns.set(row, SamplingParams(temperature=temperature, top_k=row), seed=row, sample_index=row)

    def gather(rows: list[int], num_tokens: list[int]) -> SamplingRows:
        return columns.gather(np.array(rows), torch.tensor(num_tokens))

    first = gather([0, 2], [1, 21])
    assert (first.temperature.tolist(), first.top_k.tolist()) == ([0.5, 1.5], [0, 2])
    assert (first.seed.tolist(), first.sample_index.tolist()) == ([0, 2], [0, 2])
    assert first.position.tolist() == [1, 21]
    again = gather([0, 2], [2, 22])
    assert again.position.tolist() == [2, 22]
    assert again.seed is first.seed
    other = gather([2, 0], [22, 2])
    assert (other.temperature.tolist(), other.position.tolist()) == ([1.5, 0.5], [22, 2])
    columns.set(2, SamplingParams(temperature=2.0, top_k=7), seed=9, sample_index=0)
    changed = gather([2, 0], [23, 3])
    assert (changed.temperature.tolist(), changed.top_k.tolist()) == ([2.0, 0.5], [7, 0])
    assert (changed.seed.tolist(), changed.sample_index.tolist()) == ([9, 0], [0, 0])
    assert changed.position.tolist() == [23, 3]


def logits(seed: int = 0, rows: int = 1) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def test_greedy_sampling_takes_lowest_id_of_equal_maxima(sampler):
    row = logits()
    row[0, [40, 17, 200]] = 50.0
    assert sampler.sample(row, [request_of()]).token_ids == [17]


def test_f32_nan_row_fails_alone(sampler):
    rows = logits(rows=3)
    best = rows[0].argmax().item(), rows[2].argmax().item()
    rows[1, 7] = torch.nan
    assert sampler.sample(rows, [request_of(), request_of(), request_of()]).token_ids == [best[0], -1, best[1]]


def test_logit_bias_and_allowed_token_ids_change_choice(sampler):
    assert sampler.sample(logits(), [request_of(logit_bias={9: 100.0})]).token_ids == [9]
    row = logits()
    allowed = [5, 70, 123]
    expected = max(allowed, key=lambda token_id: row[0, token_id].item())
    assert sampler.sample(row, [request_of(allowed_token_ids=allowed)]).token_ids == [expected]


def test_min_tokens_excludes_stop_tokens(sampler):
    row = logits()
    best, second = row[0].topk(2).indices.tolist()
    early = request_of(known=(1, 2), num_prompt=2, min_tokens=1, stop_token_ids=[best])
    late = request_of(known=(1, 2, 9), num_prompt=2, min_tokens=1, stop_token_ids=[best])
    assert sampler.sample(row.clone(), [early]).token_ids == [second]
    assert sampler.sample(row.clone(), [late]).token_ids == [best]


def test_underflowing_penalty_keeps_excluded_tokens_excluded(sampler):
    params = {"allowed_token_ids": [3, 4], "repetition_penalty": 1e-320, "temperature": 0.0}
    row = torch.tensor([[5.0, 4.0, 3.0, 2.0, 1.0]])
    assert sampler.sample(row, [request_of(known=[0, 1, 2], **params)]).token_ids == [3]


def test_penalties_change_logits_by_defined_formulas(sampler):
    row = logits(3)
    known = [4, 4, 8, 8, 8, 10]
    params = {"repetition_penalty": 1.7, "presence_penalty": 0.6, "frequency_penalty": 0.4}
    expected = row[0].clone()
    for token_id in set(known):
        value = expected[token_id]
        expected[token_id] = value / 1.7 if value > 0 else value * 1.7
    for token_id, count in collections.Counter(known[2:]).items():
        expected[token_id] -= 0.4 * count + 0.6
    changed = row.clone()
    sampler.sample(changed, [request_of(known=known, num_prompt=2, **params)])
    assert torch.allclose(changed[0], expected)
    assert not torch.equal(changed, row)


def test_keyboard_interrupt_passes_through_logprobs(sampler, monkeypatch):
    def interrupted(*_arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(sampler.sampler, "token_logprobs", interrupted)
    request = Request(SamplingParams(logprobs=1), 1, np.array([1]), 1, frozenset())
    with pytest.raises(KeyboardInterrupt):
        sampler.sample(torch.zeros(1, VOCAB), [request])


def test_logprobs_are_computed_from_raw_logits(sampler):
    row = logits(5)
    reference = torch.log_softmax(row[0], dim=-1)
    sampled = sampler.sample(row.clone(), [request_of(temperature=3.0, top_k=2, logit_bias={11: 100.0}, logprobs=4)])
    entry = sampled.logprobs[0]
    assert sampled.token_ids == [11]
    assert entry.token_ids == [11, *reference.topk(4).indices.tolist()]
    assert entry.logprobs[0] == reference[11].item()
    assert entry.logprobs[1:] == reference.topk(4).values.tolist()
    assert entry.rank == 1 + int((reference > reference[11]).sum())


@pytest.mark.sweep(24)
@pytest.mark.parametrize(
    ("params", "keep"),
    [
        ({}, lambda p: p),
        ({"top_k": 5}, lambda p: torch.where(p >= p.sort(descending=True).values[4], p, 0.0)),
        ({"top_p": 0.6}, lambda p: torch.where(p >= nucleus(p, 0.6), p, 0.0)),
        ({"min_p": 0.2}, lambda p: torch.where(p >= 0.2 * p.max(), p, 0.0)),
        ({"typical_p": 0.5, "top_p": 0.8}, lambda p: typical(p, 0.8, 0.5)),
    ],
)
def test_sampler_choices_follow_filtered_distribution(sampler, params, keep):
    draws, vocab, temperature = 2000, 24, 1.5
    row = torch.randn(1, vocab, generator=torch.Generator().manual_seed(2)) * 2
    expected = keep(torch.softmax(row[0] / temperature, dim=-1))
    expected /= expected.sum()
    tasks = [request_of(seed=seed, temperature=temperature, **params) for seed in range(draws)]
    counts = torch.bincount(torch.tensor(sampler.sample(row.repeat(draws, 1), tasks).token_ids), minlength=vocab)
    assert counts[expected == 0].sum() == 0
    kept = expected > 0
    chi_square = ((counts[kept] - draws * expected[kept]) ** 2 / (draws * expected[kept])).sum().item()
    # 23 degrees of freedom: above 50 once in a thousand, and the seeds are fixed.
    assert chi_square < 50


def nucleus(probabilities: torch.Tensor, top_p: float) -> float:
    ordered = probabilities.sort(descending=True).values
    return ordered[int((ordered.cumsum(0) < top_p).sum())].item()


def typical(probabilities: torch.Tensor, top_p: float, mass: float) -> torch.Tensor:
    left = torch.where(probabilities >= nucleus(probabilities, top_p), probabilities, 0.0)
    left /= left.sum()
    entropy = -torch.special.xlogy(left, left).sum()
    distance = (-left.log() - entropy).abs()
    order = distance.argsort()
    last = int((left[order].cumsum(0) < mass).sum())
    return torch.where(distance <= distance[order[last]], left, 0.0)


def test_token_depends_only_on_logits_seed_and_position(sampler):
    row = logits(1)

    def draw(**changes) -> int:
        base = {"known": (1, 2, 3), "seed": 5}
        return sampler.sample(row.clone(), [request_of(temperature=2.0, **{**base, **changes})]).token_ids[0]

    assert draw() == draw()
    assert draw(known=(7, 8, 9)) == draw()  # the position counts, not the tokens before it
    assert len({draw(seed=seed) for seed in range(20)}) > 10
    assert len({draw(known=range(length), num_prompt=1) for length in range(1, 20)}) > 10
    assert draw(seed=2**64 - 1) == draw(seed=-1)


@pytest.mark.skipif(not COMPILED, reason="octavo was installed without its compiled kernels")
def test_all_backends_draw_same_tokens():
    rows = logits(9, rows=200)
    ways = [{}, {"top_k": 7}, {"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 50, "top_p": 0.7, "min_p": 0.01}]
    ways += [{"typical_p": 0.8}, {"typical_p": 0.6, "top_p": 0.9}]
    tasks = [request_of(temperature=0.5 + i % 5, seed=i * 7919, **ways[i % len(ways)]) for i in range(200)]
    drawn = [RequestSampler(backend).sample(rows.clone(), tasks).token_ids for backend in BACKENDS]
    assert drawn[0] == drawn[1]
