"""When a request may start: by the blocks that are free now, and by reserved tokens."""

from __future__ import annotations

import pytest

from octavo.config import SchedulerConfig
from octavo.core.admission import OptimisticAdmission, ReservationAdmission, create_admission
from octavo.core.kv.manager import KVCacheManager
from octavo.core.kv.prefix_cache import NO_COMPUTED_BLOCKS
from octavo.data.events import WaitReason
from octavo.data.request import Request
from octavo.errors import PromptTooLongError
from octavo.sampling_params import SamplingParams


def make(rule, *, num_blocks=4, **options):
    manager = KVCacheManager(num_blocks, 4)
    return create_admission(SchedulerConfig(admission=rule, **options), manager, 0), manager


def make_request(num_prompt, max_tokens=4, name="a"):
    return Request(name, [1] * num_prompt, SamplingParams(max_tokens=max_tokens))


def test_admission_rule_is_chosen_by_name():
    assert isinstance(make("optimistic")[0], OptimisticAdmission)
    assert isinstance(make("reservation")[0], ReservationAdmission)


def test_optimistic_admission_requires_prompt_and_one_token_to_fit():
    admission, _ = make("optimistic")
    admission.check_fits(make_request(15))
    with pytest.raises(PromptTooLongError, match=r"16 tokens > 15 maximum.* KV cache of 16") as caught:
        admission.check_fits(make_request(16))
    assert caught.value.parameter == "prompt"
    assert admission.open_step(0, 9) is None


@pytest.mark.parametrize("rule", ["optimistic", "reservation"])
def test_pooled_prompt_may_fill_cache(rule):
    """Its single output token needs no slot."""
    admission, _ = make(rule, max_num_preemptions=0)

    def pooled(num_prompt):
        return Request("a", [1] * num_prompt, SamplingParams(max_tokens=1, pooling="mean"))

    admission.check_fits(pooled(16))
    assert admission.refusal(pooled(16), NO_COMPUTED_BLOCKS, 0) is None
    assert admission.num_reserved_tokens(pooled(16)) == (16 if rule == "optimistic" else 0)
    with pytest.raises(PromptTooLongError, match=r"17 tokens.* 16 "):
        admission.check_fits(pooled(17))


def test_optimistic_admission_keeps_one_free_block_per_running_request():
    admission, _ = make("optimistic")
    request = make_request(9)  # 3 blocks of 4
    assert admission.refusal(request, NO_COMPUTED_BLOCKS, 1) is None
    assert admission.refusal(request, NO_COMPUTED_BLOCKS, 2) is WaitReason.NO_BLOCKS
    assert admission.num_reserved_tokens(request) == 0


def test_optimistic_admission_reserves_maximum_after_max_num_preemptions():
    admission, _ = make("optimistic", max_num_preemptions=2)
    request = make_request(9, max_tokens=8)  # 17 tokens; the newest needs no slot
    request.num_preemptions = 1
    assert admission.num_reserved_tokens(request) == 0
    request.num_preemptions = 2
    assert admission.num_reserved_tokens(request) == 16
    assert admission.refusal(request, NO_COMPUTED_BLOCKS, 0) is None
    assert admission.refusal(request, NO_COMPUTED_BLOCKS, 1) is WaitReason.NO_BLOCKS
    request.max_total_tokens = 18
    assert admission.refusal(request, NO_COMPUTED_BLOCKS, 0) is WaitReason.NO_BLOCKS


@pytest.mark.parametrize(("limit", "expected"), [(None, 16), (10, 10), (99, 16)])
def test_reservation_requires_whole_request_to_fit_limit_and_cache(limit, expected):
    admission, _ = make("reservation", max_batch_total_tokens=limit)
    assert admission.max_total_tokens == (limit or 16)
    admission.check_fits(make_request(expected - 4))
    with pytest.raises(PromptTooLongError, match=f"together are {expected + 1} tokens; at most {expected}") as caught:
        admission.check_fits(make_request(expected - 3))
    assert caught.value.parameter == "max_tokens"


def test_reservation_counts_tokens_and_whole_blocks():
    admission, manager = make("reservation")
    requests = [make_request(1, name=name) for name in "abc"]  # 5 tokens in 2 blocks each
    for number, request in enumerate(requests[:2]):
        assert admission.refusal(request, NO_COMPUTED_BLOCKS, 0) is None
        admission.admitted(request)
        assert admission.num_reserved_total == 5 * (number + 1)
    assert admission.refusal(requests[2], NO_COMPUTED_BLOCKS, 0) is WaitReason.NO_RESERVATION  # 6 blocks of 4
    assert admission.num_reserved_tokens(requests[0]) == 0
    admission.left(requests[0])
    admission.left(requests[0])  # a second time returns nothing
    assert admission.num_reserved_total == 5
    assert admission.refusal(requests[2], NO_COMPUTED_BLOCKS, 0) is None
    [block] = manager.pool.take(1)
    manager.pool.quarantine(block)
    assert admission.refusal(requests[2], NO_COMPUTED_BLOCKS, 0) is WaitReason.NO_RESERVATION


def test_reservation_admits_up_to_exact_token_limit():
    admission, _ = make("reservation", num_blocks=99, max_batch_total_tokens=20)
    admission.admitted(make_request(6, name="a"))
    assert admission.refusal(make_request(6, name="b"), NO_COMPUTED_BLOCKS, 0) is None
    assert admission.refusal(make_request(7, name="b"), NO_COMPUTED_BLOCKS, 0) is WaitReason.NO_RESERVATION


def test_reservation_gathers_waiting_requests_for_limited_steps():
    admission, _ = make("reservation", num_blocks=99, waiting_served_ratio=1.5, max_waiting_tokens=2)
    gathering = WaitReason.GATHERING
    assert admission.open_step(0, 1) is None  # no request is running that a prompt would delay
    admission.admitted(make_request(1))
    assert [admission.open_step(3, 3) for _ in range(3)] == [gathering, gathering, None]
    admission.admitted(make_request(1))
    assert admission.open_step(3, 3) is gathering
    assert admission.open_step(3, 4) is None  # 3 * 1.5, rounded down
    assert admission.open_step(1, 0) is None
    fresh, _ = make("reservation", num_blocks=99, waiting_served_ratio=1.5, max_waiting_tokens=2)
    assert [fresh.open_step(3, 3) for _ in range(3)] == [gathering, gathering, None]  # before the first admission
