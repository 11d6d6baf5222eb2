"""Slots of recurrent states in host memory, alone and behind a cache manager."""

from __future__ import annotations

from octavo.core.kv.host_states import HostStates
from octavo.core.kv.manager import KVCacheManager
from octavo.data.kv_groups import KVGroupSpec, RecurrentStates, SlidingWindow
from octavo.data.request import Request
from octavo.data.scheduler_output import BlockCopies
from octavo.sampling_params import SamplingParams

A, B, C = (0, 1), (1, 1), (2, 1)


def test_slots_of_requests_are_taken_and_released():
    host = HostStates(2)
    assert (host.take(), host.take(), host.take()) == (0, 1, None)
    host.release(1)
    assert (host.free_slots(), host.take()) == ([1], 1)


def test_checkpoint_is_found_by_the_name_of_its_block():
    host = HostStates(2)
    assert (host.keep(A), host.find(A), host.find(B), host.find(None)) == (0, 0, None, None)
    assert host.keep(A) is None
    assert host.cached_slots() == {0: A}


def test_least_recently_used_checkpoint_makes_room():
    host = HostStates(2)
    host.keep(A)
    host.keep(B)
    host.keep(A)  # is now the most recently used
    assert (host.keep(C), host.find(A), host.find(B), host.find(C)) == (1, 0, None, 1)
    assert host.take() == 0
    assert host.cached_slots() == {1: C}


def test_states_of_requests_are_never_replaced():
    host = HostStates(1)
    assert host.take() == 0
    assert (host.keep(A), host.find(A)) == (None, None)


def test_lent_slots_are_protected_until_the_step_is_scheduled():
    host = HostStates(2)
    checkpoint, of_request = host.keep(A), host.take()
    host.lend(checkpoint)
    host.lend(of_request)
    host.lend(checkpoint)
    assert (host.take(), host.keep(B), host.find(A)) == (None, None, checkpoint)
    assert host.keep(A) is None
    host.end_lending()
    assert (host.free_slots(), host.cached_slots(), host.lent) == ([of_request], {checkpoint: A}, {})


def test_dropped_checkpoints_free_their_slots():
    host = HostStates(3)
    host.keep(A)
    host.keep(B)
    host.drop(0)
    host.drop(0)
    assert (sorted(host.free_slots()), host.cached_slots()) == ([0, 2], {1: B})
    host.reset()
    assert (sorted(host.free_slots()), host.cached_slots()) == ([0, 1, 2], {})


class Made:
    """A manager with blocks of 4 tokens, 12 host blocks, and states on the device and in host memory."""

    def __init__(self, num_states=2, num_host_states=2, num_blocks=12, windows=()):
        groups = [*windows, KVGroupSpec(RecurrentStates(), num_states, num_host_states)]
        self.manager = KVCacheManager(num_blocks, 4, bounded_groups=groups, num_host_blocks=12)
        self.states, self.host = self.manager.states, self.manager.checkpoints.host

    def start(self, name, tokens):
        request = Request(name, tokens, SamplingParams())
        self.manager.add_tables(request)
        return request, self.resume(request)

    def resume(self, request):
        """Look up and allocate all tokens; return the prefix hit."""
        computed = self.manager.get_computed_blocks(request)
        assert self.manager.allocate_slots(request, request.num_tokens - computed.num_tokens, computed) is not None
        request.num_computed_tokens = computed.num_tokens
        return computed

    def compute(self, request):
        self.manager.checkpoints.plan(request, request.num_tokens)
        request.num_computed_tokens = request.num_tokens
        self.manager.commit(request)

    def run(self, name, tokens):
        request, computed = self.start(name, tokens)
        self.compute(request)
        self.manager.free(request)
        return computed.num_tokens

    def copies(self):
        """Return the copies of states: to host memory, on the device, from host memory."""
        copies = self.manager.take_copies().of_group(self.states.index)
        return [[each[1:] for each in kind] for kind in (copies.swap_out, copies.block_copies, copies.swap_in)]


def test_evicted_checkpoint_is_kept_in_host_memory_and_loaded_from_there():
    made = Made()
    assert made.run("a", [1] * 9) == 0
    assert made.copies() == [[], [], []]
    made.run("b", [2] * 9)  # takes the slot of the first prompt's state
    [[(evicted, in_host)], loaded, _] = made.copies()
    assert (loaded, list(made.host.cached_slots())) == ([], [in_host])
    request, computed = made.start("c", [1] * 9)
    (slot,) = request.sequence.block_tables[-1]
    assert (computed.num_tokens, computed.host_blocks) == (8, [])
    swapped_out, _, swapped_in = made.copies()
    assert swapped_in == [(in_host, slot)]
    assert in_host not in [target for _, target in swapped_out]
    assert evicted in range(2)


def test_checkpoint_goes_to_host_memory_with_its_block():
    made = Made(num_states=4, num_host_states=4, num_blocks=3)
    made.run("a", [1] * 9)
    made.manager.take_copies()
    made.run("b", [2] * 9)  # needs all blocks
    swapped_out, _, _ = made.copies()
    assert len(swapped_out) == 1
    _, computed = made.start("c", [1] * 9)
    assert (computed.num_tokens, len(computed.host_blocks), computed.blocks) == (8, 2, [])
    assert [target for target, _ in made.copies()[2]] == [swapped_out[0][1]]


def test_swapped_request_resumes_before_the_rows_that_its_state_lacks():
    made = Made()
    request, _ = made.start("a", [1] * 9)
    made.compute(request)  # the row of the newest token is not in the state
    (slot,) = request.sequence.block_tables[-1]
    assert made.manager.swap_out(request)
    assert made.manager.saved_states() == [0]
    made.manager.release(request)
    request.num_computed_tokens = 0
    assert made.copies()[0] == [(slot, 0)]
    request.sequence.token_ids += [5, 6]
    made.manager.prefix_cache.chains.extended(request)
    made.manager.pool.reset()
    computed = made.resume(request)
    assert (computed.num_tokens, computed.is_saved) == (8, True)
    assert made.copies()[2] == [(0, *request.sequence.block_tables[-1])]
    assert (made.manager.saved_states(), sorted(made.host.free_slots())) == ([], [0, 1])


def test_request_is_not_swapped_without_a_slot_or_without_the_parts_that_its_next_row_reads():
    made = Made(num_host_states=0)
    request, _ = made.start("a", [1] * 9)
    made.compute(request)
    num_free = made.manager.host.num_free_blocks
    assert not made.manager.swap_out(request)
    assert made.manager.host.num_free_blocks == num_free
    made = Made(windows=[KVGroupSpec(SlidingWindow(2), 12)])
    request, _ = made.start("a", [1] * 9)
    made.compute(request)
    request.num_computed_tokens = 10
    made.manager.release_unread(request)
    assert request.sequence.first_held[1] == 2
    assert not made.manager.swap_out(request)
    assert made.manager.saved_states() == []


def test_dropped_request_frees_its_state():
    made = Made()
    request, _ = made.start("a", [1] * 9)
    made.compute(request)
    made.manager.swap_out(request)
    made.manager.free(request)
    assert (made.manager.saved_states(), sorted(made.host.free_slots())) == ([], [0, 1])


def test_states_that_a_failed_step_should_have_copied_are_dropped():
    made = Made()
    made.run("a", [1] * 9)
    made.run("b", [2] * 9)
    copies = made.manager.take_copies()
    assert made.host.cached_slots()
    made.manager.fail_copies(copies)
    assert made.host.cached_slots() == {}
    made.manager.fail_copies(BlockCopies())


def test_reset_discards_states_in_host_memory():
    made = Made()
    made.run("a", [1] * 9)
    made.run("b", [2] * 9)
    assert made.manager.reset_prefix_cache()
    assert made.host.cached_slots() == {}


def test_state_of_a_block_that_host_memory_lacks_is_not_kept():
    made = Made(num_states=4, num_host_states=4, num_blocks=3)
    made.manager.host.num_blocks = 0
    made.manager.host._free.clear()
    made.run("a", [1] * 9)
    made.run("b", [2] * 9)  # needs all blocks
    assert (made.copies(), made.host.cached_slots()) == ([[], [], []], {})


def test_swapped_request_shares_only_blocks_before_the_end_of_its_state():
    made = Made(num_states=4)
    request, _ = made.start("a", [1] * 8)
    made.compute(request)
    last = made.manager.pool.blocks[request.sequence.block_table[1]]
    assert made.manager.swap_out(request)
    made.manager.release(request)
    request.num_computed_tokens = 0
    request.sequence.token_ids.append(5)
    made.states.block_forgotten(last)
    computed = made.manager.get_computed_blocks(request)
    assert (computed.num_tokens, len(computed.blocks), len(computed.host_blocks)) == (7, 1, 1)
    assert computed.num_shared == 2
