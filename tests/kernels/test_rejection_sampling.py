"""rejection_sampling_batched: drafts do not change the distribution of answers, and wrong versions are detected."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.kernels import SamplingRows, rejection_sampling
from octavo.kernels.noise import RandomStream, uniform_noise
from octavo.kernels.rejection_sampling import draw, filtered_probs, rejection_sampling_batched

NUM_ROWS = 200_000
NUM_DRAFTS = 3
LEAST_P = 1e-4
START = 0  # the token before the first one


def rows_of(seed: torch.Tensor, position: torch.Tensor | int, **filters: float) -> SamplingRows:
    n = len(seed)
    asked = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **filters}
    return SamplingRows(
        **{name: torch.full((n,), value, dtype=torch.float32) for name, value in asked.items() if name != "top_k"},
        top_k=torch.full((n,), asked["top_k"], dtype=torch.int32),
        seed=seed,
        sample_index=torch.zeros(n, dtype=torch.int32),
        position=torch.zeros(n, dtype=torch.int32) + position,
    )


def uniform(rows: SamplingRows, stream: RandomStream) -> torch.Tensor:
    return uniform_noise(rows.seed, rows.position, rows.sample_index, stream)


@dataclass(frozen=True)
class Chain:
    """A target and a draft model; their next token depends only on the newest one: float64 [vocab, vocab] each.

    q: None drafts the likeliest token. believed: the q that the verification gets, if it is another one.
    """

    p: torch.Tensor
    q: torch.Tensor | None
    believed: torch.Tensor | None = None
    is_stale: bool = False

    @classmethod
    def make(cls, vocab: int, *, drawn: bool = True, **filters: float) -> Chain:
        generator = torch.Generator().manual_seed(vocab)
        p, other = (torch.randn(vocab, vocab, generator=generator) * 1.5 for _ in range(2))
        rows = rows_of(torch.arange(vocab), 0, **filters)
        return cls(filtered_probs(p, rows), filtered_probs(0.6 * p + 0.6 * other, rows) if drawn else None)

    def draft(self, newest: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
        return (
            self.p[newest].argmax(dim=1) if self.q is None else draw(self.q[newest], uniform(rows, RandomStream.DRAFT))
        )

    def overlap(self) -> torch.Tensor:
        """Return the probability that a token is drafted and accepted, by the token before: [vocab, vocab]."""
        if self.q is None:
            return torch.where(self.p == self.p.amax(dim=1, keepdim=True), self.p, 0.0)
        return torch.minimum(self.p, self.q)


def step(
    chain: Chain, verify: Callable, newest: torch.Tensor, position: torch.Tensor, seed: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draft for each request and verify; return the kept tokens and their number."""
    inputs = [newest]
    for i in range(NUM_DRAFTS):
        inputs.append(chain.draft(inputs[-1], rows_of(seed, position + i)))
    draft_ids = torch.stack(inputs, dim=1).flatten()
    steps = torch.arange(NUM_DRAFTS + 1)
    rows = rows_of(seed.repeat_interleave(NUM_DRAFTS + 1), (position[:, None] + steps).flatten())
    target_probs = chain.p[draft_ids]
    believed = chain.q if chain.believed is None else chain.believed
    draft_probs = None if believed is None else believed[draft_ids.roll(1) if chain.is_stale else draft_ids]
    return verify(
        draw(target_probs, uniform(rows, RandomStream.CHOICE)),
        draft_ids,
        torch.arange(len(seed) + 1, dtype=torch.int32) * (NUM_DRAFTS + 1),
        NUM_DRAFTS,
        target_probs=target_probs,
        draft_probs=draft_probs,
        rows=rows,
    )


def p_value(counts: torch.Tensor, probs: torch.Tensor) -> float:
    """Return the p-value of a chi-square test; cells with few expected counts are merged."""
    expected = probs.flatten().double() * counts.sum()
    counts = counts.flatten().double()
    assert counts[expected == 0].sum() == 0, "there are tokens that cannot be"
    is_small = expected < 10
    observed = torch.cat([counts[~is_small], counts[is_small].sum()[None]])
    expected = torch.cat([expected[~is_small], expected[is_small].sum()[None]])
    observed, expected = observed[expected > 0], expected[expected > 0]
    chi_square = ((observed - expected) ** 2 / expected).sum()
    return torch.special.gammaincc(torch.tensor((len(expected) - 1) / 2).double(), chi_square / 2).item()


def p_values(chain: Chain, verify: Callable = rejection_sampling_batched) -> dict[str, float]:
    """Answer many requests; test the first token, the first two, and the number of accepted drafts in a step."""
    vocab = len(chain.p)
    pairs = torch.zeros(vocab * vocab, dtype=torch.int64)
    lengths = torch.zeros(NUM_DRAFTS + 1, dtype=torch.int64)
    for seed in torch.arange(NUM_ROWS).split(25_000):
        position = torch.full_like(seed, 7)
        sampled, num_sampled = step(chain, verify, torch.full_like(seed, START), position, seed)
        lengths += torch.bincount(num_sampled.long() - 1, minlength=NUM_DRAFTS + 1)
        first, second = sampled[:, 0], sampled[:, 1].clone()
        # A request with one token continues after it, at positions with random numbers that rejected drafts have used.
        short = num_sampled == 1
        second[short] = step(chain, verify, first[short], position[short] + 1, seed[short])[0][:, 0]
        pairs += torch.bincount(first * vocab + second, minlength=vocab * vocab)
    at_least = [torch.eye(vocab, dtype=torch.float64)[START]]
    for _ in range(NUM_DRAFTS):
        at_least.append(at_least[-1] @ chain.overlap())
    reached = torch.stack([each.sum() for each in at_least] + [torch.tensor(0.0).double()])
    return {
        "first token": p_value(pairs.view(vocab, vocab).sum(dim=1), chain.p[START]),
        "two tokens": p_value(pairs, chain.p[START, :, None] * chain.p),
        "accepted": p_value(lengths, -reached.diff()),
    }


CASES = {
    "8": Chain.make(8),
    "17": Chain.make(17),
    "32": Chain.make(32),
    "filtered": Chain.make(32, temperature=0.7, top_k=12, top_p=0.9, min_p=0.02),
    "found": Chain.make(8, drawn=False),
}


@pytest.mark.sweep(24)
@pytest.mark.parametrize("case", CASES)
def test_drafts_do_not_change_token_distribution(case):
    found = p_values(CASES[case])
    assert min(found.values()) > LEAST_P, found


def rewritten(old: str, new: str) -> Callable:
    """Return the function of the module with one expression replaced."""
    source = inspect.getsource(rejection_sampling)
    assert source.count(old) == 1
    module = types.ModuleType("rewritten")
    exec(compile(source.replace(old, new), "rewritten", "exec"), module.__dict__)
    return module.rejection_sampling_batched


MUTANTS = {
    "resampled from p": ("(target - draft_probs[at].double()).clamp(min=0.0)", "target"),
    "resampled from q": ("(target - draft_probs[at].double()).clamp(min=0.0)", "draft_probs[at]"),
    "accepted by the numbers of the draft": ("index, RandomStream.ACCEPTANCE", "index, RandomStream.DRAFT"),
    "resampled by the numbers of the draft": ("RandomStream.RESAMPLING)", "RandomStream.DRAFT)"),
    "resampled by the numbers of acceptance": ("RandomStream.RESAMPLING)", "RandomStream.ACCEPTANCE)"),
    "accepted at another position": ("uniform_noise(seed, position, ", "uniform_noise(seed, position * 0, "),
    "accepted the other way round": ("* q < p", "* p < q"),
    "accepted where it is likelier": ("* q < p", "* 0 + q < p"),
    "the last draft is not looked at": ("num_rows.unsqueeze(1) - 1)", "num_rows.unsqueeze(1) - 2)"),
}


@pytest.mark.sweep(24)
@pytest.mark.parametrize("mutant", MUTANTS)
def test_chi_square_test_detects_wrong_verification(mutant):
    assert min(p_values(CASES["8"], rewritten(*MUTANTS[mutant])).values()) < LEAST_P


@pytest.mark.turn(8)
def test_chi_square_test_detects_resampled_greedy_draft():
    verify = rewritten("target.scatter(1, drafts[at].unsqueeze(1), 0.0)", "target")
    assert min(p_values(CASES["found"], verify).values()) < LEAST_P


@pytest.mark.sweep(12)
@pytest.mark.parametrize("wrong", ["stale q", "top_p of the target alone", "top_p of the draft alone"])
def test_chi_square_test_detects_wrong_draft_distribution(wrong):
    plain, filtered = CASES["8"], Chain.make(8, top_p=0.8)
    chain = {
        "stale q": replace(plain, is_stale=True),
        "top_p of the target alone": replace(filtered, q=plain.q, believed=filtered.q),
        "top_p of the draft alone": replace(filtered, believed=plain.q),
    }[wrong]
    assert min(p_values(chain).values()) < LEAST_P


@pytest.mark.turn(12)
def test_top_p_on_target_alone_keeps_target_distribution():
    """Any q is right if it is the one that drafts were drawn from."""
    assert min(p_values(replace(CASES["8"], p=Chain.make(8, top_p=0.8).p)).values()) > LEAST_P


def verify_rows(cases: list[tuple[list[int], list[int], torch.Tensor, torch.Tensor | None]], num_steps: int):
    """Verify requests of (target's choices, drafts, p, q); the input of a first row is an older token."""
    bounds = torch.tensor([0, *(len(chosen) for chosen, *_ in cases)]).cumsum(0).int()
    draft_probs = None if cases[0][3] is None else torch.cat([q for *_, q in cases])
    return rejection_sampling_batched(
        torch.tensor([token for chosen, *_ in cases for token in chosen]),
        torch.tensor([token for _, drafts, *_ in cases for token in [0, *drafts]]),
        bounds,
        num_steps,
        target_probs=torch.cat([p for _, _, p, _ in cases]),
        draft_probs=draft_probs,
        rows=rows_of(torch.arange(int(bounds[-1])) + 5, 3),
    )


def random_probs(n: int, vocab: int = 9) -> torch.Tensor:
    return torch.randn(n, vocab, generator=torch.Generator().manual_seed(n)).double().softmax(dim=1)


def test_batched_verification_equals_verification_of_single_requests():
    """A request in a batch that has room for more drafts gets the tokens that it gets alone."""
    generator = torch.Generator().manual_seed(1)
    cases, rows = [], 0
    for count in (0, 3, 1, 5, 2, 5, 0, 4):
        p, q = (torch.randn(count + 1, 37, generator=generator).double().softmax(dim=1) for _ in range(2))
        drafts = torch.multinomial(q[:count], 1, generator=generator).flatten().tolist() if count else []
        cases.append((list(range(count + 1)), drafts, p, q))
    sampled, num_sampled = verify_rows(cases, 6)
    assert (sampled.dtype, num_sampled.dtype, sampled.shape) == (torch.int64, torch.int32, (8, 7))
    for i, (chosen, drafts, p, q) in enumerate(cases):
        bounds = torch.tensor([0, len(chosen)], dtype=torch.int32)
        noise = rows_of(torch.arange(rows, rows + len(chosen)) + 5, 3)
        alone, count = rejection_sampling_batched(
            torch.tensor(chosen), torch.tensor([0, *drafts]), bounds, 5, target_probs=p, draft_probs=q, rows=noise
        )
        assert sampled[i, :6].tolist() == alone[0].tolist()
        assert sampled[i, num_sampled[i] :].tolist() == [-1] * (7 - int(count))
        accepted, resampled = (uniform(noise, each) for each in (RandomStream.ACCEPTANCE, RandomStream.RESAMPLING))
        expected = []
        for row, draft in enumerate(drafts):
            if accepted[row] >= p[row, draft] / q[row, draft]:
                expected.append(int(draw((p[row] - q[row]).clamp(min=0)[None], resampled[row : row + 1])))
                break
            expected.append(draft)
        expected += chosen[-1:] if expected == drafts else []
        assert (alone[0, :count].tolist(), int(count)) == (expected, len(expected))
        rows += len(chosen)


def test_rejection_at_third_of_five_drafts_keeps_three_tokens():
    p = q = torch.eye(9, dtype=torch.float64)[[4, 5, 6, 7, 8, 0]]
    p = p.clone()
    p[2] = torch.eye(9)[3]
    sampled, num_sampled = verify_rows([([0] * 6, [4, 5, 6, 7, 8], p, q)], 5)
    assert (sampled.tolist(), num_sampled.tolist()) == ([[4, 5, 3, -1, -1, -1]], [3])


def test_mean_tokens_per_step_match_acceptance_formula():
    """Five drafts, each accepted with probability 0.8: (1 - 0.8^6) / (1 - 0.8) = 3.69 tokens a step."""
    requests = 50_000
    num_rows = 6 * requests
    _, num_sampled = rejection_sampling_batched(
        torch.zeros(num_rows, dtype=torch.int64),
        torch.ones(num_rows, dtype=torch.int64),
        torch.arange(requests + 1, dtype=torch.int32) * 6,
        5,
        target_probs=torch.tensor([[0.1, 0.8, 0.1]]).expand(num_rows, -1),
        draft_probs=None,
        rows=rows_of(torch.arange(requests).repeat_interleave(6), torch.arange(6).repeat(requests)),
    )
    assert num_sampled.double().mean().item() == pytest.approx((1 - 0.8**6) / 0.2, rel=0.02)


@pytest.mark.turn(8)
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32), count=st.integers(1, 8), vocab=st.integers(2, 40), num_shared=st.integers(1, 20))
def test_equal_distributions_accept_all_drafts_and_disjoint_ones_none(seed, count, vocab, num_shared):
    generator = torch.Generator().manual_seed(seed)
    p = torch.rand(count + 1, vocab, generator=generator).double()
    split = 1 + num_shared % (vocab - 1)
    p[:, split:] = 0.0
    p /= p.sum(dim=1, keepdim=True)
    drafts = torch.multinomial(p[:count], 1, generator=generator).flatten().tolist()
    sampled, num_sampled = verify_rows([([0] * (count + 1), drafts, p, p)], count)
    assert (sampled.tolist(), num_sampled.tolist()) == ([[*drafts, 0]], [count + 1])
    q = p.flip(1) if split <= vocab // 2 else torch.eye(vocab).double()[[vocab - 1] * (count + 1)]
    drafts = torch.multinomial(q[:count], 1, generator=generator).flatten().tolist()
    sampled, num_sampled = verify_rows([([0] * (count + 1), drafts, p, q)], count)
    assert num_sampled.tolist() == [1]
    assert p[0, sampled[0, 0]] > 0


def test_row_without_valid_target_token_samples_nothing():
    """If the target has no valid choice in a row, the step gives no token there, even after accepted drafts."""
    rows = rows_of(torch.arange(4), 0)
    logits = torch.zeros(4, 9)
    logits[1, 3] = torch.nan
    logits[2] = -torch.inf
    p = filtered_probs(logits, rows)
    assert p.sum(dim=1)[[0, 2, 3]].tolist() == pytest.approx([1, 0, 1])
    assert p[1].isnan().any()
    for probs in (p, filtered_probs(logits, replace(rows, temperature=torch.zeros(4)))):
        for bad in (1, 2):
            order = [0, bad, 3]
            equal = probs[order].clone()
            equal[0] = torch.eye(9)[5]
            assert verify_rows([([0, 0, 0], [5, 5], equal, equal.nan_to_num())], 2)[0].tolist() == [[5, -1, -1]]
            assert verify_rows([([0, 0, 0], [5, 5], equal, None)], 2)[0].tolist() == [[5, -1, -1]]


def test_rejection_by_rounding_alone_still_samples_token():
    """If only rounding causes a rejection, p - q has no positive part."""
    q = random_probs(1).expand(2, -1)
    p = q * torch.tensor([[0.5], [1.0]])  # an extreme case of it
    sampled, num_sampled = verify_rows([([0, 0], [token], p, q) for token in range(9)] * 3, 1)
    assert set(num_sampled.tolist()) == {1, 2}
    assert sampled[:, 0].min() >= 0


def test_greedy_drafts_are_accepted_only_if_equal():
    logits = torch.randn(3, 9, generator=torch.Generator().manual_seed(0))
    logits[0, [2, 7]] = 5.0
    probs = filtered_probs(logits, rows_of(torch.arange(3), 0, temperature=0.0, top_k=3, top_p=0.5))
    best = [2, *logits[1:].argmax(dim=1).tolist()]
    assert torch.equal(probs, torch.eye(9).double()[best])
    for q in (None, random_probs(3)):
        assert verify_rows([(best, best[:2], probs, q)], 2)[0].tolist() == [best]
        assert verify_rows([(best, [best[0], best[1] ^ 1], probs, q)], 2)[0].tolist() == [[*best[:2], -1]]


@pytest.mark.sweep(40)
@pytest.mark.parametrize("filters", [{}, {"top_k": 5}, {"top_p": 0.6}, {"min_p": 0.2}, {"temperature": 0.4}], ids=str)
def test_sampling_kernel_draws_from_filtered_probs(kernels, filters):
    row, draws = torch.randn(1, 24, generator=torch.Generator().manual_seed(2)) * 2, 4000
    rows = rows_of(torch.arange(draws), 3, **filters)
    counts = torch.bincount(kernels.sample(row.repeat(draws, 1), rows), minlength=24)
    assert p_value(counts, filtered_probs(row, rows.take(slice(1)))[0]) > LEAST_P


@pytest.mark.parametrize("vocab", [7, 333, 4099])
def test_filtered_probs_of_row_are_batch_invariant(vocab):
    logits = torch.randn(9, vocab, generator=torch.Generator().manual_seed(2)) * 2
    rows = rows_of(torch.arange(9), 3, temperature=0.7)
    rows = replace(rows, top_p=torch.linspace(0.2, 1.0, 9), top_k=torch.arange(9, dtype=torch.int32) * 11)
    together = filtered_probs(logits, rows)
    drawn = draw(together, uniform(rows, RandomStream.DRAFT))
    for i in range(9):
        alone = filtered_probs(logits[i : i + 1], rows.take(slice(i, i + 1)))
        assert torch.equal(alone[0], together[i])
        assert draw(alone, uniform(rows, RandomStream.DRAFT)[i : i + 1]) == drawn[i]


@pytest.mark.parametrize("bounds", [[0, 3], [0, 1, 1, 3]])
def test_verification_refuses_too_many_or_zero_rows(bounds):
    tokens = torch.zeros(3, dtype=torch.int64)
    arguments = {"target_probs": random_probs(3), "draft_probs": None, "rows": rows_of(torch.arange(3), 0)}
    with pytest.raises(IndexError, match="more than 1 drafts"):
        rejection_sampling_batched(tokens, tokens, torch.tensor(bounds, dtype=torch.int32), 1, **arguments)


def test_draw_inverts_cumulative_distribution():
    weights = torch.tensor([[0.0, 2.0, 0.0, 2.0, 0.0]]).expand(5, -1)
    part = torch.tensor([1e-300, 0.4999, 0.5, 0.9, 1 - 2.0**-53]).double()
    assert draw(weights, part).tolist() == [1, 1, 3, 3, 3]
    assert draw(weights, torch.ones(5).double()).tolist() == [3] * 5, "never a token without weight"
    assert draw(torch.tensor([[0.0, 0.0], [torch.nan, 1.0]]), part[:2]).tolist() == [-1, -1]
