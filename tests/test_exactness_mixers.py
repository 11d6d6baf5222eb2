"""A model with token mixers other than attention: its tokens are `==` in every schedule."""

from __future__ import annotations

import hybrid_family
import pytest
from hybrid_family import Latent, Recurrence, RecurrentState
from test_exactness import SCHEDULES, Schedule, answers, make_engine, make_requests, needs_kernels

from octavo import SamplingParams
from octavo.core.invariants import check
from octavo.data.kv_groups import FullAttention, SlidingWindow
from octavo.data.request import Request
from octavo.errors import ConfigError
from octavo.models.random_weights import tiny_config, write_checkpoint
from octavo.models.registry import FAMILIES

pytestmark = needs_kernels
NUM_TRIED = 8
CHOSEN = {
    "chunks_of_1", "chunks_of_7", "blocks_of_32", "warm_cache", "few_blocks", "swapped", "ahead_few_blocks",
}  # fmt: skip


def requests():
    """Return requests with prompts of up to 80 tokens."""
    return [(prompt[-80:], params) for prompt, params in make_requests()[:NUM_TRIED]]


@pytest.fixture(scope="module", autouse=True)
def family():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FAMILIES, hybrid_family.NAME, hybrid_family.__name__)
        yield


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    config = tiny_config(hybrid_family.NAME, num_hidden_layers=4, vocab_size=1500)
    return write_checkpoint(tmp_path_factory.mktemp("mixers"), config, std=0.1)


@pytest.fixture(scope="module")
def alone(checkpoint):
    engine = make_engine(checkpoint, "float32", Schedule("alone", max_num_seqs=1, prefix_caching=False), "cpu")
    return answers(engine, requests())


def test_hybrid_layers_have_specified_kv_groups_and_shapes(checkpoint):
    engine = make_engine(checkpoint, "float32", SCHEDULES[0], "cpu")
    worker = engine.core.executor.worker
    cache = worker.kv_cache
    assert [group.kind for group in cache.groups] == [FullAttention(), RecurrentState(), SlidingWindow(32)]
    assert [len(cache.layer(index)) for index in range(4)] == [2, 1, 1, 2]
    assert [cache.layer(index)[0].shape[1:] for index in (1, 2)] == [(16, 64), (16, 8)]
    layout = worker.model.architecture.kv_layout
    assert layout.block_bytes(16, "float32") == (4 * 16 * (2 * 2 * 16 + 8), 4 * 16 * 64, 4 * 16 * 2 * 2 * 16)
    assert [group.kind for group in layout.without_windows.kv_groups] == [FullAttention()]


@pytest.mark.sweep(16)
@pytest.mark.parametrize("schedule", [each for each in SCHEDULES if each.name in CHOSEN], ids=lambda each: each.name)
def test_hybrid_model_gives_equal_tokens_alone_and_batched(checkpoint, alone, schedule):
    engine = make_engine(checkpoint, "float32", schedule, "cpu")
    assert answers(engine, requests()) == alone
    if schedule.rounds > 1:
        again = answers(engine, requests())
        for index, (_, params) in enumerate(requests()):
            if params.seed is not None or params.is_greedy:
                assert again[index] == alone[index]
    assert check(engine.core.scheduler) == []


@pytest.mark.parametrize("mixer", [Recurrence, Latent])
def test_clearing_state_of_mixer_changes_tokens(checkpoint, alone, monkeypatch, mixer):
    """Otherwise a mixer that reads nothing would pass the test above."""
    engine = make_engine(checkpoint, "float32", Schedule("alone", max_num_seqs=1, prefix_caching=False), "cpu")
    write = mixer.write_kv

    def forgetful(self, hidden, batch, cache):
        result = write(self, hidden, batch, cache)
        cache[0].zero_()
        return result

    monkeypatch.setattr(mixer, "write_kv", forgetful)
    assert answers(engine, requests()) != alone


def test_two_dimensional_positions_change_tokens_and_stay_exact(tmp_path):
    """Requests with equal tokens at other places get other answers, each the same as alone."""
    config = tiny_config(hybrid_family.NAME, num_hidden_layers=4, vocab_size=1500, num_position_dims=2)
    path = write_checkpoint(tmp_path, config, std=0.1)
    prompt, params = list(range(20)), SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    text = [list(range(20))] * 2
    image = [[0, *([1] * 9), *range(2, 12)], [0, *range(1, 10), *range(2, 12)]]

    def answer(schedule, *places):
        """Return the answers to requests with the prompt's tokens at these positions, added together."""
        core = make_engine(path, "float32", schedule, "cpu").core
        requests = [Request(str(index), prompt, params, rotary_positions=each)
                    for index, each in enumerate(places)]  # fmt: skip
        for request in requests:
            core.scheduler.add_request(request)
        while core.has_work():
            core.step()
        return [request.sequence.output_token_ids for request in requests]

    alone = Schedule("alone", max_num_seqs=1)
    [of_image], [of_text] = answer(alone, image), answer(alone, text)
    assert of_image != of_text
    assert answer(alone, None) == [of_text]
    for schedule in (Schedule("crowd", threshold=7), Schedule("few", block_size=2, num_blocks=40, budget=64)):
        assert answer(schedule, image, text, image, None) == [of_image, of_text, of_image, of_text]


def test_unsupported_kv_cache_dtype_of_mixer_is_refused(checkpoint):
    with pytest.raises(ConfigError, match="kv_cache_dtype int8 has no form for layers that keep one row"):
        make_engine(checkpoint, "bfloat16 with int8 KV", SCHEDULES[0], "cpu")
