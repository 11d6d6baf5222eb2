"""The simulation detects known faults of KV stores, each injected on purpose."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from octavo.core.kv.block_chains import BlockChains
from octavo.core.kv.checkpoints import Checkpoints
from octavo.core.kv.groups import BoundedGroup, StateGroup
from octavo.core.kv.manager import KVCacheManager
from octavo.core.transfer_scheduler import KVTransferScheduler
from simulation.store import SimulatedStore
from simulation.world import SimulationError, World, draw_config, draw_stored, draw_stored_states, run_world

NUM_WORLDS = 15  # of each kind
SEED = "f"  # a seed with which a few worlds show each fault


def run_worlds() -> int:
    """Run worlds with many saves and loads; return the number of loads that succeeded."""
    num_loads = 0
    for index in range(NUM_WORLDS):
        config = draw_config(random.Random(index), 200)
        config = replace(config, remote_rate=1.0, hash_bits=None, enable_prefix_caching=True, min_tokens_to_cache=1)
        config = replace(config, mixed_step_ms=None, neighbour_rate=0.0, eviction_rate=0.5)
        if index % 2:  # many transfers are given up
            config = replace(config, neighbour_rate=0.5, arrival_rate=0.8, abort_rate=0.2, freeze_rate=0.1)
        else:  # few short texts recur, and are soon evicted here
            config = replace(config, num_blocks=12, block_size=2, longest_prompt=8, longest_output=8, num_host_blocks=0)
            config = replace(config, max_num_waiting=None, max_num_waiting_tokens=None)
        num_loads += run_world(f"{SEED}store:{index}", config).loads
    return num_loads


def run_pairs() -> int:
    """Run worlds of prefill and decode engines; return the number of prompts that arrived directly."""
    num_handed_over = 0
    for index in range(NUM_WORLDS):
        config = draw_config(random.Random(index), 150)
        config = replace(config, remote_rate=1.0, hash_bits=None, enable_prefix_caching=True, min_tokens_to_cache=1)
        config = replace(config, pair_rate=0.8, neighbour_rate=0.0, eviction_rate=0.1, mixed_step_ms=None)
        world = World(f"pair:{index}", config)
        world.run()
        num_handed_over += world.store.num_handed_over
    return num_handed_over


def believe_everything(patch: pytest.MonkeyPatch) -> None:
    init = SimulatedStore.__init__

    def trusting(self, *args):
        init(self, *args)
        self.checks = False

    patch.setattr(SimulatedStore, "__init__", trusting)


def release_what_is_saved(patch: pytest.MonkeyPatch) -> None:
    """Blocks are reused while they are being read, which takes several steps."""
    patch.setattr(SimulatedStore, "max_steps", 20)
    offer = KVTransferScheduler._offer

    def careless(self, request, end):
        offer(self, request, end)
        for order in self._orders:
            if order.request_id is None:
                self._manager.unpin(order.transfer_id)

    patch.setattr(KVTransferScheduler, "_offer", careless)


def release_what_is_cancelled(patch: pytest.MonkeyPatch) -> None:
    """Blocks of a transfer that is given up are reused before the worker is notified."""
    cancel = KVTransferScheduler._cancel

    def hasty(self, pending, outcome):
        cancel(self, pending, outcome)
        self._manager.unpin(pending.order.transfer_id)

    patch.setattr(KVTransferScheduler, "_cancel", hasty)


def leave_out(name: str):
    """Return a patch: block hashes ignore the salt, or the adapter."""

    def patch_chain(patch: pytest.MonkeyPatch) -> None:
        chain = BlockChains.of

        def shared(self, request):
            own = getattr(request, name)
            setattr(request, name, None)
            try:
                return chain(self, request)
            finally:
                setattr(request, name, own)

        patch.setattr(BlockChains, "of", shared)

    return patch_chain


def count_what_did_not_arrive(patch: pytest.MonkeyPatch) -> None:
    """A load that ended early counts as complete."""
    end = KVTransferScheduler.num_computed_tokens
    patch.setattr(
        KVTransferScheduler, "num_computed_tokens", lambda self, load, _: end(self, load, len(load.order.keys))
    )


@pytest.mark.turn(8)
def test_store_worlds_without_injected_fault_pass():
    assert run_worlds() > 20


@pytest.mark.sweep(8)
@pytest.mark.parametrize(
    "fault",
    [
        believe_everything,
        release_what_is_saved,
        release_what_is_cancelled,
        leave_out("cache_salt"),
        leave_out("adapter"),
        count_what_did_not_arrive,
    ],
    ids=["no checksum", "unpinned save", "unpinned cancel", "no salt", "no adapter", "a part is the whole"],
)
def test_injected_store_fault_is_detected(fault, monkeypatch):
    fault(monkeypatch)
    with pytest.raises(SimulationError):
        run_worlds()


def renew_no_lease(patch: pytest.MonkeyPatch) -> None:
    """A load does not renew the lease of its donor, which then releases the blocks."""
    patch.setattr(SimulatedStore, "_renew", lambda *_: None)


def forget_newcomers(patch: pytest.MonkeyPatch) -> None:
    """A prefill engine is notified of its transfers when they are scheduled, or never."""
    patch.setattr(KVTransferScheduler, "request_added", lambda *_: None)


def hide_orders(patch: pytest.MonkeyPatch) -> None:
    """A prefill engine is not notified of transfers to waiting requests."""
    order = KVTransferScheduler._order

    def silent(self, *args):
        told, self._connector.transfer_ordered = self._connector.transfer_ordered, lambda _: None
        try:
            return order(self, *args)
        finally:
            self._connector.transfer_ordered = told

    patch.setattr(KVTransferScheduler, "_order", silent)


@pytest.mark.turn(8)
def test_prefill_decode_worlds_without_injected_fault_pass():
    assert run_pairs() > 8


@pytest.mark.sweep(8)
@pytest.mark.parametrize(
    "fault",
    [
        believe_everything,
        count_what_did_not_arrive,
        renew_no_lease,
        forget_newcomers,
        hide_orders,
    ],
    ids=["no checksum", "a part is the whole", "no renewal", "newcomers untold", "orders untold"],
)
def test_injected_prefill_decode_fault_is_detected(fault, monkeypatch):
    fault(monkeypatch)
    with pytest.raises(SimulationError):
        run_pairs()


def run_windows(num_worlds: int) -> int:
    """Run worlds of models with windows; return the number of blocks loaded without their window parts."""
    return sum(
        run_world(f"{SEED}window:{index}", draw_stored(random.Random(index), 150)).parts_loaded
        for index in range(num_worlds)
    )


def load_parts_into_windows(patch: pytest.MonkeyPatch) -> None:
    """A block without its window part is used even if a row reads that part."""
    name = SimulatedStore._name
    patch.setattr(SimulatedStore, "_name", lambda self, key, records, **_: name(self, key, records, needs_all=False))


def save_other_window_parts(patch: pytest.MonkeyPatch) -> None:
    """A block that lost its window part is saved with the content of another one."""
    id_at = BoundedGroup.id_at

    def guess(self, sequence, index):
        part = id_at(self, sequence, index)
        return next(iter(self.cached_ids()), part) if part is None else part

    patch.setattr(BoundedGroup, "id_at", guess)


def go_on_without_windows(patch: pytest.MonkeyPatch) -> None:
    """A load that ended early is used, even if the next row lacks parts."""
    patch.setattr(BoundedGroup, "has_read_blocks", lambda *_: True)


@pytest.mark.turn(8)
def test_window_worlds_load_blocks_without_window_parts():
    assert run_windows(10) > 5


@pytest.mark.sweep(8)
@pytest.mark.parametrize(
    "fault",
    [believe_everything, load_parts_into_windows, save_other_window_parts, go_on_without_windows],
    ids=["no checksum", "no window part", "another window part", "no window"],
)
def test_injected_window_fault_is_detected(fault, monkeypatch):
    fault(monkeypatch)
    with pytest.raises(SimulationError):
        run_windows(150)


def run_states(num_worlds: int) -> int:
    """Run worlds of models with recurrent layers; return the number of loaded states."""
    return sum(
        run_world(f"{SEED}state:{index}", draw_stored_states(random.Random(index), 150)).loaded_states
        for index in range(num_worlds)
    )


def save_another_state(patch: pytest.MonkeyPatch) -> None:
    """The state after another block is saved."""
    slot_after = Checkpoints.slot_after
    patch.setattr(
        Checkpoints, "slot_after", lambda self, block_id: slot_after(self, block_id) and self.group.cached_ids()[0]
    )


def load_the_state_after_the_last_token(patch: pytest.MonkeyPatch) -> None:
    """The last token is computed although the loaded state includes it."""
    patch.setattr(
        KVCacheManager, "most_loaded_tokens", lambda self, num_tokens: num_tokens // self.block_size * self.block_size
    )


def save_what_was_loaded(patch: pytest.MonkeyPatch) -> None:
    """States in the loaded tokens are saved, as if they were computed."""
    patch.setattr(StateGroup, "note_loaded", lambda *_: None)


def keep_loaded_states_at_once(patch: pytest.MonkeyPatch) -> None:
    """A checkpoint is found before the loaded state is copied to it."""
    note_loaded = Checkpoints.note_loaded

    def keep(self, request):
        note_loaded(self, request)
        copied = self.group.keep_loaded(request.sequence)
        if copied is not None:
            self._copies().block_copies.append((self.group.index, *copied))

    patch.setattr(Checkpoints, "note_loaded", keep)


def go_on_without_states(patch: pytest.MonkeyPatch) -> None:
    """A load without the state is complete."""
    patch.setattr(SimulatedStore, "_load_state", lambda *_args, **_kwargs: True)


def release_saved_states(patch: pytest.MonkeyPatch) -> None:
    """Slots are reused while they are being saved."""
    patch.setattr(SimulatedStore, "max_steps", 20)
    pin = KVCacheManager.pin
    patch.setattr(KVCacheManager, "pin", lambda self, transfer_id, block_ids, _=(): pin(self, transfer_id, block_ids))


def offer_states_once(patch: pytest.MonkeyPatch) -> None:
    """A state that is saved after its block was offered is never offered."""
    offer = KVTransferScheduler.offer
    patch.setattr(KVTransferScheduler, "offer", lambda self, request, _saved_states: offer(self, request))


@pytest.mark.turn(8)
def test_worlds_with_stored_states_load_states():
    assert run_states(10) > 20


@pytest.mark.sweep(8)
@pytest.mark.parametrize(
    "fault",
    [
        believe_everything,
        count_what_did_not_arrive,
        save_another_state,
        load_the_state_after_the_last_token,
        save_what_was_loaded,
        keep_loaded_states_at_once,
        go_on_without_states,
        release_saved_states,
        offer_states_once,
    ],
    ids=[
        "no checksum", "a part is the whole", "another state", "last token twice", "saved what was loaded",
        "kept at once", "no state", "unpinned state", "offered once",
    ],
)  # fmt: skip
def test_injected_fault_of_stored_states_is_detected(fault, monkeypatch):
    fault(monkeypatch)
    with pytest.raises(SimulationError):
        run_states(150)
