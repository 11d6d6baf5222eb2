"""Calls of the prefix cache become events, one batch a step, in the format that vLLM decodes."""

from __future__ import annotations

import msgspec
import pytest
from core.conftest import Core
from kv_event_subscriber import AllBlocksCleared, BlockRemoved, BlockStored, Contents, decode

from octavo.data.kv_event_figures import KVEventFigures
from octavo.kv_events import KVEventLog
from octavo.kv_events.event_log import short_hash
from octavo.kv_events.wire import EventBatch, encode

A, B, C = (bytes([number]) * 32 for number in (1, 2, 255))
SHORT_A, SHORT_B, SHORT_C = (int.from_bytes(each[:8], "big") for each in (A, B, C))


class Batches:
    """Stands for a publisher, and keeps the batches as vLLM decodes them."""

    def __init__(self):
        self.figures, self.raw, self.is_closed = KVEventFigures(), [], False

    def publish(self, events):
        self.raw.append(encode(EventBatch(1.5, events, 3)))

    def close(self):
        self.is_closed = True

    def take(self):
        """Return the events of each batch since the last call."""
        raw, self.raw = self.raw, []
        return [decode(each).events for each in raw]


@pytest.fixture
def batches():
    return Batches()


@pytest.fixture
def log(batches):
    log = KVEventLog(batches)
    assert batches.take() == [[AllBlocksCleared()]]  # a subscriber may know blocks of an earlier process
    return log


def stored(hashes, parent, tokens, medium="GPU", keys=None):
    return BlockStored(hashes, parent, tokens, 2, None, medium, None, keys, 0, "full_attention")


def test_hash_is_the_last_64_bits():
    assert short_hash(bytes(24) + (2**63 + 5).to_bytes(8, "big")) == 2**63 + 5


def test_step_without_changes_publishes_nothing(batches, log):
    log.end_step()
    assert batches.take() == []


def test_consecutive_blocks_are_one_event(batches, log):
    log.block_stored(A, None, (1, 2), None)
    log.block_stored(B, A, (3, 4), None)
    log.block_stored(C, A, (5, 6), None)
    log.end_step()
    log.end_step()
    assert batches.take() == [[stored([SHORT_A, SHORT_B], None, [1, 2, 3, 4]), stored([SHORT_C], SHORT_A, [5, 6])]]


def test_block_extends_the_last_event_only(batches, log):
    log.block_stored(A, None, (1, 2), None)
    log.block_stored(B, None, (3, 4), None)
    log.block_stored(C, B, (5, 6), None)
    log.end_step()
    assert batches.take() == [[stored([SHORT_A], None, [1, 2]), stored([SHORT_B, SHORT_C], None, [3, 4, 5, 6])]]


def test_salt_is_the_extra_key_of_the_first_block(batches, log):
    log.block_stored(A, None, (1, 2), "mine")
    log.block_stored(B, A, (3, 4), None)
    log.end_step()
    assert batches.take() == [[stored([SHORT_A, SHORT_B], None, [1, 2, 3, 4], keys=[("mine",), None])]]


def test_host_memory_is_another_medium_with_the_parents_and_salts_of_the_device(batches, log):
    log.block_stored(A, None, (1, 2), "mine")
    log.block_stored(B, A, (3, 4), None)
    log.end_step()
    batches.take()
    log.host_block_stored(B, (3, 4))
    log.block_removed(B)
    log.host_block_stored(A, (1, 2))
    log.host_block_removed(B)
    log.end_step()
    assert batches.take() == [
        [
            stored([SHORT_B], SHORT_A, [3, 4], "CPU"),
            BlockRemoved([SHORT_B], "GPU", 0),
            stored([SHORT_A], None, [1, 2], "CPU", [("mine",)]),
            BlockRemoved([SHORT_B], "CPU", 0),
        ]
    ]


def test_host_block_does_not_extend_an_event_of_the_device(batches, log):
    log.block_stored(A, None, (1, 2), None)
    log.block_stored(B, A, (3, 4), None)
    log.end_step()
    batches.take()
    log.block_removed(A)
    log.block_stored(A, None, (1, 2), None)
    log.host_block_stored(B, (3, 4))
    log.end_step()
    assert [[type(event) for event in events] for events in batches.take()] == [
        [BlockRemoved, BlockStored, BlockStored]
    ]


def test_consecutive_removals_are_one_event(batches, log):
    for each in (A, B, C):
        log.block_stored(each, None, (1, 2), None)
    log.end_step()
    batches.take()
    log.block_removed(B)
    log.block_removed(A)
    log.end_step()
    assert batches.take() == [[BlockRemoved([SHORT_B, SHORT_A], "GPU", 0)]]
    assert log._origins.keys() == {C}


def test_clearing_is_published_at_once_and_replaces_the_events_of_the_step(batches, log):
    log.block_stored(A, None, (1, 2), None)
    log.block_removed(A)
    log.cleared()
    log.end_step()
    assert batches.take() == [[AllBlocksCleared()]]


def test_close_publishes_the_last_step(batches, log):
    log.block_stored(A, None, (1, 2), None)
    log.close()
    assert batches.is_closed
    assert log.figures is batches.figures
    assert len(batches.take()) == 1


def test_two_hashes_with_equal_last_bits_are_removed_separately(batches, log):
    twin = bytes(24) + A[24:]
    log.block_stored(A, None, (1, 2), None)
    log.block_stored(twin, None, (3, 4), None)
    log.block_removed(A)
    log.block_removed(twin)
    log.end_step()
    assert len(batches.take()[0]) == 3


def test_batch_is_an_array_of_time_events_and_rank_and_events_are_maps(batches, log):
    log.block_stored(A, None, (1, 2), None)
    log.end_step()
    time, (event,), rank = msgspec.msgpack.decode(batches.raw[0])
    assert (time, rank) == (1.5, 3)
    assert event == {
        "type": "BlockStored",
        "block_hashes": [SHORT_A],
        "parent_block_hash": None,
        "token_ids": [1, 2],
        "block_size": 2,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }


class ArrayStored(msgspec.Struct, array_like=True, tag="BlockStored"):
    block_hashes: list[int]


class ArrayBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[ArrayStored]


def test_old_subscribers_that_expect_arrays_refuse_the_events(batches, log):
    log.block_stored(A, None, (1, 2), None)
    log.end_step()
    with pytest.raises(msgspec.ValidationError, match="Expected `array`, got `object`"):
        msgspec.msgpack.decode(batches.raw[0], type=ArrayBatch)


@pytest.mark.parametrize("medium", ["GPU", "CPU"])
@pytest.mark.parametrize("options", [{}, {"num_host_blocks": 8}, {"num_window_blocks": 10, "window": 6}])
def test_contents_from_events_are_those_of_the_cache(batches, log, options, medium):
    contents = Contents(medium)
    core = Core(num_blocks=14, max_num_seqs=4, max_num_batched_tokens=24, cache_listener=log, **options)
    manager = core.scheduler.kv_cache_manager
    pool = manager.pool if medium == "GPU" else manager.host
    for number in range(40):
        core.add(str(number), [number % 3, *range(number % 7, 20)], max_tokens=6)
        core.step()
        log.end_step()
        for raw in batches.raw:
            contents.take(decode(raw))
        batches.raw.clear()
        assert {short_hash(each): found.token_ids for each, found in pool._index.items()} == {
            each: tokens for each, (_, tokens) in contents.blocks.items()
        }
    assert bool(contents.num_removed) == (medium == "GPU" or "num_host_blocks" in options)
