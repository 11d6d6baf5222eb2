"""One world: a small random configuration, requests, faults; then faults stop, and all requests must finish."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from cache_mirror import CacheMirror

from octavo.config import CacheConfig, SchedulerConfig
from octavo.core import invariants
from octavo.core.kv.block_hash import hash_block_tokens
from octavo.core.kv.block_pool import Block
from octavo.core.policy import is_prefill
from octavo.core.scheduler import Scheduler
from octavo.data import events
from octavo.data.events import WaitReason
from octavo.data.kv_groups import NO_BLOCK, KVGroupKind, KVGroupSpec, RecurrentStates, kind_named, num_blocks_read
from octavo.data.kv_transfer_params import KVTransferParams
from octavo.data.model_output import ModelOutput
from octavo.data.request import ContentSpan, Request, RequestStatus
from octavo.data.scheduler_output import TransferDirection, are_whole
from octavo.errors import RequestError
from octavo.sampling_params import SamplingParams
from simulation.hash_model import VOCAB_SIZE, HashWorker, Oracle
from simulation.in_flight import Pipeline, Submitted
from simulation.store import SimulatedStore

if TYPE_CHECKING:
    from collections.abc import Iterable

    from octavo.core.kv.prefix_cache import ComputedBlocks
    from octavo.data.scheduler_output import SchedulerOutput
    from octavo.outputs import EngineCoreOutput

FEATURES = (
    "prefix",
    "chunk",
    "recompute",
    "swap",
    "host",
    "speculation",
    "remote",
    "abort",
    "priority",
    "fair",
    "reservation",
)
STEP_S = 0.01  # of a token
MAX_DRAIN_STEPS = 5000


class SimulationError(Exception):
    """The core did something wrong; the message describes it."""


@dataclass(frozen=True, slots=True)
class WorldConfig:
    """All that determines a world except its seed. Rates are per step unless stated otherwise."""

    num_blocks: int = 12
    block_size: int = 4
    num_host_blocks: int = 8
    window: int = 0
    second_window: int = 0
    num_spare_window_blocks: int = 0
    kind_name: str = "sliding_window"
    policy: str = "fcfs"
    admission: str = "optimistic"
    batching: str = "mixed"
    preemption: str = "auto"
    enable_prefix_caching: bool = True
    cache_decoded_blocks: bool = True
    enable_chunked_prefill: bool = True
    max_num_seqs: int = 4
    max_num_batched_tokens: int = 16
    long_prefill_token_threshold: int = 0
    max_num_preemptions: int = 3
    ageing_s: float | None = 60.0
    swap_block_cost_tokens: float = 1.0
    max_num_waiting: int | None = None
    max_batch_total_tokens: int | None = None
    hash_bits: int | None = None
    num_steps: int = 300
    max_open: int = 12
    arrival_rate: float = 0.5
    abort_rate: float = 0.02
    async_abort_rate: float = 0.01
    step_failure_rate: float = 0.005
    stale_result_rate: float = 0.01
    error_rate: float = 0.005
    stop_rate: float = 0.2
    scored_rate: float = 0.05
    reused_id_rate: float = 0.1
    max_num_waiting_tokens: int | None = None
    max_batch_prefill_tokens: int | None = None
    eviction_rate: float = 0.02
    preempt_rate: float = 0.02
    freeze_rate: float = 0.005
    draft_rate: float = 0.5
    draft_error: float = 0.3
    max_drafts: int = 4
    pass_s: float | None = None
    step_base_s: float = 0.0
    lost_sample_rate: float = 0.005
    postpone_rate: float = 0.02
    remote_rate: float = 0.2
    neighbour_rate: float = 0.3
    pair_rate: float = 0.0
    async_scheduling: bool = False
    awaiting_rate: float = 0.15
    min_tokens_to_cache: int = 1
    deadline_rate: float = 0.05
    longest_prompt: int = 24
    longest_output: int = 12
    short_prompt_rate: float = 0.0
    mixed_step_ms: float | None = None
    max_num_mixed_prefill_tokens: int = 0
    attention_cost_tokens: float | None = None
    span_rate: float = 0.0
    has_states: bool = False
    num_spare_states: int = 0
    num_host_states: int = 0
    checkpoint_interval: int | None = None
    cache_point_rate: float = 0.0
    has_ranks: bool = False
    message_fault: str | None = None

    @property
    def kinds(self) -> tuple[KVGroupKind, ...]:
        """The kinds of the KV groups after the first."""
        windows = (kind_named(self.kind_name)(window) for window in (self.window, self.second_window) if window)
        return (*windows, *([RecurrentStates()] if self.has_states else []))


def draw_config(rng: random.Random, num_steps: int = 300) -> WorldConfig:
    """Draw a configuration, including extremes: caches of 1 to 20 blocks, budgets of one token per request.

    There are only a few more window blocks than one request needs, or so many that no request waits for them.
    """
    block_size = rng.choice([1, 2, 3, 4, 7])
    max_num_seqs = rng.randint(1, 6)
    chunked = rng.random() < 0.75
    return WorldConfig(
        num_blocks=rng.choice([rng.randint(1, 6), rng.randint(4, 20), rng.randint(10, 20)]),
        block_size=block_size,
        num_host_blocks=rng.choice([0, rng.randint(1, 12), 24]),
        policy=rng.choice(["fcfs", "priority", "deadline", "fair"]),
        admission=rng.choice(["optimistic", "optimistic", "reservation"]),
        batching=rng.choice(["mixed", "mixed", "prefill_first"]),
        preemption=rng.choice(["auto", "recompute", "swap"]),
        enable_prefix_caching=rng.random() < 0.8,
        cache_decoded_blocks=rng.random() < 0.7,
        enable_chunked_prefill=chunked,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=rng.choice([max_num_seqs, rng.randint(max_num_seqs, 32)]),
        long_prefill_token_threshold=rng.choice([0, rng.randint(1, 8)]) if chunked else 0,
        max_num_preemptions=rng.choice([0, 1, 3, 8]),
        ageing_s=rng.choice([None, 0.0, 5.0, 60.0]),
        swap_block_cost_tokens=rng.choice([0.0, 1.0, 3.0]),
        max_num_waiting=rng.choice([None, None, None, rng.randint(1, 10)]),
        hash_bits=rng.choice([None, None, None, 1, 2, 6]),
        num_steps=num_steps,
        max_open=rng.choice([2, 6, 12]),
        arrival_rate=rng.choice([0.1, 0.4, 0.8]),
        draft_rate=rng.choice([0.0, 0.5, 1.0]),
        draft_error=rng.choice([0.0, 0.05, 0.5, 1.0]),
        max_drafts=rng.randint(0, 8),
        step_base_s=rng.choice([0.0, 0.05, 1.0]),
        remote_rate=rng.choice([0.0, 0.5, 1.0]),
        neighbour_rate=rng.choice([0.0, 0.5]),
        min_tokens_to_cache=rng.choice([1, 1, rng.randint(1, 12)]),
        postpone_rate=rng.choice([0.0, 0.02, 0.5]),
        preempt_rate=rng.choice([0.0, 0.05, 0.2]),
        eviction_rate=rng.choice([0.0, 0.02, 0.2]),
        abort_rate=rng.choice([0.0, 0.05, 0.2]),
        longest_prompt=rng.choice([block_size * rng.randint(1, 6) + rng.randint(-1, 1), 24]) + 1,
        longest_output=rng.choice([4, 12, 24]),
        short_prompt_rate=rng.choice([0.0, 0.0, 0.7]),
        max_batch_total_tokens=rng.choice([None, rng.randint(20, 60)]),
        max_batch_prefill_tokens=rng.choice([None, rng.randint(1, 17)]),
        max_num_waiting_tokens=rng.choice([None, None, rng.randint(10, 100)]),
        max_num_mixed_prefill_tokens=rng.choice([0, 0, rng.randint(1, 8)]) if chunked else 0,
        attention_cost_tokens=rng.choice([None, 60.0, 1000.0]) if chunked else None,
        mixed_step_ms=rng.choice([None, 0.0, 40.0, 200.0]) if chunked else None,
        pass_s=rng.choice([None, 0.001, 0.02, 0.5]),
        pair_rate=rng.choice([0.0, 0.0, 0.3]),
        window=draw_window(rng, block_size) if rng.random() < 0.3 else 0,
        num_spare_window_blocks=rng.choice([0, 1, rng.randint(0, 6), 40]),
        async_scheduling=rng.random() < 0.3,
        span_rate=rng.choice([0.0, 0.0, 0.6]),
    )


def draw_async(rng: random.Random, num_steps: int = 300) -> WorldConfig:
    """Draw a configuration with steps decided ahead if possible: seldom with drafts, which prevent it."""
    config = draw_config(rng, num_steps)
    return replace(
        config,
        async_scheduling=True,
        max_drafts=config.max_drafts if rng.random() < 0.3 else 0,
        num_blocks=rng.choice([config.num_blocks, rng.randint(12, 60)]),
        awaiting_rate=rng.choice([0.0, 0.0, 0.1, 0.5]),
        postpone_rate=max(config.postpone_rate, 0.02),
    )


def draw_windowed(rng: random.Random, num_steps: int = 300) -> WorldConfig:
    """Draw a configuration of a model with windows."""
    config = draw_config(rng, num_steps)
    return config if config.window else replace(config, window=draw_window(rng, config.block_size))


def draw_two_windows(rng: random.Random, num_steps: int = 300) -> WorldConfig:
    """Draw a configuration of a model with two different windows."""
    config = rng.choice([draw_windowed, draw_stored])(rng, num_steps)
    second_window = draw_window(rng, config.block_size)
    return replace(config, second_window=second_window + (second_window == config.window))


def draw_stored(rng: random.Random, num_steps: int = 300) -> WorldConfig:
    """Draw a configuration with short windows and a busy store, which has many blocks without window parts."""
    config = draw_config(rng, num_steps)
    size = rng.choice([1, 2, 2, 3])
    return replace(
        config,
        block_size=size,
        num_blocks=rng.randint(12, 30),
        num_host_blocks=rng.choice([0, config.num_host_blocks]),
        window=max(rng.randint(size, 3 * size), 2),
        num_spare_window_blocks=rng.randint(0, 4),
        enable_prefix_caching=True,
        hash_bits=None,
        remote_rate=1.0,
        neighbour_rate=rng.choice([0.0, 0.5]),
        min_tokens_to_cache=1,
        mixed_step_ms=None,
        longest_prompt=24,
        max_num_waiting=None,
        max_num_waiting_tokens=None,
        max_batch_total_tokens=None,
        max_batch_prefill_tokens=None,
        eviction_rate=rng.choice([0.1, 0.5]),
        abort_rate=min(config.abort_rate, 0.05),
    )


def draw_recurrent(rng: random.Random, num_steps: int = 300) -> WorldConfig:
    """Draw a configuration of a model with recurrent layers, in some cases with windows, too."""
    config = rng.choice([draw_config, draw_async])(rng, num_steps)
    return replace(
        config,
        has_states=True,
        num_spare_states=rng.choice([0, 1, 2, rng.randint(1, 8), 40]),
        checkpoint_interval=rng.choice([None, None, config.block_size, 3 * config.block_size]),
        cache_point_rate=rng.choice([0.0, 0.5]),
        num_host_states=rng.choice([0, rng.randint(1, 4), 20]),
    )


def draw_stored_states(rng: random.Random, num_steps: int = 300) -> WorldConfig:
    """Draw a configuration of a model with recurrent layers and a busy store, in some cases with prefill engines."""
    config = draw_stored(rng, num_steps)
    return replace(
        config,
        window=rng.choice([0, 0, config.window]),
        has_states=True,
        num_spare_states=rng.choice([0, 1, 4, 40]),
        checkpoint_interval=rng.choice([None, config.block_size]),
        num_host_states=rng.choice([0, 0, 3]),
        pair_rate=rng.choice([0.0, 0.5]),
    )


def draw_window(rng: random.Random, size: int) -> int:
    """Draw a window smaller than a block, as long as one, several of them, or anything between."""
    window = rng.choice([rng.randint(1, size), size, size + 1, 2 * size, rng.randint(1, 4 * size), 40])
    return max(window, 2)


@dataclass(slots=True)
class Tracked:
    """The world's own record of a request, which is compared with the core."""

    oracle: Oracle
    max_tokens: int
    stop_ids: frozenset[int] = frozenset()
    num_tokens: int = 0
    num_endings: int = 0
    features: set[str] = field(default_factory=set)


@dataclass(slots=True)
class Totals:
    """The figures that a simulation reports."""

    steps: int = 0
    requests: int = 0
    tokens: int = 0
    wrong_tokens: int = 0
    leaked_blocks: int = 0
    unfinished: int = 0
    preemptions: int = 0
    swaps: int = 0
    evictions: int = 0
    offloads: int = 0
    host_evictions: int = 0
    host_hits: int = 0
    hits: int = 0
    copies: int = 0
    loads: int = 0
    saves: int = 0
    dropped_saves: int = 0
    withheld: int = 0
    postponed: int = 0
    drafted: int = 0
    accepted: int = 0
    passes: int = 0
    bounded: int = 0
    behind_window: int = 0
    window_hits: int = 0
    window_copies: int = 0
    window_swaps_out: int = 0
    window_swaps_in: int = 0
    window_loads: int = 0
    window_saves: int = 0
    parts_saved: int = 0
    parts_loaded: int = 0
    state_saves: int = 0
    state_evictions: int = 0
    state_hits: int = 0
    stored_states: int = 0
    loaded_states: int = 0
    ahead: int = 0
    ahead_with_newcomers: int = 0
    in_vain: int = 0
    given_back: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    combinations: Counter[tuple[str, ...]] = field(default_factory=Counter)

    def add(self, other: Totals) -> None:
        """Add the figures of `other`."""
        for each in fields(self):
            mine, theirs = getattr(self, each.name), getattr(other, each.name)
            if isinstance(mine, Counter):
                mine.update(theirs)
            else:
                setattr(self, each.name, mine + theirs)


@dataclass(frozen=True)
class Sharing:
    """Whether prompts and answers share a step, and what the core may or must learn from it."""

    limit: int
    may_be: bool
    must_be: bool
    is_short: bool


NOTHING_SHARED = Sharing(0, may_be=False, must_be=False, is_short=False)


class World:
    """The core, a hash model, and all faults that may occur between them."""

    def __init__(self, seed: str, config: WorldConfig) -> None:
        self.rng = random.Random(seed)
        self.config = config
        self.now = self.last_result = 0.0
        self.totals = Totals()
        self.tracked: dict[str, Tracked] = {}
        self.healed = False
        self.epoch = 0
        self.num_added = 0
        sizes = [config.num_blocks, *(group.num_blocks for group in self.bounded_groups)]
        if config.has_ranks:
            from simulation.ranks import RankedWorker

            self.worker: HashWorker = RankedWorker(seed, config, sizes)
        else:
            self.worker = HashWorker(
                sizes, config.block_size, config.num_host_blocks, config.kinds, config.num_host_states
            )
        # Colliding keys are not allowed with a store, which does not compare tokens.
        rate = config.remote_rate if config.hash_bits is None else 0.0
        self.store = SimulatedStore(self.worker, random.Random(seed + "store"), rate)
        self.sample_rng = random.Random(seed + "samples")
        self.async_rng = random.Random(seed + "async")
        self.span_rng = random.Random(seed + "spans")
        self.point_rng = random.Random(seed + "points")
        self.pipeline = Pipeline(self.worker, self.store, self.async_rng)
        self.nothing_free: tuple[list[list[int]], list[list[int]]] = (
            [[] for _ in self.worker.memory],
            [[] for _ in self.worker.host],
        )
        self.free = self.nothing_free
        self.is_giving_back = False
        self.ending: set[str] = set()
        self.saved_states: list[events.CheckpointSaved] = []  # with the newest result
        self.forced: set[str] = set()
        self.admission_step = self.preemption_step = -1
        self.num_stalled = 0
        self.admitted: set[str] = set()
        self.had_seat = False
        self.blocked: tuple[str, WaitReason] | None = None
        self.mirror = CacheMirror()
        self.scheduler = self._make_scheduler()
        self.last: tuple[SchedulerOutput, ModelOutput] | None = None
        self._watch_releases()
        self._watch_lookups()
        self.prefixes = [[self.rng.randrange(VOCAB_SIZE) for _ in range(config.longest_prompt)] for _ in range(3)]

    @property
    def bounded_groups(self) -> list[KVGroupSpec]:
        """The further KV groups: at least as many blocks as a single request needs, and at most as many as the first
        has.
        """
        config, size = self.config, self.config.block_size
        num_more = -(-(config.max_num_batched_tokens - 1) // size) + config.num_spare_window_blocks
        num_states = config.max_num_seqs + config.num_spare_states
        return [
            KVGroupSpec(
                kind,
                num_states
                if isinstance(kind, RecurrentStates)
                else min(config.num_blocks, num_blocks_read(kind, size) + num_more),
                config.num_host_states if isinstance(kind, RecurrentStates) else 0,
            )
            for kind in config.kinds
        ]

    def _make_scheduler(self) -> Scheduler:
        c = self.config
        names = {each.name for each in fields(SchedulerConfig)} & {each.name for each in fields(WorldConfig)}
        options: dict[str, Any] = {name: getattr(c, name) for name in names}
        if c.admission == "reservation":
            options |= {"waiting_served_ratio": 0.5, "max_waiting_tokens": 3}
        else:
            options["max_batch_total_tokens"] = None
        scheduler = Scheduler(
            SchedulerConfig(**options, kv_transfer_timeout_s=6.0, kv_lookup_timeout_s=0.5),
            CacheConfig(
                block_size=c.block_size,
                enable_prefix_caching=c.enable_prefix_caching,
                cache_decoded_blocks=c.cache_decoded_blocks,
                state_checkpoint_interval=c.checkpoint_interval,
            ),
            num_blocks=c.num_blocks,
            num_host_blocks=c.num_host_blocks,
            bounded_groups=self.bounded_groups,
            max_model_len=4000,
            clock=lambda: self.now,
            sink=self,
            connector=self.store,
            cache_listener=self.mirror,
        )
        if c.hash_bits is not None:  # colliding hashes must not matter (CVE-2025-25183)
            chains, mask = scheduler.kv_cache_manager.prefix_cache.chains, (1 << c.hash_bits) - 1
            chains.hash_function = lambda *args: bytes([hash_block_tokens(*args)[0] & mask])
        return scheduler

    def _watch_releases(self) -> None:
        """Check that tails are released before heads: otherwise heads would be evicted first."""
        pool = self.scheduler.kv_cache_manager.pool
        release = pool.release

        def watched(blocks: Iterable[Block]) -> None:
            blocks = list(blocks)
            gone = set()
            for block in blocks:
                if block.parent in gone:
                    raise SimulationError(f"{block} is given back after the block before it")
                gone.add(block.link)
            release(blocks)

        pool.release = watched  # type: ignore[method-assign]

    def _watch_lookups(self) -> None:
        """Check invariant 9: a lookup leaves at least one token to compute, and finds all other cached tokens."""
        manager = self.scheduler.kv_cache_manager
        look_up = manager.get_computed_blocks

        def watched(request: Request) -> ComputedBlocks:
            computed, num_tokens = look_up(request), len(request.sequence.token_ids)
            if computed.num_tokens >= num_tokens:
                raise SimulationError(f"{request.request_id}: nothing is left to compute of {num_tokens} tokens")
            if computed.num_tokens < self._num_in_cache(request):
                raise SimulationError(f"{request.request_id}: the cache has more than {computed.num_tokens} tokens")
            return computed

        manager.get_computed_blocks = watched  # type: ignore[method-assign]

    def _num_in_cache(self, request: Request) -> int:
        """Return how many tokens at the beginning of a request are cached, including all parts that the next row reads.

        Blocks on the device come first, then blocks in host memory. At least one token is not counted. No hash is used.
        """
        manager, size, token_ids = self.scheduler.kv_cache_manager, self.config.block_size, request.sequence.token_ids
        if not (manager.prefix_cache.is_enabled and request.reads_prefix_cache):
            return 0
        on_device = [block for block in manager.pool.blocks if block.hash is not None]
        extra_keys, name, start, has_part = manager.prefix_cache.chains.of(request).extra_keys, None, 0, []
        states = [0]  # numbers of tokens after which a request can start
        for blocks in (on_device, manager.host.cached_blocks()):
            cached = {(block.parent, block.token_ids, block.extra_keys): block for block in blocks}
            while start + size <= len(token_ids):
                key = name, tuple(token_ids[start : start + size]), extra_keys
                if key not in cached:
                    break
                block = cached[key]
                is_on_device = isinstance(block, Block)
                ids = [group.id_of(block) for group in manager.bounded] if is_on_device else []
                num_groups = 1 + len(manager.bounded)
                has_part.append(None not in ids if is_on_device else len(block.groups) == num_groups)
                name, start = block.name, start + size
                if manager.checkpoints is not None and (
                    (is_on_device and manager.checkpoints.group.id_of(block) is not None)
                    or manager.checkpoints.host.find(block.name) is not None
                ):
                    states.append(start)
        ends = [min(end, len(token_ids) - 1) for end in range(0, start + 1, size)]
        if manager.states is not None:
            ends = [end for end in ends if end in states]
        return max(end for end in ends if self._has_all_seen(end, has_part))

    def _has_all_seen(self, num_tokens: int, has_part: list[bool]) -> bool:
        """Return whether the row after `num_tokens` tokens would find all parts that it reads."""
        first = min((kind.first_position(num_tokens) for kind in self.config.kinds), default=num_tokens)
        return all(has_part[position // self.config.block_size] for position in range(first, num_tokens))

    # --- the course of a world ----------------------------------------------------------------------------------------

    def run(self) -> Totals:
        """Run the world. Raises `SimulationError` at the first error."""
        for _ in range(self.config.num_steps):
            self._disturb()
            self._step()
        self.healed = True
        self.store.faulty = False
        self._drain()
        return self.totals

    def _drain(self) -> None:
        for _ in range(MAX_DRAIN_STEPS):
            if not self.scheduler.has_work():
                break
            self._step()
        self.totals.unfinished = len(self.scheduler.requests)
        if self.scheduler.requests:
            raise SimulationError(f"unfinished: {list(self.scheduler.requests.values())}")
        pool = self.scheduler.kv_cache_manager.pool
        self.totals.leaked_blocks = pool.num_blocks - pool.num_free_blocks
        if self.totals.leaked_blocks:
            raise SimulationError(f"{self.totals.leaked_blocks} blocks leaked")
        if self.store.known or self.store.ordered or self.store.donors:
            raise SimulationError(f"the store still knows {self.store.known}, {self.store.ordered}")
        for name, tracked in self.tracked.items():
            if tracked.num_endings != 1:
                raise SimulationError(f"{name} ended {tracked.num_endings} times")

    def _step(self) -> None:
        """Do one step of the engine, with events that may happen while the worker computes."""
        self.now += self.rng.random() * 0.2
        steps = self.pipeline.steps
        if not steps:
            self._decide()
        if self.scheduler.may_look_ahead():
            self.totals.ahead += 1
            self._decide()
        if steps:
            self._collect(steps[0])
        self._check()
        if self.store.breaches:
            raise SimulationError(f"the store saw: {self.store.breaches}")
        if (self.scheduler.in_flight is None) != (not steps) or len(steps) > 1:
            raise SimulationError(f"{len(steps)} steps are in flight, and the core has {self.scheduler.in_flight}")
        self.free = self._find_free()

    def _find_free(self) -> tuple[list[list[int]], list[list[int]]]:
        """Return the blocks of each group and the host blocks that have no holder and are not the source of a copy.

        Blocks evicted while a step is computed are copied with the next step.
        """
        manager = self.scheduler.kv_cache_manager
        copied = {(group, block) for group, block, _ in manager._copies.swap_out}
        free = [[each for each in group.free_ids() if (group.index, each) not in copied] for group in manager.groups]
        in_host = [manager.host.free_block_ids() for _ in manager.groups]
        if manager.checkpoints is not None:
            in_host[-1] = manager.checkpoints.host.free_slots()
        return free, in_host

    def _decide(self) -> None:
        """Decide a step, check it, and submit it unless it is empty."""
        scheduler, steps = self.scheduler, self.pipeline.steps
        self.num_stalled = 0
        self.admitted.clear()
        self.had_seat = (
            len(scheduler.running) + len(scheduler.transfers) + scheduler.waiting_requests.num_deferred
            < self.config.max_num_seqs
        )
        start, is_ahead = self.now, bool(steps)
        scheduled = scheduler.schedule()
        if is_ahead and self.preemption_step == scheduled.step:
            raise SimulationError("somebody was preempted in a step that was decided ahead")
        requests = {name: scheduler.requests[name] for name in scheduled.num_scheduled_tokens}
        preempted = {name: (request, request.num_preemptions) for name, request in requests.items()}
        step = Submitted(scheduled, start, NOTHING_SHARED, self.free, preempted)
        self.free = self.nothing_free  # for the next step, these blocks are used or already poisoned
        steps.append(step)
        with self.pipeline.expected() as self.ending:
            self._check_output(scheduled)
            self._check_order(scheduled)
            step.sharing = self._look_at_sharing(scheduled)
        steps.pop()
        self.forced.clear()
        self.totals.copies += sum(group == 0 for group, _, _ in scheduled.copies.block_copies)
        self.totals.ahead_with_newcomers += is_ahead and bool(scheduled.scheduled_new_reqs)
        self._count_windows(scheduled)
        if scheduled.num_scheduled_tokens:
            self.totals.steps += 1
        if not scheduled.is_empty:
            self.pipeline.submit(step)

    def _count_windows(self, scheduled: SchedulerOutput) -> None:
        """Count uses of window blocks, and the requests that have released some."""
        totals, copies = self.totals, scheduled.copies
        totals.window_copies += sum(group > 0 for group, _, _ in copies.block_copies)
        totals.window_swaps_out += sum(group > 0 for group, _, _ in copies.swap_out)
        totals.window_swaps_in += sum(group > 0 for group, _, _ in copies.swap_in)
        for order in scheduled.kv_transfers:
            count = sum(block_id != NO_BLOCK for ids in order.block_ids[1:] for block_id in ids)
            if order.direction is TransferDirection.LOAD:
                totals.window_loads += count
            else:
                totals.window_saves += count
        totals.state_saves += sum(map(len, scheduled.state_saves.values()))
        totals.behind_window += sum(any(request.sequence.first_held) for request in self.scheduler.running)

    def _collect(self, step: Submitted) -> None:
        """Process the result of the oldest step, or its failure."""
        scheduled = step.scheduled
        if self.config.mixed_step_ms:  # time passes while the worker computes
            self.now += self.config.step_base_s + STEP_S * scheduled.total_num_scheduled_tokens
        rate = self.config.step_failure_rate * (20 if scheduled.copies else 1)
        if not self.healed and self.rng.random() < rate:
            self._fail_step(step)
            return
        result = self.pipeline.run(step)
        if not self.healed and self.scheduler.requests and self.rng.random() < self.config.async_abort_rate:
            if self.rng.random() < 0.5:
                self._replace(self.rng.choice(list(self.scheduler.requests)))
            else:
                self._abort("abort while a step runs")
        if not self.healed and self.last is not None and self.rng.random() < self.config.stale_result_rate:
            self._count("stale result")
            self._take(self.scheduler.update_from_output(*self.last))
        if not self.healed and len(self.pipeline.steps) > 1 and self.async_rng.random() < self.config.stale_result_rate:
            self._count("result before its turn")
            behind = self.pipeline.steps[1].scheduled
            self._take(self.scheduler.update_from_output(behind, ModelOutput(behind.step, {})))
        if result.sampled_token_ids and not self.healed and self.rng.random() < self.config.error_rate:
            self._count("logits that are no numbers")
            result.errors[self.rng.choice(list(result.sampled_token_ids))] = "injected"
        miscounted = self._miscount(step, result)
        places = self._postpone(step, result, miscounted)
        result = replace(self._compute_drafts(scheduled, result), draft_token_ids=self._draft(scheduled, result))
        step.sharing = replace(step.sharing, limit=self.scheduler.batching.prefill_limit)
        alive = step.alive()
        before = {
            request.request_id: request.spec_token_ids
            for request in self.scheduler.running
            if request.request_id not in scheduled.num_scheduled_tokens
        }
        self.saved_states.clear()
        outputs = self.scheduler.update_from_output(scheduled, result)
        self.pipeline.steps.popleft()
        self._check_saved_states()
        self._check_kept(result.draft_token_ids, before)
        self._check_miscounted(miscounted, outputs)
        self._check_postponed(places, outputs, result.draft_token_ids)
        self._take(outputs)
        self._check_learned(step.sharing, self.now - max(step.start, self.last_result))
        self.last_result = self.now
        for behind in self.pipeline.steps:
            self.totals.in_vain += sum(
                request.request_id in behind.requests and request.is_finished for request in alive
            )
        if not self.healed and self.rng.random() < self.config.stale_result_rate:
            self._count("double result")
            limit = self.scheduler.batching.prefill_limit
            self._take(self.scheduler.update_from_output(scheduled, result))
            self._expect_limit(limit, limit, "after a result that came twice")
        self.last = scheduled, replace(result, kv_transfers=[])

    def _miscount(self, step: Submitted, result: ModelOutput) -> str | None:
        """Give a request, preferably one with drafts, no token or one more than it has rows; return its id, or None."""
        drafts, sampled = step.scheduled.scheduled_spec_decode_tokens, result.sampled_token_ids
        rng, alive = self.sample_rng, step.alive()
        due = [
            request.request_id
            for request in self.scheduler.running
            if request in alive and request.request_id in sampled and request.request_id not in result.errors
        ]
        due = [request_id for request_id in due if request_id in drafts] or due
        if self.healed or not due or rng.random() >= self.config.lost_sample_rate:
            return None
        request_id = rng.choice(due)
        what = "a request with drafts" if request_id in drafts else "a request"
        if rng.random() < 0.5:
            self._count(f"no token for {what}")
            del sampled[request_id]
        else:
            self._count(f"a token too many for {what}")
            sampled[request_id] = [0] * (len(drafts.get(request_id, ())) + 2)
        return request_id

    def _postpone(self, step: Submitted, result: ModelOutput, miscounted: str | None) -> dict[str, int]:
        """Postpone the tokens of some requests; return the number of tokens of each that runs and does not fail.

        If steps are decided ahead, only requests that wait for each result are postponed.
        """
        places, waiting = {}, [request.request_id for request in step.alive() if request.awaits_results]
        for request_id in list(result.sampled_token_ids):
            if self.healed or request_id == miscounted or self.sample_rng.random() >= self.config.postpone_rate:
                continue
            if self.config.async_scheduling and request_id not in waiting:
                continue
            self.worker.take_back(request_id, len(result.sampled_token_ids.pop(request_id)))
            result.postponed.add(request_id)
            request = self.scheduler.requests.get(request_id)
            if request in step.alive() and request_id not in result.errors:
                places[request_id] = len(request.sequence.token_ids)
        self.totals.postponed += len(places)
        return places

    def _check_postponed(
        self, places: dict[str, int], outputs: list[EngineCoreOutput], drafts: dict[str, list[int]]
    ) -> None:
        """Check that postponed requests keep running with one token to compute and only new drafts, and report no
        token.
        """
        for output in outputs:
            if output.request_id in places and (output.new_token_ids or output.finish_reason):
                raise SimulationError(f"{output.request_id}: a token that was postponed came: {output}")
        for request_id, num_tokens in places.items():
            request = self.scheduler.requests[request_id]
            if (len(request.sequence.token_ids), request.num_computed_tokens) != (num_tokens, num_tokens - 1):
                raise SimulationError(f"{request} was postponed and knew {num_tokens} tokens")
            if request.spec_token_ids and request_id not in drafts:
                raise SimulationError(f"{request} was postponed and keeps drafts")

    def _check_miscounted(self, request_id: str | None, outputs: list[EngineCoreOutput]) -> None:
        """Check that the request ends with an error immediately, and reports none of the tokens."""
        told = [output for output in outputs if output.request_id == request_id]
        if request_id is not None and [(each.finish_reason, each.new_token_ids) for each in told] != [("error", [])]:
            raise SimulationError(f"{request_id}: a wrong number of tokens is no error: {told}")

    def _fail_step(self, step: Submitted) -> None:
        """Make the worker fail before or after the whole step; its loads are lost.

        Steps decided after it are discarded: a request that is only in those starts again.
        """
        self._count("failed step")
        scheduled, steps = step.scheduled, self.pipeline.steps
        if self.rng.random() < 0.5:
            self.pipeline.run(steps[-1])
        self.store.moving = {}
        alive = [name for name in scheduled.num_scheduled_tokens if name in self.scheduler.requests]
        replaced = self.rng.choice(alive) if alive and self.rng.random() < 0.3 else None
        if replaced is not None:
            self._replace(replaced)
        limit, ended = self.scheduler.batching.prefill_limit, set(step.alive())
        behind = [request for each in list(steps)[1:] for request in each.alive() if request not in ended]
        self.is_giving_back = True
        outputs = self.scheduler.fail_step(scheduled, "injected")
        self.is_giving_back = False
        steps.clear()
        if any(output.request_id == replaced for output in outputs):
            raise SimulationError(f"{replaced} was not in the step that failed, and ended with it")
        if any(request.status is not RequestStatus.PREEMPTED for request in behind):
            raise SimulationError(f"of the step behind one that failed these do not start again: {behind}")
        self.totals.given_back += len(behind)
        self._take(outputs)
        self._expect_limit(limit, limit, "after a step that failed")
        if self.rng.random() < 0.5:
            self._take(self.scheduler.update_from_output(scheduled, ModelOutput(scheduled.step, {})))

    def _take(self, outputs: list[EngineCoreOutput]) -> None:
        for output in outputs:
            tracked = self.tracked[output.request_id]
            if tracked.num_endings:
                raise SimulationError(f"{output.request_id}: news after its end")
            for token in output.new_token_ids:
                self.totals.tokens += 1
                if token != tracked.oracle.next_token():
                    self.totals.wrong_tokens += 1
                    raise SimulationError(f"{output.request_id}: wrong token {tracked.num_tokens}")
                tracked.oracle.accept(token)
                tracked.num_tokens += 1
                if token in tracked.stop_ids and output.finish_reason != "stop":
                    raise SimulationError(f"{output.request_id}: goes on behind its stop token")
            if output.finish_reason is not None:
                self._end(output, tracked)

    def _end(self, output: EngineCoreOutput, tracked: Tracked) -> None:
        tracked.num_endings += 1
        if output.finish_reason == "error" and not output.error:
            raise SimulationError(f"{output.request_id}: an error without a word")
        if output.finish_reason == "stop" and output.new_token_ids[-1] not in tracked.stop_ids:
            raise SimulationError(f"{output.request_id}: stopped at a token that stops nothing")
        if output.finish_reason == "abort":
            tracked.features.add("abort")
        if tracked.num_tokens > tracked.max_tokens:
            raise SimulationError(f"{output.request_id}: {tracked.num_tokens} tokens of {tracked.max_tokens}")
        if output.finish_reason == "length" and tracked.num_tokens < tracked.max_tokens:
            self._check_cut(output.request_id, tracked)
        if tracked.num_tokens == 0 and output.finish_reason not in {"abort", "error"}:
            raise SimulationError(f"{output.request_id}: ended with {output.finish_reason} and no token")
        features = [name for name in FEATURES if name in tracked.features]
        for i, first in enumerate(features):
            for j, second in enumerate(features[i + 1 :], i + 1):
                for third in features[j + 1 :]:
                    self.totals.combinations[first, second, third] += 1

    def _check_cut(self, request_id: str, tracked: Tracked) -> None:
        """Check invariant 14: a request ends early only if it fills the whole cache."""
        capacity = self.config.num_blocks * self.config.block_size
        if tracked.oracle.length < capacity + 1:
            raise SimulationError(f"{request_id}: cut at {tracked.oracle.length} of {capacity} tokens")

    # --- disturbances -------------------------------------------------------------------------------------------------

    def _disturb(self) -> None:
        rng, config, scheduler = self.rng, self.config, self.scheduler
        while len(scheduler.requests) < config.max_open and rng.random() < config.arrival_rate:
            self._arrive()
        if scheduler.requests and rng.random() < config.abort_rate:
            self._abort("abort")
        if scheduler.running and rng.random() < config.preempt_rate:
            self._count("forced preemption")
            self.forced.add(rng.choice(scheduler.running).request_id)
            scheduler.faults.preempt(self.forced)
        cached = scheduler.kv_cache_manager.pool.cached_blocks()
        if cached and rng.random() < config.eviction_rate:
            self._count("forced eviction")
            scheduler.faults.evict(rng.choice(cached))
        if rng.random() < config.freeze_rate:
            self._count("freeze")
            self.now += rng.random() * 20
        if not scheduler.requests and rng.random() < 0.02 and not scheduler.has_work():
            self._count("new weights")
            self.epoch += 1
            scheduler.faults.replace_weights()
        if rng.random() < 0.01:
            scheduler.reset_prefix_cache()

    def _arrive(self) -> None:
        rng, config = self.rng, self.config
        size, capacity = config.block_size, config.num_blocks * config.block_size
        length = rng.choice([rng.randint(1, config.longest_prompt), size * rng.randint(1, 5) + rng.randint(-1, 1)])
        if rng.random() < 0.05:
            length = capacity + rng.randint(-2, 1)
        elif rng.random() < 0.95:
            length = min(length, capacity - 1)  # most are not refused
        if rng.random() < config.short_prompt_rate:  # of one partly filled block
            length = min(rng.randint(1, size), length)
        length = max(length, 1)
        shared = rng.choice(self.prefixes)[: rng.randint(0, config.longest_prompt)]
        prompt = (shared + [rng.randrange(VOCAB_SIZE) for _ in range(length)])[:length]
        salt = rng.choice([None, None, None, "a", "b"])
        adapter = rng.choice([None, None, None, "x"])
        for _ in range(rng.choice([1, 1, 1, 2, 3])):
            self._add(prompt, salt, adapter)

    def _replace(self, name: str) -> None:
        """Abort a request while a step runs, and add another one with the same id."""
        self._count("id used again while a step runs")
        self._take(self.scheduler.abort_request(name))
        self._add([self.rng.randrange(VOCAB_SIZE)], None, None, name)

    def _with_spans(self, prompt: list[int]) -> tuple[list[int], tuple[ContentSpan, ...]]:
        """Make parts of some prompts represent one of two contents, all with the same tokens.

        Prompts with equal beginnings have them at the same places, so they have equal tokens and different contents.
        """
        spans, prompt = list[ContentSpan](), list(prompt)
        if self.span_rng.random() >= self.config.span_rate:
            return prompt, ()
        places, end = random.Random(prompt[0]), 0
        while (first := end + places.randint(0, 5)) + 6 <= len(prompt):
            end = first + places.randint(1, 6)
            prompt[first:end] = [0] * (end - first)
            spans.append(ContentSpan(first, end, self.span_rng.choice("12")))
        return prompt, tuple(spans)

    def _draw_sampling(self) -> dict[str, Any]:
        """With ranks, some requests have a temperature, or a filter, for which rank 0 needs all logits."""
        number = self.num_added if self.config.has_ranks else 0
        return {"temperature": 0.5 * (number % 2), "top_k": 5 if number % 8 == 7 else 0}

    def _add(self, prompt: list[int], salt: str | None, adapter: str | None, chosen: str | None = None) -> None:
        rng, config = self.rng, self.config
        name = f"r{self.num_added}"
        self.num_added += 1
        ended = [each for each in list(self.tracked)[-8:] if self.tracked[each].num_endings]
        if ended and rng.random() < config.reused_id_rate:
            name = rng.choice(ended)
        name = chosen or name
        max_tokens = rng.randint(1, config.longest_output)
        if config.admission == "reservation" and rng.random() < 0.9:
            max_tokens = max(min(max_tokens, config.num_blocks * config.block_size - len(prompt)), 1)
        pair = self._draw_pair(name)
        if pair is not None and pair.is_prefill:  # no client reads its answer
            max_tokens = 1
        deadline = self.now + rng.random() * 20 if rng.random() < config.deadline_rate else None
        identity = hash((ord(salt or "-"), ord(adapter or "-"), self.epoch))
        prompt, spans = self._with_spans(prompt)
        oracle, size = Oracle(prompt, identity, config.kinds, spans), config.block_size
        stop_ids = frozenset(oracle.guess(rng.randint(1, 8), 0.0, rng)[-1:]) if rng.random() < config.stop_rate else ()
        scored = 1 if rng.random() < config.scored_rate else None
        awaits = config.async_scheduling and self.async_rng.random() < config.awaiting_rate
        request = Request(
            name,
            prompt,
            SamplingParams(max_tokens=max_tokens, prompt_logprobs=scored, **self._draw_sampling()),
            stop_token_ids=frozenset(stop_ids),
            arrival_time=self.now,
            priority=rng.randint(0, 2),
            cache_salt=salt,
            adapter=adapter,
            spans=spans,
            tenant=rng.choice("xyz"),
            deadline=deadline,
            kv_transfer_params=pair,
            cache_points=self._draw_cache_points(len(prompt)),
        )
        request.awaits_results = awaits
        try:
            self.scheduler.add_request(request)
        except RequestError:
            self._count("refused")
            return
        self.worker.identities[name], self.worker.spans[name] = identity, spans
        if self.store.rate and rng.random() < config.neighbour_rate:  # another engine computed it before
            self.scheduler.kv_cache_manager.update_block_hashes(request)
            other = Oracle(prompt, identity, config.kinds, spans)
            self.store.publish(request.block_hashes, other.block_contents(size), other.states_after_blocks(size))
        if request.expects_kv and self.store.rate:
            self.scheduler.kv_cache_manager.update_block_hashes(request)
            computed = Oracle(prompt, identity, config.kinds, spans)
            contents, states = computed.block_contents(size), computed.states_after_blocks(size)
            self.store.hand_over(name, request.block_hashes[:], contents, states)
        tracked = self.tracked[name] = Tracked(oracle, max_tokens, frozenset(stop_ids))
        self.totals.requests += 1
        tracked.features |= {config.policy, config.admission} & set(FEATURES)
        if config.policy == "fair" and request.priority:
            tracked.features.add("priority")

    def _draw_cache_points(self, num_tokens: int) -> tuple[int, ...]:
        rng = self.point_rng
        is_drawn = rng.random() < self.config.cache_point_rate
        return tuple(rng.randint(0, num_tokens + 3) for _ in range(rng.randint(1, 3))) if is_drawn else ()

    def _draw_pair(self, name: str) -> KVTransferParams | None:
        """Give some requests a pairing: another engine computes their prompt, or this one computes it for another
        engine.
        """
        if not self.config.pair_rate or self.rng.random() >= self.config.pair_rate:
            return None
        return KVTransferParams(name, is_prefill=self.rng.random() < 0.3)

    def _abort(self, fault: str) -> None:
        self._count(fault)
        request_id = self.rng.choice(list(self.scheduler.requests))
        self._take(self.scheduler.abort_request(request_id))

    def _compute_drafts(self, scheduled: SchedulerOutput, result: ModelOutput) -> ModelOutput:
        """Let time pass for the passes of a draft model, as many as the scheduler allows."""
        bounds, pass_s, most = scheduled.max_drafts, self.config.pass_s, self.config.max_drafts
        if not bounds.keys() <= scheduled.num_scheduled_tokens.keys() or min(bounds.values(), default=0) < 0:
            raise SimulationError(f"bounds of nobody, or below 0: {bounds}")
        if bounds and pass_s is None:
            raise SimulationError(f"bounds where nothing is computed: {bounds}")
        self.totals.bounded += len(bounds)
        names = frozenset(
            name for name in result.sampled_token_ids if self.rng.random() < 0.8
        )  # the drafts of the rest are looked up
        num_passes = max((min(bounds.get(name, most), most) for name in names), default=0)
        if pass_s is None or not num_passes:
            return result
        self.totals.passes += num_passes
        drafting_s = pass_s * num_passes
        if self.config.mixed_step_ms:
            self.now += drafting_s
        return replace(result, drafting_s=drafting_s, num_drafting_passes=num_passes, computed_drafts=names)

    def _draft(self, scheduled: SchedulerOutput, result: ModelOutput) -> dict[str, list[int]]:
        """Return drafts that follow the tokens of a result, for running requests whether they decode or not."""
        config, rng = self.config, self.rng
        drafts: dict[str, list[int]] = {}
        if not config.max_drafts or rng.random() >= config.draft_rate:
            return drafts
        for request in self.scheduler.running:
            oracle = self.tracked[request.request_id].oracle
            most = scheduled.max_drafts.get(request.request_id, config.max_drafts)
            count = min(rng.randint(1, config.max_drafts), most)
            sampled = result.sampled_token_ids.get(request.request_id, ())
            drafts[request.request_id] = oracle.guess(count, config.draft_error, rng, sampled)
        return drafts

    def _check_kept(self, drafts: dict[str, list[int]], before: dict[str, list[int]]) -> None:
        """Check that each request has the first of its new drafts, or its earlier ones."""
        for request in self.scheduler.running:
            if request.request_id not in drafts:
                continue
            kept, guessed = request.spec_token_ids, drafts[request.request_id]
            if kept not in (guessed[: len(kept)], before.get(request.request_id)):
                raise SimulationError(f"{request.request_id} has drafts that nobody guessed: {kept}, not {guessed}")
            self.totals.withheld += len(guessed) - len(kept)

    # --- observation --------------------------------------------------------------------------------------------------

    def emit(self, event: events.Event) -> None:
        """Read the event stream: count events and check them."""
        kind = type(event)
        if kind is events.StepScheduled or kind is events.StepCompleted:
            return
        totals = self.totals
        if kind is events.RequestPreempted:
            totals.preemptions += 1
            totals.swaps += event.swapped
            self.tracked[event.request_id].features.add("swap" if event.swapped else "recompute")
            if self.is_giving_back:
                return
            self.preemption_step = event.step
            if self.admission_step == self.preemption_step:
                raise SimulationError(f"{event.request_id}: preempted in a step that admitted")
            self._check_victim(event.request_id)
        elif kind is events.RequestStalled or kind is events.RequestOutranked:
            self.num_stalled += 1
        elif kind is events.RequestBlocked:
            self.blocked = (event.request_id, event.reason)
        elif kind is events.RequestAdmitted:
            self.admitted.add(event.request_id)
            self.admission_step = event.step
            if self.admission_step == self.preemption_step:
                raise SimulationError(f"{event.request_id}: admitted in a step that preempted")
        elif kind is events.DraftsVerified:
            self._check_drafts(event)
        elif (kind is events.KVLoadEnded or kind is events.KVSaveEnded) and event.outcome == "done":
            self._note_moved(event)
        else:
            self._note_cached(event)

    def _note_cached(self, event: events.Event) -> None:
        totals = self.totals
        match event:
            case events.PrefixCacheQueried():
                totals.hits += event.num_hit_tokens > 0
                totals.state_hits += self.config.has_states and event.num_hit_tokens > 0
                longest = max(self.config.window, self.config.second_window)
                is_long = event.num_hit_tokens >= longest + self.config.block_size
                totals.window_hits += is_long and self.config.window > 0
                if event.num_hit_tokens:
                    self.tracked[event.request_id].features.add("prefix")
            case events.BlockEvicted():
                totals.evictions += 1
            case events.CheckpointSaved():
                self.saved_states.append(event)
            case events.CheckpointEvicted():
                totals.state_evictions += 1
            case events.BlockOffloaded():
                totals.offloads += 1
            case events.HostBlockEvicted():
                totals.host_evictions += 1
            case events.KVSavesDropped():
                totals.dropped_saves += 1
                self._check_dropped(event)
            case events.HostBlocksFound():
                totals.host_hits += 1
                self.tracked[event.request_id].features.add("host")

    def _check_saved_states(self) -> None:
        """Check that each saved state was offered to the store if its block was, unless it is being saved."""
        manager, transfers = self.scheduler.kv_cache_manager, self.scheduler.transfers
        for event in self.saved_states:
            request = self.scheduler.requests.get(event.request_id)
            index = event.num_tokens // self.config.block_size - 1
            table = [] if request is None else request.sequence.block_table  # empty if it was preempted
            if request is None or index >= min(transfers._num_offered.get(event.request_id, 0), len(table)):
                continue
            key, slot = request.block_hashes[index], manager.checkpoints.slot_after(table[index])
            if slot is not None and key not in self.store.offered_states | transfers._saving_states:
                raise SimulationError(f"the state after {event.num_tokens} tokens of {event.request_id} is not offered")

    def _check_dropped(self, event: events.KVSavesDropped) -> None:
        """Check that saves were dropped only because the limits on pinned or saved blocks were reached."""
        transfers = self.scheduler.transfers
        orders = [each.order for each in transfers._pending.values() if each.request is None]
        num_pinned = sum(len(order.keys) for order in orders)
        num_in_full = num_pinned - sum(are_whole(order.block_ids).count(False) for order in orders)
        is_full = num_pinned >= transfers._most_pinned or num_in_full >= transfers.most_saved_blocks
        if event.num_blocks < 1 or not is_full:
            raise SimulationError(f"{event}, though only {num_pinned} blocks are being saved")

    def _note_moved(self, event: events.KVLoadEnded | events.KVSaveEnded) -> None:
        if isinstance(event, events.KVSaveEnded):
            self.totals.saves += 1
            return
        self.totals.loads += 1
        self.tracked[event.request_id].features.add("remote")

    def _check_drafts(self, event: events.DraftsVerified) -> None:
        self.tracked[event.request_id].features.add("speculation")
        self.totals.drafted += event.num_drafted
        self.totals.accepted += event.num_accepted
        # Drafts that are never wrong are all accepted, and drafts that are always wrong are all rejected.
        least = event.num_drafted if self.config.draft_error == 0 else 0
        most = 0 if self.config.draft_error == 1 else event.num_drafted
        if not least <= event.num_accepted <= most:
            raise SimulationError(f"{least} to {most} drafts were to be accepted: {event}")

    def _check_victim(self, request_id: str) -> None:
        """Check invariant 16: the victim is the least important one, never the most important, and not preempted too
        often.
        """
        if request_id in self.forced:
            return
        scheduler = self.scheduler
        victim, rank, limit = scheduler.requests[request_id], scheduler.policy.rank, self.config.max_num_preemptions
        others = sorted(scheduler.running, key=rank)
        if victim.num_preemptions > limit:
            raise SimulationError(f"{request_id} was preempted {victim.num_preemptions} times of {limit}")
        if not others or rank(victim) < rank(others[0]):
            raise SimulationError(f"{request_id} is the most important one and was preempted")
        if any(rank(other) > rank(victim) and other.num_preemptions < limit for other in others):
            raise SimulationError(f"{request_id} was preempted, and others are less important")

    def _check_output(self, scheduled: SchedulerOutput) -> None:
        """Check invariant 13: the step keeps its limits. Also record which prompts are cut."""
        config = self.config
        total = sum(scheduled.num_scheduled_tokens.values())
        if total != scheduled.total_num_scheduled_tokens or total > config.max_num_batched_tokens:
            raise SimulationError(f"{total} tokens in a step of {config.max_num_batched_tokens}")
        if len(scheduled.num_scheduled_tokens) > config.max_num_seqs:
            raise SimulationError(f"{len(scheduled.num_scheduled_tokens)} requests in a step")
        prefills = decodes = 0
        fresh = {data.request_id for data in scheduled.scheduled_new_reqs}
        for request_id, count in scheduled.num_scheduled_tokens.items():
            if count <= 0:
                raise SimulationError(f"{request_id} got {count} tokens")
            request = self.scheduler.requests[request_id]
            if is_prefill(request):
                prefills += 1
                if count < len(request.sequence.token_ids) - request.num_computed_tokens:
                    self.tracked[request_id].features.add("chunk")
            elif request_id not in fresh:
                decodes += 1  # a request that resumes with all but one token saved may count as prefill or decode
        if config.batching == "prefill_first" and prefills and decodes:
            raise SimulationError("a step mixes prompts and answers")
        if scheduled.step != self.preemption_step:  # a victim had tokens of the budget
            self._check_cost(scheduled)

    @property
    def _going_on(self) -> list[Request]:
        """The running requests, except those that end with a result that is not collected yet."""
        return [request for request in self.scheduler.running if request.request_id not in self.ending]

    def _check_cost(self, scheduled: SchedulerOutput) -> None:
        """Check invariant 13: the cost of tokens is within the budget, and no request is cut that could have had a
        token more.
        """
        config, budget = self.config, self._budget()
        is_cut, cut_weight = False, 0.0
        is_full = self._check_prompt_tokens(scheduled)
        least = most = 0.0  # a single token may cost more than the rest of the budget; costs are rounded up
        for request_id, count in scheduled.num_scheduled_tokens.items():
            request, weight = self.scheduler.requests[request_id], 1.0
            if is_prefill(request) or request_id in self.admitted:
                weight += (config.attention_cost_tokens or 0.0) * request.num_computed_tokens / 1000
            least += count * weight if count > 1 else 1
            most += count * weight + (weight > 1)
            wanted = request.num_tokens - request.num_computed_tokens
            is_short = count < min(wanted, config.long_prefill_token_threshold or wanted)
            if is_short and not (is_full and is_prefill(request)):
                is_cut, cut_weight = True, max(weight, cut_weight)
        older = {r.request_id for r in self._going_on if not (is_full and is_prefill(r))} - self.admitted
        left_out = older - set(scheduled.num_scheduled_tokens)
        if config.batching == "mixed" and len(left_out) > self.num_stalled:
            raise SimulationError(f"{left_out} got nothing, though everyone who runs gets a token")
        if least > budget + 1e-6:
            raise SimulationError(f"tokens of a cost of {least} in a step of {budget}")
        if is_cut and most + cut_weight <= budget - self.num_stalled:
            raise SimulationError(f"somebody was cut short in a step of {budget}, of which {most} were spent")

    def _check_prompt_tokens(self, scheduled: SchedulerOutput) -> bool:
        """Check invariant 13: prompts get at most `max_batch_prefill_tokens` of a step. Return whether they get all of
        it.
        """
        limit = self.config.max_batch_prefill_tokens
        if limit is None:
            return False
        counts, requests = scheduled.num_scheduled_tokens, self.scheduler.requests
        taken = sum(count for request_id, count in counts.items() if is_prefill(requests[request_id]))
        if taken > limit:
            raise SimulationError(f"{taken} tokens of prompts in a step that may have {limit}")
        return taken == limit

    def _budget(self) -> int:
        """Return the cost that the tokens of a step may have: less for prompts in steps with answers."""
        limit, most = self._prefill_limit(), self.config.max_num_batched_tokens
        older = [request for request in self._going_on if request.request_id not in self.admitted]
        answers = sum(request.num_tokens - request.num_computed_tokens for request in older if not is_prefill(request))
        prompts = sum(is_prefill(request) for request in older)
        is_limited = limit and answers and self.config.batching == "mixed"
        return min(most, answers + max(limit, prompts)) if is_limited else most

    def _prefill_limit(self) -> int:
        """Return the limit on prompt tokens in steps with answers: the configured one, or the learned one within its
        bounds.
        """
        most, whole = self.config.max_num_mixed_prefill_tokens, self.config.max_num_batched_tokens
        if not self.config.mixed_step_ms or self.config.batching != "mixed":
            return most
        most = most or whole
        limit = self.scheduler.batching.prefill_limit
        if not min(most, max(whole // 8, 1)) <= limit <= most:
            raise SimulationError(f"{limit} tokens beside answers, of a step of {whole} and {most} at most")
        return limit

    def _look_at_sharing(self, scheduled: SchedulerOutput) -> Sharing:
        """Describe how prompts and answers share a step."""
        requests, counts = self.scheduler.requests, scheduled.num_scheduled_tokens
        wanted = {name: requests[name].num_tokens - requests[name].num_computed_tokens for name in counts}
        prompts = [name for name in counts if name in self.admitted or is_prefill(requests[name])]
        running = [each for each in self._going_on if each.request_id not in self.admitted]
        answers = [each.request_id for each in running if not is_prefill(each)]
        given_whole = [name for name in answers if counts.get(name, 0) == wanted.get(name)]
        return Sharing(
            limit=self.scheduler.batching.prefill_limit,
            may_be=bool(prompts) and (bool(answers) or bool(scheduled.preempted_req_ids)),
            must_be=bool(prompts) and bool(answers) and not scheduled.preempted_req_ids and given_whole == answers,
            is_short=any(count < wanted[name] for name, count in counts.items()) or bool(self.scheduler.waiting),
        )

    def _check_learned(self, shared: Sharing, seconds: float) -> None:
        """Check that only a shared step changes the limit on prompt tokens, within the allowed range."""
        config, before, step_s = self.config, shared.limit, (self.config.mixed_step_ms or 0.0) / 1000
        if not step_s or not shared.may_be or config.batching != "mixed":
            self._expect_limit(before, before, "though no step was shared")
            return
        whole = config.max_num_batched_tokens
        most = config.max_num_mixed_prefill_tokens or whole
        fewest = min(most, max(whole // 8, 1))
        factor = (
            min(max(step_s / seconds, 0.5), 1.25) if seconds else 1.25
        )  # both values are rounded from a limit that is not whole
        least = largest = float(before)
        if factor < 1:
            least = factor * before
            largest = factor * (before + 1) if shared.must_be else before
        elif shared.is_short:
            largest = factor * (before + 1)
        self._expect_limit(min(max(int(least), fewest), most), min(max(largest, fewest), most), f"after {seconds} s")

    def _expect_limit(self, least: float, most: float, when: str) -> None:
        limit = self.scheduler.batching.prefill_limit
        if not least <= limit <= most:
            raise SimulationError(f"{limit} tokens beside answers, not {least} to {most}, {when}")

    def _check_order(self, scheduled: SchedulerOutput) -> None:
        """Check that no running prompt gets budget for which a more important request waits, or is overtaken in
        admission.
        """
        scheduler, config = self.scheduler, self.config
        if config.policy == "fair":
            return
        rank, served = scheduler.policy.rank, scheduled.num_scheduled_tokens
        older = [r for r in scheduler.running if r.request_id not in self.admitted and is_prefill(r)]
        newest = max((rank(r) for r in scheduler.running if r.request_id in self.admitted), default=None)
        first = scheduler.waiting.peek_request() if scheduler.waiting else None
        waits_for_budget = self.had_seat and first is not None
        waits_for_budget &= first is not None and self.blocked == (first.request_id, WaitReason.NO_BUDGET)
        may_be_cut = config.enable_chunked_prefill and config.admission == "optimistic"
        for request in older:
            if request.request_id not in served and newest is not None and newest > rank(request):
                raise SimulationError(f"{request.request_id} got nothing, and somebody less important was admitted")
            is_served = waits_for_budget and may_be_cut and request.request_id in served
            if is_served and first is not None and rank(request) > rank(first):
                raise SimulationError(f"{request.request_id} is served, and {first.request_id} waits for budget")

    def _check(self) -> None:
        breaches = invariants.check(self.scheduler)
        if breaches:
            raise SimulationError("; ".join(f"invariant {each.invariant}: {each.message}" for each in breaches))
        if mistakes := self.mirror.mistakes(self.scheduler.kv_cache_manager):
            raise SimulationError("; ".join(mistakes))

    def _count(self, fault: str) -> None:
        self.totals.faults[fault] += 1


def run_world(seed: str, config: WorldConfig) -> Totals:
    """Run one world from its seed. Raises `SimulationError`, also for any exception of the core."""
    world = World(seed, config)
    try:
        totals = world.run()
    except SimulationError:
        raise
    except (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise SimulationError(f"the core raised {error!r}") from error
    totals.faults.update(world.store.faults)
    totals.parts_saved, totals.parts_loaded = world.store.num_parts["saved"], world.store.num_parts["loaded"]
    totals.stored_states, totals.loaded_states = world.store.num_states["saved"], world.store.num_states["loaded"]
    return totals
