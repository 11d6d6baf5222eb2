"""Starts the other ranks, and sends them the steps of rank 0."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
import threading
import time
import weakref
from typing import TYPE_CHECKING

from octavo import __version__
from octavo.errors import ConfigError, EngineDeadError, ModelError, OctavoError
from octavo.kernels.machine import cores_of_rank, threads_of_rank
from octavo.kernels.ranked import RankGroup, create_shared_memory
from octavo.models.share import Share
from octavo.ranks import channel, messages
from octavo.ranks.shared_kv import BlocksOfRanks, SharedKV, create_kv_memory
from octavo.runtime import logs

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from octavo.config import EngineConfig
    from octavo.data.scheduler_output import SchedulerOutput
    from octavo.data.worker_info import WorkerInfo
    from octavo.models.architecture import Architecture
    from octavo.worker.kv_cache import PagedKVCache

logger = logging.getLogger(__name__)
_STANDARD_ERROR = 2
_END_S = 5.0
_POLL_S = 0.5
_PROGRESS_S = 5.0


class Leader:
    """Rank 0's connection to the other ranks.

    draft: see `messages.Launch`. shares_kv: True if rank 0 transfers the KV of all ranks. group, share: rank 0's.
    num_threads: of each rank. checksums: see `StepLeader`. num_steps: messages of steps and drafts so far. timeout_s:
    longest wait for a rank. After a rank has ended or hangs, steps raise `EngineDeadError`. Raises `ConfigError` if a
    process cannot be started, and `ModelError` if it ends immediately.
    """

    def __init__(
        self, config: EngineConfig, architecture: Architecture, dtype: str, draft: str | None, *, shares_kv: bool
    ) -> None:
        count = config.device.tensor_parallel_size
        self.share = Share(0, count, config.device.enable_expert_parallel)
        self.num_threads = threads_of_rank(count, config.device.num_threads)
        self.timeout_s = config.device.rank_timeout_s
        self._model = messages.model_digest(architecture)
        self._why = ""
        self._sampled: dict[str, list[int]] = {}
        self.num_steps = 0
        self.checksums: list[tuple[str, str]] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._ends: list[socket.socket] = []
        self._kv_memory: list[int] = []
        self._is_over = threading.Event()
        self._finalizer = weakref.finalize(self, _end, self._processes, self._ends, self._kv_memory, self._is_over)
        with contextlib.ExitStack() as failing:
            failing.callback(self.shutdown)
            memory = self._create_memory(shares_kv=shares_kv)
            with contextlib.closing(os.fdopen(memory)):
                self.group = RankGroup(memory, 0, count, self.timeout_s, cores_of_rank(0, count))
                for rank in range(1, count):
                    self._start(rank, config, memory, dtype, draft)
            failing.pop_all()

    def _create_memory(self, *, shares_kv: bool) -> int:
        try:
            self._kv_memory += (create_kv_memory() for _ in range(1, self.share.count) if shares_kv)
            return create_shared_memory()
        except OSError as error:
            raise ConfigError(f"the system gives ranks no shared memory: {error.strerror}") from None

    def _start(self, rank: int, config: EngineConfig, memory: int, dtype: str, draft: str | None) -> None:
        own, other = socket.socketpair()
        kv_memory = self._kv_memory[rank - 1] if self._kv_memory else None
        with other:
            try:
                process = start_process(other, [memory] if kv_memory is None else [memory, kv_memory])
            except OSError as error:
                own.close()
                raise ConfigError(f"rank {rank} cannot be started: {error.strerror}", rank=rank) from None
        self._processes.append(process)
        self._ends.append(own)
        launch = messages.Launch(
            config,
            rank,
            self.share.count,
            memory,
            kv_memory,
            dtype,
            draft,
            self.num_threads,
            cores_of_rank(rank, self.share.count),
            __version__,
            *logs.in_use(),
        )
        try:
            channel.send(own, messages.encode(launch))
        except channel.ClosedError:
            raise _ended(rank) from None
        watch = threading.Thread(target=_watch, args=[weakref.ref(self), process, rank, self._is_over], daemon=True)
        watch.start()

    def await_loaded(self, kernels: str) -> None:
        """Wait until all ranks have loaded their weights. kernels: identity of rank 0's kernels.

        Raises `ModelError` if a rank fails or has another model, and `ConfigError` if its kernels differ.
        """
        for rank, loaded in self._receive_each("loading weights"):
            if not isinstance(loaded, messages.Loaded):
                continue
            if loaded.kernels != kernels:
                text = f"rank {rank} has kernels {loaded.kernels}, but rank 0 has {kernels}: set isa"
                raise ConfigError(text, rank=rank)
            if loaded.model != self._model:
                raise ModelError(f"rank {rank} has read another configuration than rank 0; start again", rank=rank)

    def allocate(self, info: WorkerInfo, num_scratch_blocks: int, num_kept_rows: int) -> None:
        """Have all ranks allocate as many blocks and kept rows as rank 0. Raises `ModelError`."""
        limits = info.scheduler_config
        order = messages.Allocate(
            [group.spec.num_blocks for group in info.kv_groups],
            info.num_host_blocks,
            info.kv_dtype,
            limits.max_num_seqs,
            limits.max_num_batched_tokens,
            num_scratch_blocks,
            info.kv_groups[-1].spec.num_host_blocks,
            num_kept_rows,
        )
        self._send(messages.encode(order))
        for rank, ready in sorted(self._receive_each("allocating KV and checking weights"), key=lambda each: each[0]):
            if isinstance(ready, messages.Ready):
                self.checksums.append((ready.weights, ready.draft))
            self._ends[rank - 1].settimeout(self.timeout_s)

    def blocks_of_ranks(self, architecture: Architecture, kv_cache: PagedKVCache) -> BlocksOfRanks:
        """See `StepLeader`. Call it after `allocate`, and only if `shares_kv` is True."""
        num_blocks = [len(group.blocks) for group in kv_cache.groups]
        size = kv_cache.block_size, kv_cache.dtype_name, kv_cache.state_dtype_name
        others = [
            SharedKV.of(memory, rank.kv_layout, num_blocks, *size)
            for memory, rank in zip(self._kv_memory, architecture.ranks[1:], strict=True)
        ]
        return BlocksOfRanks(architecture, kv_cache, others, self)

    def announce(self, scheduled: SchedulerOutput) -> None:
        """Send a step to all ranks. Call it before rank 0 computes the step. Raises `EngineDeadError`."""
        number = self._next_number()
        self._send(messages.encode(messages.Step.of(number, scheduled, self._sampled)))
        self._sampled = {}

    def announce_drafts(self, request_ids: list[str], token_ids: list[int], positions: list[int]) -> None:
        """See `StepLeader`. Raises `EngineDeadError`."""
        draft = messages.Draft(self._next_number(), request_ids, token_ids, positions, self._sampled)
        self._send(messages.encode(draft))
        self._sampled = {}

    def _next_number(self) -> int:
        if (failure := self.failure()) is not None:
            raise failure
        self.num_steps += 1
        return self.num_steps

    def take_sampled(self, tokens: dict[str, list[int]]) -> None:
        """Send these tokens with the next step."""
        for name, token_ids in tokens.items():
            self._sampled.setdefault(name, []).extend(token_ids)

    def failed(self, error: BaseException) -> EngineDeadError:
        """End all ranks after an error of rank 0's step. Return the error to raise."""
        if self.group.failed_rank is None:
            self._fail(0, f"rank 0 failed in a step: {type(error).__name__}: {error}")
        elif not self._why:
            self._fail(0, str(error))  # of an exchange
        return self.failure() or EngineDeadError(self._why, rank=self.group.failed_rank)

    def failure(self) -> EngineDeadError | None:
        """Return an error if a rank has failed."""
        rank = self.group.failed_rank
        if rank is None:
            return None
        return EngineDeadError(self._why or f"rank {rank} failed", rank=rank)

    def end_of_steps(self) -> EngineDeadError | None:
        """Return an error if a rank has failed, or if the ranks have been shut down."""
        return self.failure() or (EngineDeadError("the ranks have ended") if self._is_over.is_set() else None)

    def declare_dead(self, rank: int) -> EngineDeadError:
        """End all ranks, because a rank does not do the block copies of a step. Return the error to raise."""
        self._fail(rank, f"rank {rank} has not copied blocks for {self.timeout_s:g} s")
        return self.failed(TimeoutError())

    def _fail(self, rank: int, why: str) -> None:
        self._why = self._why or why
        logger.error("%s", why)
        self.group.fail(rank)

    def end_start(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        """Kill the other ranks after a failed start, as the `__exit__` of a context manager.

        Raises `EngineDeadError` in place of the error of an exchange with a rank that has failed.
        """
        has_failed = self.group.failed_rank is not None
        self.shutdown()
        if has_failed and isinstance(error, Exception) and not isinstance(error, OctavoError):
            raise self.failed(error) from error

    def shutdown(self) -> None:
        """Kill the other ranks."""
        self._finalizer()

    def _send(self, message: bytes) -> None:
        for rank, end in enumerate(self._ends, start=1):
            try:
                channel.send(end, message)
            except (channel.ClosedError, TimeoutError):
                self._fail(rank, f"rank {rank} receives no steps")
                raise self.failed(TimeoutError()) from None

    def _receive_each(self, activity: str) -> Iterator[tuple[int, messages.FromRank]]:
        """Yield a message of each rank, in order of arrival. activity: what the ranks do until they send it."""
        began = logged_at = time.monotonic()

        def look(awaited: Collection[int]) -> None:
            nonlocal logged_at
            now = time.monotonic()
            if awaited and now - logged_at >= _PROGRESS_S:
                logged_at, plural = now, "s" * (len(awaited) > 1)
                names = ", ".join(map(str, awaited))
                logger.info("rank 0 waits for rank%s %s: %s, %.0f s so far", plural, names, activity, now - began)
            if (failed := self.group.failed_rank) is not None and failed not in awaited:
                raise _ended(failed)

        ends = dict(enumerate(self._ends, start=1))
        for rank, data in channel.receive_each(ends, min(_POLL_S, _PROGRESS_S), look):
            if data is None:
                raise _ended(rank)
            message = messages.decode_from_rank(data)
            if isinstance(message, messages.Failed):
                raise ModelError(f"rank {rank}: {message.message}", rank=rank)
            yield rank, message


def _ended(rank: int) -> ModelError:
    return ModelError(f"the process of rank {rank} ended while it started; see its log lines", rank=rank)


def start_process(end: socket.socket, memory: Sequence[int]) -> subprocess.Popen[bytes]:
    """Start a rank that inherits its end of the socket pair and the descriptors of shared memory. Raises `OSError`."""
    return subprocess.Popen(  # noqa: S603 - not from users
        [sys.executable, "-P", "-m", "octavo.ranks.main", str(end.fileno())],
        stdin=subprocess.DEVNULL,
        stdout=_STANDARD_ERROR,
        pass_fds=(end.fileno(), *memory),
    )


def _watch(leader: weakref.ref[Leader], process: subprocess.Popen[bytes], rank: int, is_over: threading.Event) -> None:
    status = process.wait()
    found = leader()
    if found is not None and not is_over.is_set():
        found._fail(rank, f"the process of rank {rank} ended with status {status}")  # noqa: SLF001


def _end(
    processes: list[subprocess.Popen[bytes]],
    ends: list[socket.socket],
    kv_memory: list[int],
    is_over: threading.Event,
) -> None:
    is_over.set()
    while kv_memory:
        os.close(kv_memory.pop())
    for process in processes:
        process.kill()
    for end in ends:
        end.close()
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
