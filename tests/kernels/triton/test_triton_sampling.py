"""Sampled tokens, the largest logits of rows and accepted drafts have the bits of the other backends."""

import contextlib
from dataclasses import fields

import pytest
import torch
from broken_kernels import NothingRuns, broken
from test_rejection import (
    test_rejection_sample_equals_scalar_definition,
    test_requests_may_have_different_numbers_of_drafts,
    test_target_token_replaces_first_mismatching_draft,
)
from test_sampling import (
    one_by_one,
    rows_of,
    test_greedy_sampling_breaks_ties_by_lowest_id,
    test_top_tokens_rank_nan_last,
)
from test_sampling import test_row_without_valid_logits_samples_minus_one as of_rows_that_name_no_token
from triton_interpreter import kernels_device

from octavo.kernels import SamplingRows
from octavo.kernels.noise import gumbel_noise
from octavo.kernels.reference import ReferenceKernels, kept_tokens

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

from octavo.kernels.triton import backend, noise, selection  # noqa: E402  once there is Triton

__all__ = [
    "test_greedy_sampling_breaks_ties_by_lowest_id",
    "test_rejection_sample_equals_scalar_definition",
    "test_requests_may_have_different_numbers_of_drafts",
    "test_target_token_replaces_first_mismatching_draft",
    "test_top_tokens_rank_nan_last",
]


# The interpreter uses numpy, which warns of intended infinities.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")


def on_the_cpu(sample, logits, rows):
    """Return the result of a definition in plain torch on the CPU, which every device must match bit for bit."""
    with torch.device("cpu"):
        return sample(logits.cpu(), SamplingRows(*(getattr(rows, each.name).cpu() for each in fields(rows))))


@pytest.mark.sweep(16)  # the interpreter takes a second each
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("filters", [{}, {"top_k": 20}, {"top_p": 0.99}, {"min_p": 0.01}], ids=str)
def test_triton_row_without_valid_logits_samples_minus_one(kernels, temperature, filters):
    of_rows_that_name_no_token(kernels, temperature, filters)


@pytest.mark.sweep(48)
@pytest.mark.parametrize("vocab", [1, 15, 64, 333])
@pytest.mark.parametrize("spread", [0.0, 1.0, 30.0])
def test_triton_sample_equals_scalar_definition(kernels, generator, vocab, spread):
    n = 6
    logits = (torch.randn(n, vocab, generator=generator) * spread * 4).round() / 4  # many ties
    uniform = torch.rand(4, n, generator=generator)
    rows = rows_of(
        n,
        temperature=torch.where(uniform[0] < 0.1, 0.0, uniform[0] * 2),
        top_k=torch.where(uniform[1] < 0.5, 0, (uniform[1] * 40).int()),
        top_p=torch.where(uniform[2] < 0.3, 1.0, uniform[2]),
        min_p=torch.where(uniform[3] < 0.5, 0.0, uniform[3] / 4),
    )
    expected = on_the_cpu(one_by_one, logits, rows)
    assert torch.equal(kernels.sample(logits, rows).cpu(), expected)
    assert torch.equal(kernels.sample(logits[3:4], rows.take(slice(3, 4))).cpu(), expected[3:4])


@pytest.mark.slow
def test_triton_sample_equals_reference(kernels, generator):
    """For rows of several pieces, with all filters."""
    n = 12
    logits = torch.randn(n, 20_011, generator=generator) * 4
    logits[1] = 0.5
    logits[2] = logits[2].round()
    logits[3, 5:] = -torch.inf
    rows = rows_of(
        n,
        temperature=torch.tensor([1.0, 0.7, 0.0, 1.0, 0.01, 50.0] * 2),
        top_k=torch.tensor([0, 50, 0, 0, 3, 0, 1000, 0, 0, 1, 0, 0]),
        top_p=torch.tensor([1.0, 1.0, 1.0, 0.5, 0.9, 0.99, 0.9, 0.3, 1.0, 1.0, 1e-6, 1.0]),
        min_p=torch.tensor([0.0] * 9 + [0.1, 0.05, 0.9]),
    )
    expected = on_the_cpu(ReferenceKernels().sample, logits, rows)
    assert torch.equal(kernels.sample(logits, rows).cpu(), expected)


def test_sampling_noise_differs_per_token(kernels):
    """Logits of zero show the noise alone: after the winner is removed, the next token wins."""
    rows = rows_of(2)
    expected = gumbel_noise(rows.seed, rows.position, rows.sample_index, 1030)
    logits = torch.zeros(2, 1030)
    for chosen in expected.sort(dim=1, descending=True, stable=True).indices[:, :2].T:
        assert torch.equal(kernels.sample(logits, rows), chosen)
        logits.scatter_(1, chosen[:, None], -torch.inf)


@triton.jit
def _noise(
    seed_ptr, position_ptr, sample_index_ptr, out_ptr, words: tl.constexpr, gumbel: tl.constexpr, COUNT: tl.constexpr
):
    row, counter = tl.program_id(0), tl.arange(0, COUNT)
    seed, position = tl.load(seed_ptr + row), tl.load(position_ptr + row)
    word_0, word_1, word_2, word_3 = words(counter, seed, position, tl.load(sample_index_ptr + row))
    place = out_ptr + row * 4 * COUNT + counter // 16 * 64 + counter % 16
    tl.store(place, gumbel(word_0))
    tl.store(place + 16, gumbel(word_1))
    tl.store(place + 32, gumbel(word_2))
    tl.store(place + 48, gumbel(word_3))


def has_the_bits_of_the_definition(module):
    seed = torch.tensor([0, -1, 2**63 - 1, -(2**63), 0x0123456789ABCDEF])
    position = torch.tensor([0, 1, 131071, 2**31 - 1, 5], dtype=torch.int32)
    places = seed, position, torch.tensor([0, 1, 2, 0, 1], dtype=torch.int32)
    out = torch.empty(5, 1024)
    _noise[(5,)](*places, out, module.noise_words, module.word_to_gumbel, COUNT=256, enable_fp_fusion=False)
    return torch.equal(out, gumbel_noise(*places, 1024))


def test_triton_noise_has_bits_of_reference(kernels):
    assert has_the_bits_of_the_definition(noise)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("tl.static_range(10)", "tl.static_range(9)"),
        ("(seed >> 32) & 0xFFFFFFFF", "seed & 0xFFFFFFFF"),
        ("nothing + sample_index.to(tl.uint32)", "nothing"),
        ("tl.where(is_upper, ~signed, signed)", "tl.where(is_upper, -signed, signed)"),
        ("9.0580006145e-06", "9.05e-06"),
        ("1.0 / 13.0", "1.0 / 12.0"),
    ],
)
def test_broken_noise_is_detected(kernels, tmp_path, old, new):
    assert not has_the_bits_of_the_definition(broken(tmp_path, "noise", old, new))


@contextlib.contextmanager
def small_blocks(layers=8):
    """Divide short rows into several blocks for filters, and into several pieces for the choice."""
    with pytest.MonkeyPatch.context() as context:
        for name, size in {"_CUT_BLOCK": 128, "_LAYERS": layers, "_COUNTERS": 16, "_PIECE": 128}.items():
            context.setattr(backend.sampling, name, size)
        yield


def kept_by(kernels, logits, rows):
    """Return which tokens the filters keep."""
    cuts = []

    class Recorded(NothingRuns):
        def __missing__(self, _grid):
            return lambda *arguments, **_options: cuts.extend(arguments[5:7])

    with pytest.MonkeyPatch.context() as context:
        context.setattr(backend.sampling, "_best_of_piece", Recorded())
        context.setattr(backend.sampling, "_best_of_row", NothingRuns())
        kernels.sample(logits, rows)
    keys, ids = (cut.cpu().unsqueeze(1) for cut in cuts)
    bits = (logits.cpu() / rows.temperature.cpu()[:, None] + 0.0).view(torch.int32)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    with torch.device("cpu"):
        return (key > keys) | ((key == keys) & (torch.arange(logits.shape[1]) <= ids))


def assert_tokens_of_reference(kernels, logits, rows):
    expected = on_the_cpu(lambda given, of: kept_tokens(given / of.temperature[:, None], of), logits, rows)
    assert torch.equal(kept_by(kernels, logits, rows), expected)


FILTERED = {  # values; top_k, top_p, min_p. Blocks have 128 tokens
    "small k": ("normal", (7, 0.9, 0.0)),
    "k of 1": ("normal", (1, 0.5, 0.0)),
    "k of half a block": ("normal", (64, 1.0, 0.0)),
    "k too large to pack": ("normal", (65, 0.8, 0.0)),
    "k of the vocabulary": ("normal", (517, 0.6, 0.0)),
    "k after min_p": ("normal", (40, 1.0, 0.3)),
    "all filters": ("normal", (40, 0.8, 0.01)),
    "k among ties": ("rounded", (9, 1.0, 0.0)),
    "p among ties": ("rounded", (30, 0.95, 0.0)),
    "p alone": ("normal", (0, 0.7, 0.0)),
    "p of most tokens": ("flat", (0, 0.9, 0.0)),
    "p after min_p": ("normal", (0, 0.9, 0.05)),
    "equal values": ("equal", (20, 0.5, 0.0)),
    "five in a lane": ("in one lane", (3, 0.9, 0.0)),
    "infinite": ("infinite", (5, 0.9, 0.0)),
    "fewer than k": ("few", (20, 0.9, 0.0)),
}


def filtered_row(name):
    """Return 517 logits, which are four blocks and a part, and the row's parameters."""
    generator = torch.Generator().manual_seed(1)
    with torch.device("cpu"):
        logits = torch.randn(517, generator=generator) * 3
        values, (top_k, top_p, min_p) = FILTERED[name]
        if values == "rounded":
            logits = logits.round()
        elif values in ("flat", "equal"):
            logits *= 0.03 if values == "flat" else 0.0
        elif values == "in one lane":
            logits[4::128] = torch.tensor([20.0, 21.0, 19.0, 20.5, 20.0])
        elif values == "infinite":
            logits[[3, 300]] = torch.inf
        elif values == "few":
            logits[torch.arange(517) % 100 != 7] = -torch.inf
        return logits[None].to(kernels_device()), rows_of(1, temperature=0.8, top_k=top_k, top_p=top_p, min_p=min_p)


def layers_of(name):
    return [1, 8] if name in ("five in a lane", "p among ties") else [8]


@pytest.mark.sweep(16)
@pytest.mark.parametrize(("name", "layers"), [(name, layers) for name in FILTERED for layers in layers_of(name)])
def test_filters_keep_tokens_of_reference(kernels, name, layers):
    with small_blocks(layers=layers):
        assert_tokens_of_reference(kernels, *filtered_row(name))


def test_filters_of_large_vocabulary_keep_tokens_of_reference(kernels, generator):
    rows = rows_of(1, temperature=0.6, top_k=20, top_p=0.95)
    assert_tokens_of_reference(kernels, torch.randn(1, 151_936, generator=generator) * 4, rows)


@pytest.mark.parametrize(
    ("name", "blocks"), [("small k", 8), ("p alone", 8 + 5), ("k too large to pack", 4 * 5 + 8), ("k after min_p", 8)]
)
def test_filters_seldom_read_whole_row(kernels, monkeypatch, name, blocks):
    """After the pass that finds the largest value: one that packs tokens, and one for the sum that top_p refers to. It
    packs eight blocks, of which three are empty. If k is too large, four passes find the k-th value. Then top_p reads
    only packed tokens.
    """
    reads_row, scaled_keys = [], selection.scaled_keys

    def counting(*arguments):
        reads_row.append(not arguments[4] > 0)
        return scaled_keys(*arguments)

    monkeypatch.setattr(selection, "scaled_keys", counting)
    with small_blocks():
        kept_by(kernels, *filtered_row(name))
    assert sum(reads_row) == blocks


@pytest.mark.parametrize("name", ["top_k", "top_p"])
def test_filter_keeps_exact_cutoff_among_ties(kernels, name):
    """The noise prefers the last token that passes the filter, or the first that does not. Tokens before and after it
    tie.
    """
    with torch.device("cpu"):
        logits = (torch.randn(150, generator=torch.Generator().manual_seed(0)) * 2).round()
        order = logits.sort(descending=True, stable=True).indices
        seeds, ranks = seeds_that_choose_among_equals(logits, order)
        kept = ranks + torch.tensor([1, 0])
        mass = (logits[order].double() / 4).exp().cumsum(0)
        border = kept if name == "top_k" else (mass[kept - 2] + mass[kept - 1]) / 2 / mass[-1]
        rows = rows_of(2, temperature=4.0, **{name: border})
        rows.seed.copy_(seeds)
        rows.position.zero_()
        rows.sample_index.zero_()
        expected = one_by_one(logits.repeat(2, 1), rows)
    assert (expected == order[ranks]).tolist() == [True, False]
    with small_blocks():
        sampled = kernels.sample(logits.repeat(2, 1).to(kernels_device()), rows)
    assert torch.equal(sampled.cpu(), expected)


def seeds_that_choose_among_equals(logits, order):
    """Return two seeds, and the ranks of their choices: tokens in another block tie before it, and one after it."""
    seeds, ids = torch.arange(500), torch.arange(len(logits))
    chosen = (logits / 4 + gumbel_noise(seeds, seeds * 0, seeds * 0, len(logits))).argmax(dim=1)
    ties = logits == logits[chosen, None]
    is_among = (ties & (ids < 128)).any(dim=1) & (chosen >= 128) & (ties & (ids > chosen[:, None])).any(dim=1)
    found = is_among.nonzero()[:2, 0]
    return found, order.argsort()[chosen[found]]


def test_greedy_ties_across_pieces_choose_lowest_id(kernels):
    logits = torch.zeros(4, 129)
    logits[0, 128] = 9.0  # alone in the last piece
    logits[1, [3, 19, 67, 128]] = 9.0  # in one lane, and in two pieces
    logits[2, 7] = 9.0
    logits[3, 128] = torch.nan
    rows = rows_of(4, temperature=torch.tensor([0.0, 0.0, 50.0, 0.0]), top_k=torch.tensor([0, 0, 1, 0]))
    with small_blocks():
        assert kernels.sample(logits, rows).tolist() == [128, 3, 7, -1]


@pytest.mark.parametrize(("vocab", "k"), [(1, 1), (50, 50), (333, 7), (3000, 100)])
def test_triton_top_tokens_equal_reference(kernels, generator, vocab, k):
    values = (torch.randn(5, vocab, generator=generator) * 8).round() / 4
    values[1] = 0.0
    values[1, ::3] = -0.0  # equal to 0.0
    values[2, vocab // 2 :] = -torch.inf
    values[3, 0] = torch.inf
    values[4, vocab // 2] = torch.nan
    largest, ids = kernels.top_tokens(values, k)
    expected, order = ReferenceKernels().top_tokens(values, k)
    assert torch.equal(largest, expected)
    assert torch.equal(ids, order)
    alone, alone_ids = kernels.top_tokens(values[1:2], k)
    assert torch.equal(alone, expected[1:2])
    assert torch.equal(alone_ids, order[1:2])


def test_rejection_sample_refuses_request_without_logits_row(kernels):
    with pytest.raises(IndexError, match="no row of logits, or more than 2 drafts"):
        kernels.rejection_sample(torch.tensor([1]), torch.tensor([1]), torch.tensor([0, 0, 1], dtype=torch.int32), 2)
