"""Typical sampling compared with the warpers of transformers, which TGI's are built on."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from kernels_available import COMPILED
from sdks import transformers

from octavo.kernels import create_kernels
from octavo.sampling_params import SamplingParams
from octavo.worker import typical
from octavo.worker.typical import keep_typical

BACKENDS = ["reference", *(["cpu"] if COMPILED else [])]


@pytest.fixture(params=BACKENDS)
def kernels(request):
    return create_kernels(torch.device("cpu"), request.param)


def kept_by_theirs(row: torch.Tensor, params: SamplingParams) -> list[int]:
    theirs = transformers.generation.logits_process
    scores = row.double()[None] / params.temperature
    warpers = [theirs.TypicalLogitsWarper(mass=params.typical_p)]
    if params.top_p < 1.0:
        warpers.insert(0, theirs.TopPLogitsWarper(top_p=params.top_p))
    if params.top_k:
        warpers.insert(0, theirs.TopKLogitsWarper(top_k=params.top_k))
    if params.min_p:
        warpers.insert(0, theirs.MinPLogitsWarper(min_p=params.min_p))
    for warper in warpers:
        scores = warper(None, scores)
    return (scores[0] > -math.inf).nonzero().flatten().tolist()


@pytest.mark.sweep(8)
@pytest.mark.parametrize("first_look", [1024, 3])
def test_typical_sampling_keeps_same_tokens_as_transformers(monkeypatch, kernels, first_look):
    monkeypatch.setattr(typical, "_FIRST_LOOK", first_look)
    sizes = set()
    for seed, (mass, top_k, top_p, min_p) in enumerate(
        itertools.product((0.2, 0.6, 0.95), (0, 1, 7, 2000), (1.0, 0.9, 0.3), (0.0, 0.02))
    ):
        generator = torch.Generator().manual_seed(seed)
        spread = (0.5, 3.0, 8.0)[seed % 3]
        row = torch.randn(2500, generator=generator) * spread
        params = SamplingParams(temperature=1.3, typical_p=mass, top_k=top_k, top_p=top_p, min_p=min_p)
        changed = row.clone()
        keep_typical(changed, params, kernels)
        kept = (changed > -math.inf).nonzero().flatten().tolist()
        assert kept == kept_by_theirs(row, params), params
        assert torch.equal(changed[kept], row[kept])
        sizes.add(len(kept))
    assert len(sizes) > 20


def test_typical_sampling_may_exclude_likeliest_token(kernels):
    """This is the purpose of typical sampling: the other tokens have most of the probability."""
    row = torch.tensor([0.30, *[0.07] * 10]).log()
    keep_typical(row, SamplingParams(temperature=1.0, typical_p=0.6), kernels)
    assert (row > -math.inf).tolist() == [False, *[True] * 10]


def test_typical_sampling_does_not_change_empty_or_nan_rows(kernels):
    params = SamplingParams(temperature=1.0, typical_p=0.5, top_p=0.5, top_k=2, min_p=0.1)
    for row in (torch.full((9,), -math.inf), torch.tensor([1.0, math.nan, 2.0])):
        changed = row.clone()
        keep_typical(changed, params, kernels)
        assert torch.equal(changed.nan_to_num(7.0), row.nan_to_num(7.0))
    far = torch.tensor([1000.0, -1000.0, -math.inf])
    keep_typical(far, params, kernels)
    assert far.tolist() == [1000.0, -math.inf, -math.inf]


def test_typical_p_does_not_change_greedy_request(kernels):
    row = torch.tensor([0.30, *[0.07] * 10]).log()
    changed = row.clone()
    keep_typical(changed, SamplingParams(temperature=0.0, typical_p=0.6), kernels)
    assert torch.equal(changed, row)
