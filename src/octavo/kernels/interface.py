"""The interface of every backend.

Batch invariance: a row's result depends only on that row; its absolute positions fix the order of each reduction.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, Protocol

from octavo.kernels.quantization import GROUP_MULTIPLE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch import Tensor

    from octavo.kernels.block_weight import BlockWeight
    from octavo.kernels.operation import Arguments, Operation
    from octavo.kernels.quantization import QuantizedWeight

    WeightToPack = Tensor | Sequence[Tensor] | QuantizedWeight | Sequence[BlockWeight]


# GELU as tanh approximates it (Hendrycks and Gimpel 2016). "clamped_silu" is gpt-oss's: with g = min(gate, GATE_LIMIT)
# and `up` clamped to u in [-GATE_LIMIT, GATE_LIMIT], it is g * sigmoid(GATE_SLOPE * g) * (u + 1).
Activation = Literal["silu", "gelu_tanh", "clamped_silu"]
GATE_LIMIT, GATE_SLOPE = 7.0, 1.702


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A weight in a backend's own layout."""

    out_features: int
    in_features: int
    storage: Any
    bias: Tensor | None
    num_bytes: int


@dataclass(frozen=True, slots=True)
class PackedGroups:
    """Weights of equal shape, one per group of rows."""

    num_groups: int
    out_features: int
    in_features: int
    storage: Any
    num_bytes: int


@dataclass(frozen=True, slots=True)
class KeptLinear:
    """A part of a packed weight on disk: data is uint8, bias float32, numbers are JSON values."""

    data: Tensor
    bias: Tensor | None
    numbers: dict[str, int | str]


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Inputs of attention for a ragged batch. Tokens of one sequence are adjacent, in order of position.

    query_start  int32 [num_seqs + 1]   first row of each sequence, then the number of rows
    seq_lens     int32 [num_seqs]       KV lengths, this step's tokens included
    block_tables int32 [num_seqs, max_blocks]   of the first KV group; unread entries are undefined
    positions    int64 [num_tokens]
    slot_mapping int64 [num_tokens]     block_id * block_size + offset
    outputs      None for all rows
    more_groups  the same rows in KV groups 1, 2, ...
    rotary_positions int64 [num_dims, num_tokens]   of M-RoPE

    Last come padding sequences, with length 0 and at most one row, then, if `has_padding_rows`, rows of no sequence.
    Padding rows have slot -1: they read and write nothing, and attention returns zeros.
    """

    query_start: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    positions: Tensor
    slot_mapping: Tensor
    block_size: int
    outputs: OutputRows | None = None
    more_groups: tuple[AttentionBatch, ...] = ()
    has_padding_rows: bool = False
    rotary_positions: Tensor | None = None

    def of_group(self, index: int) -> AttentionBatch:
        """Return a group's batch."""
        return self.more_groups[index - 1] if index and self.more_groups else self


@dataclass(frozen=True, slots=True)
class OutputRows:
    """Rows of a step with needed hidden states.

    rows       int64, ascending; the last rows of each sequence
    attention  the batch of these rows alone
    """

    rows: Tensor
    attention: AttentionBatch


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """Steps to capture as graphs.

    sizes: maps the largest mean number of rows per sequence to numbers of sequences; both ascend. table_width: in
    blocks. num_bytes: limit for all graphs.
    """

    sizes: Mapping[int, tuple[int, ...]]
    table_width: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Parameters of `Kernels.sample`, one entry per row, on the CPU or the logits' device.

    temperature  float32  0 is greedy: the other fields are then ignored
    top_k        int32    0 means all
    top_p        float32  1.0 means all
    min_p        float32  0.0 means all
    seed         int64    all 64 bits are used
    sample_index int32    index among a request's `n` outputs
    position     int32    of the sampled token
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    sample_index: Tensor
    position: Tensor

    def take(self, rows: Tensor | slice) -> SamplingRows:
        """Select rows."""
        return SamplingRows(*(getattr(self, each.name)[rows] for each in fields(self)))


class Kernels(Protocol):
    """Every operation of the hot path. Activations are float32 or bfloat16; sums are float32.

    identity: names everything that decides the last bits of a result; KV of another identity is not used.
    has_own_threads: torch's threads must sleep: woken OpenMP workers would spin on the kernels' cores.
    kv_cache_dtypes: as in `octavo.config.CacheConfig`. multiplies_fp8: fp8 weights are better not expanded.
    warm_up_rows: sizes of the first steps, which launch all kernels; empty if no kernel is compiled at its first
    launch.
    """

    name: str
    has_own_threads: bool
    kv_cache_dtypes: tuple[str, ...]
    has_fp8_weights: bool
    multiplies_fp8: bool
    warm_up_rows: tuple[int, ...]

    @property
    def identity(self) -> str:
        """See above."""
        ...

    def take_compilations(self) -> list[str]:
        """Return the kernels that launches compiled since the last call."""
        ...

    def scratch_bytes(
        self, *, num_heads: int, num_kv_heads: int, head_dim: int, vocab_size: int, max_seq_len: int, max_tokens: int
    ) -> int:
        """Return the most bytes that attention and sampling allocate in a step."""
        ...

    def compute(self, operation: Operation[*Arguments], *args: *Arguments) -> None:
        """Compute an operation in place; without a kernel, by its plain version."""
        ...

    def round_weight(self, weight: Tensor, bits: int, group_size: int = GROUP_MULTIPLE) -> QuantizedWeight:
        """Round a weight to 8 or 4 bits. Raises `ValueError` for integers."""
        ...

    def pack_linear(self, weight: WeightToPack, bias: Tensor | None = None) -> PackedLinear:
        """Pack `weight` [out_features, in_features], or its parts in order, and a bias.

        Activations may have another dtype; products with quantized weights, except fp8, quantize them. Parts in blocks
        may be of several kinds.
        """
        ...

    @property
    def layout(self) -> str | None:
        """Name and version of the packed layout; None if it must not be kept on disk."""
        ...

    def keep_linear(self, packed: PackedLinear) -> tuple[KeptLinear, ...]:
        """Return parts for `restore_linear`, which alias the weight; none if impossible."""
        ...

    def restore_linear(self, kept: Sequence[KeptLinear]) -> PackedLinear:
        """Return the packed weight of kept parts; their data must be from `allocate`.

        Raises `ValueError` or `KeyError` for invalid parts. With any bytes, kernels access no other memory.
        """
        ...

    def allocate(self, num_bytes: int) -> Tensor:
        """Return aligned bytes."""
        ...

    def empty(self, *shape: int, like: Tensor) -> Tensor:
        """Return contiguous undefined memory of `like`'s dtype and device.

        A pass that allocates its results with torch cannot be recorded.
        """
        ...

    def linear(
        self, x: Tensor, packed: PackedLinear, *, float32_out: bool = False, out: Tensor | None = None
    ) -> Tensor:
        """Return x @ weight.T + bias [num_tokens, out_features], in x's dtype or float32.

        out: contiguous memory for the result. Float sums and the bias are float32, rounded once; integer sums are
        exact.
        """
        ...

    def gated_linear(self, x: Tensor, packed: PackedLinear, activation: Activation = "silu") -> Tensor:
        """Return activation(gate) * up of x @ weight.T + bias; the first half of the out_features are the gates.

        The bits are those of `gate` after `linear`. The row stride may exceed the row.
        """
        ...

    def pack_groups(self, weights: Sequence[PackedLinear]) -> PackedGroups:
        """Group equally shaped weights of `pack_linear`."""
        ...

    def grouped_linear(
        self, x: Tensor, packed: PackedGroups, group_start: Tensor, *, float32_out: bool = False
    ) -> Tensor:
        """Return each row times the weight of its group (an expert or an adapter), with the bits of `linear`.

        x is sorted by group. group_start int32 [num_groups + 1]: each group's first row, then num_tokens. Weights of
        empty groups are not read.
        """
        ...

    def embedding(self, token_ids: Tensor, packed: PackedLinear, dtype: Any, scale: float = 1.0) -> Tensor:
        """Return rows of the weight times `scale`, multiplied in float32 and rounded once."""
        ...

    def take_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        """Return x[rows], contiguous; x may have any token stride."""
        ...

    def captures_graphs(self, head_dims: Iterable[int], dtype: Any) -> bool:
        """Return whether `record_forward` makes graphs; otherwise log the reason."""
        ...

    def record_forward(
        self,
        forward: Callable[[Tensor, AttentionBatch], Tensor],
        token_ids: Tensor,
        batch: AttentionBatch,
        max_tokens: int,
        decodes: DecodePlan | None = None,
    ) -> tuple[Tensor, Callable[[Tensor, AttentionBatch], Tensor] | None]:
        """Run a forward pass; return its result, and a faster function for up to `max_tokens` tokens.

        The pass must take its output rows by `take_rows`; here all rows may be outputs. The function, if any, returns
        the same bits; its next call overwrites them.
        """
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return x / rms(x) * weight, contiguous (Zhang and Sennrich 2019).

        x is contiguous, or [num_tokens, num_heads, head_dim] with any token stride.
        """
        ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, scale: float = 1.0) -> Tensor:
        """Add x * scale to `residual` in place, return rms_norm(residual).

        The sum is float32, rounded to their common dtype.
        """
        ...

    def rope_and_write_kv(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos_sin: Tensor,
        batch: AttentionBatch,
        k_cache: Tensor,
        v_cache: Tensor,
        *,
        interleaved: bool = False,
        query_scale: Tensor | None = None,
    ) -> None:
        """Rotate q in place, and write rotated k (Su et al. 2021) and v into their slots. k itself is not changed.

        q, k and v are [num_tokens, heads, head_dim] with contiguous last dimension and any token stride.
        cos_sin float32 [max_positions, rotary_dim]: cosines, then sines. Dimension i of a head is paired with i +
        rotary_dim / 2 (GPT-NeoX); if interleaved, 2 i with 2 i + 1 (GPT-J). query_scale float32 [max_positions]:
        multiplies rotated and rounded queries. k_cache, v_cache [num_blocks, num_kv_heads, block_size, head_dim], the
        last two dimensions contiguous: in q's dtype, or int8 or float8_e4m3fn, for which rows are rounded to q's dtype,
        then by `round_kv_rows`. If a head's row of v is not finite, its v becomes zeros and its k NaN. So attention
        yields NaN for rows that see the position, and other rows may multiply it by weights of zero.
        """
        ...

    def paged_attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: AttentionBatch,
        scale: float,
        window: int | None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Return causal attention of each row over its sequence's KV: [num_tokens, num_heads * head_dim].

        The row stride may exceed the row. A row at position p sees positions max(0, p - window + 1) .. p. Query heads
        share KV heads in equal groups. softcap: of scaled scores.
        sinks float32 [num_heads]: the score of a further position that every row sees and that has no value (Xiao et
        al. 2024).
        """
        ...

    def gate(self, gate_up: Tensor, activation: Activation = "silu") -> Tensor:
        """Return activation(gate) * up of contiguous rows, gate first."""
        ...

    def sample(self, logits: Tensor, rows: SamplingRows) -> Tensor:
        """Return one token id, int64, per row of float32 logits.

        Greedy: the largest logit, ties to the lowest id. Otherwise argmax(logits / temperature + noise) over the ids
        that min_p, then top_k, then top_p keep (`octavo.kernels.noise`). A row with a NaN, or only with -inf, yields
        -1.
        """
        ...

    def rejection_sample(
        self, target_sampled: Tensor, draft_ids: Tensor, cu_num_logits: Tensor, num_speculative_steps: int
    ) -> tuple[Tensor, Tensor]:
        """Return each request's accepted tokens: the drafts that equal the target's choices, and one more choice.

        target_sampled, draft_ids int64: each row's choice of the target, and its input token. A request's first row
        holds its newest token; a draft is one row after the choice that it guesses. cu_num_logits int32: each request's
        first row, then the number of rows.

        Returns int64 [num_requests, num_speculative_steps + 1], padded with -1, and int32 counts. Raises `IndexError`
        if a request has no row or too many.
        """
        ...

    def top_tokens(self, values: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return the k largest of float32 [n, vocab] and their int64 ids; ties to the lowest id."""
        ...
