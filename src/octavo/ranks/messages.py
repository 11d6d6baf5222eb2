"""Messages between rank 0 and another rank, encoded as msgpack, never as pickle."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from octavo.config import EngineConfig  # noqa: TC001 - msgspec reads these types
from octavo.data.scheduler_output import BlockCopies, CachedRequestData, NewRequestData, SchedulerOutput
from octavo.sampling_params import SamplingParams
from octavo.worker.sampler import is_simple

if TYPE_CHECKING:
    from collections.abc import Mapping

    from octavo.models.architecture import Architecture


class Launch(msgspec.Struct, frozen=True, tag=True):
    """Starts a rank. memory, kv_memory: inherited descriptors, for `RankGroup` and `SharedKV`. cores: for the rank.

    kv_memory: None if rank 0 transfers no KV. draft: number format of the model's drafts of its own tokens, or None.
    version: of octavo.
    """

    config: EngineConfig
    rank: int
    count: int
    memory: int
    kv_memory: int | None
    dtype: str
    draft: str | None
    num_threads: int
    cores: list[int]
    version: str
    log_level: int
    log_format: str


class Measure(msgspec.Struct, frozen=True, tag=True):
    """Measures the machine as a rank would use it, in a process that serves no model.

    memory, cores: see `Launch`. read_bytes: memory to read in each of read_rounds rounds. exchanges: (rows,
    repetitions) of each kind of exchange. width: number of bfloat16 values in a row.
    """

    rank: int
    count: int
    memory: int
    cores: list[int]
    num_threads: int
    isa: str
    read_bytes: int
    read_rounds: int
    exchanges: list[tuple[int, int]]
    width: int


class Measured(msgspec.Struct, frozen=True, tag=True):
    """Results of `Measure`. read_bytes: of each round. exchange_s: of each kind, the time of one exchange by round."""

    read_bytes: int
    read_s: list[float]
    exchange_s: list[list[float]]


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """A rank has loaded its weights. kernels: see `Kernels.identity`. model: see `model_digest`."""

    kernels: str
    model: str


class Failed(msgspec.Struct, frozen=True, tag=True):
    """A rank cannot start."""

    message: str


class Allocate(msgspec.Struct, frozen=True, tag=True):
    """Sizes of the KV cache and of steps.

    num_blocks: by KV group. num_scratch_blocks: of each sequence, for drafts. num_host_states, num_kept_rows: of
    recurrent layers, see `PagedKVCache`.
    """

    num_blocks: list[int]
    num_host_blocks: int
    kv_dtype: str
    max_num_seqs: int
    max_num_batched_tokens: int
    num_scratch_blocks: int
    num_host_states: int
    num_kept_rows: int


class Ready(msgspec.Struct, frozen=True, tag=True):
    """A rank waits for steps. weights, draft: checksums."""

    weights: str
    draft: str


class NewSequence(msgspec.Struct, frozen=True):
    """A sequence with all of its tokens, sent when it starts or resumes.

    temperature: None if rank 0 needs all logits to sample.
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    block_ids: list[list[int]]
    num_computed_tokens: int
    temperature: float | None
    seed: int
    sample_index: int
    prompt_logprobs: int | None
    pooling: str | None
    rotary_positions: list[list[int]] | None

    @classmethod
    def of(cls, data: NewRequestData) -> NewSequence:
        """Omit what only rank 0 needs."""
        params = data.sampling_params
        return cls(
            data.request_id,
            data.token_ids,
            data.num_prompt_tokens,
            data.block_ids,
            data.num_computed_tokens,
            params.temperature if is_simple(params) else None,
            data.seed,
            data.sample_index,
            params.prompt_logprobs,
            params.pooling,
            data.rotary_positions,
        )

    def to_data(self) -> NewRequestData:
        """Return the request. A filter replaces all settings for which rank 0 needs all logits."""
        params = SamplingParams(
            max_tokens=1,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=2 if self.temperature is None else 0,
            prompt_logprobs=self.prompt_logprobs,
            pooling=self.pooling,
        )
        return NewRequestData(
            self.request_id,
            self.token_ids,
            self.num_prompt_tokens,
            params,
            self.seed,
            self.sample_index,
            frozenset(),
            self.block_ids,
            self.num_computed_tokens,
            rotary_positions=self.rotary_positions,
        )


class Step(msgspec.Struct, frozen=True, tag=True):
    """A step to compute. Of a known sequence, only new tokens and blocks are sent.

    number: counts the steps from 1. sampled: tokens that rank 0 has sampled since the previous message.
    """

    number: int
    new: list[NewSequence]
    known: CachedRequestData
    num_scheduled_tokens: dict[str, int]
    ended: list[str]
    drafts: dict[str, list[int]]
    copies: BlockCopies
    state_saves: dict[str, list[tuple[int, int]]]
    sampled: dict[str, list[int]]

    @classmethod
    def of(cls, number: int, scheduled: SchedulerOutput, sampled: Mapping[str, list[int]]) -> Step:
        """Select what the other ranks need."""
        return cls(
            number,
            [NewSequence.of(each) for each in scheduled.scheduled_new_reqs],
            scheduled.scheduled_cached_reqs,
            scheduled.num_scheduled_tokens,
            [*scheduled.finished_req_ids, *scheduled.preempted_req_ids],
            scheduled.scheduled_spec_decode_tokens,
            scheduled.copies,
            scheduled.state_saves,
            dict(sampled),
        )

    def to_scheduled(self) -> SchedulerOutput:
        """Return the scheduler's output."""
        return SchedulerOutput(
            0,
            [each.to_data() for each in self.new],
            self.known,
            self.num_scheduled_tokens,
            sum(self.num_scheduled_tokens.values()),
            finished_req_ids=set(self.ended),
            scheduled_spec_decode_tokens=self.drafts,
            copies=self.copies,
            state_saves=self.state_saves,
        )


class Draft(msgspec.Struct, frozen=True, tag=True):
    """A pass of the draft model over one token of each request. number, sampled: see `Step`."""

    number: int
    requests: list[str]
    token_ids: list[int]
    positions: list[int]
    sampled: dict[str, list[int]]


ToRank = Launch | Measure | Allocate | Step | Draft
FromRank = Loaded | Measured | Failed | Ready


def _decoded(kind: type, value: Any) -> Any:
    assert kind is Path, kind  # msgspec decodes all other types itself
    return Path(value)


def model_digest(architecture: Architecture) -> str:
    """Return a hash of an undivided model's configuration."""
    return hashlib.sha256(repr(architecture).encode()).hexdigest()


encode = msgspec.msgpack.Encoder(enc_hook=str).encode
decode_to_rank = msgspec.msgpack.Decoder(ToRank, dec_hook=_decoded).decode
decode_from_rank = msgspec.msgpack.Decoder(FromRank, dec_hook=_decoded).decode
