"""The interface that every backend implements.

Except in plain torch and "fast-inexact", operations are batch-invariant: a row's bits do not depend on other rows,
because absolute positions fix the order of each reduction.
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
    from octavo.kernels.state_batch import StateBatch

    WeightToPack = Tensor | Sequence[Tensor] | QuantizedWeight | Sequence[BlockWeight]


# "gelu_tanh": tanh approximation of GELU (Hendrycks and Gimpel 2016). "clamped_silu" (gpt-oss):
# g * sigmoid(GATE_SLOPE * g) * (u + 1), with g = min(gate, GATE_LIMIT), and u = up clamped to +-GATE_LIMIT.
Activation = Literal["silu", "gelu_tanh", "clamped_silu"]
GATE_LIMIT, GATE_SLOPE = 7.0, 1.702


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A weight in a backend's layout."""

    out_features: int
    in_features: int
    storage: Any
    bias: Tensor | None
    num_bytes: int


@dataclass(frozen=True, slots=True)
class SplitLinear(PackedLinear):
    """A weight that ranks divide along out_features.

    own: this rank's part.
    inputs: each rank's first input column, then in_features; None if each rank has the whole input.
    outputs: each rank's first result column, then out_features; None if each rank needs only its own columns.
    """

    own: PackedLinear
    inputs: tuple[int, ...] | None
    outputs: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class PackedGroups:
    """Weights of equal shape, one per group of rows."""

    num_groups: int
    out_features: int
    in_features: int
    storage: Any
    num_bytes: int
    inputs: tuple[int, ...] | None = None  # see `SplitLinear`


@dataclass(frozen=True, slots=True)
class KeptLinear:
    """A part of a packed weight for storage on disk. data: uint8. bias: float32. numbers: JSON values."""

    data: Tensor
    bias: Tensor | None
    numbers: dict[str, int | str]


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Attention inputs of a ragged batch. A sequence's tokens are adjacent, in order of position.

    query_start  int32 [num_seqs + 1]   first row of each sequence, then the number of rows
    seq_lens     int32 [num_seqs]       KV lengths, including this step's tokens
    block_tables int32 [num_seqs, max_blocks]   of KV group 0; unread entries are undefined
    positions    int64 [num_tokens]
    slot_mapping int64 [num_tokens]     block_id * block_size + offset
    outputs      rows that need hidden states; None for all
    more_groups  the same rows in KV groups 1, 2, ...
    rotary_positions int64 [num_dims, num_tokens]   positions of M-RoPE
    states       the same rows, for layers with recurrent states

    Padding sequences come last, with length 0 and at most one row. If `has_padding_rows`, rows without a sequence
    follow. Padding rows have slot -1 and write no KV. Attention returns zeros for them.
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
    states: StateBatch | None = None

    def of_group(self, index: int) -> AttentionBatch:
        """Return the batch of KV group `index`."""
        return self.more_groups[index - 1] if index and self.more_groups else self


@dataclass(frozen=True, slots=True)
class OutputRows:
    """A step's rows that need hidden states: the last rows of each sequence.

    rows       int64 indices, ascending
    attention  the batch of these rows
    """

    rows: Tensor
    attention: AttentionBatch


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """Steps to capture as graphs.

    sizes: numbers of sequences by maximum mean rows per sequence, both ascending. num_bytes: limit of all graphs.
    """

    sizes: Mapping[int, tuple[int, ...]]
    table_width: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Parameters of `Kernels.sample`, one entry per row, on the CPU or the logits' device.

    temperature  float32  0 means greedy; the other fields are then ignored
    top_k        int32    0 means all
    top_p        float32  1.0 means all
    min_p        float32  0.0 means all
    seed         int64    all 64 bits count
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

    identity: names everything that affects a result's last bits. KV of another identity is not used.
    has_own_threads: True if kernels have a thread pool. Torch must then use one thread, because its OpenMP workers
    would spin on the same cores.
    kv_cache_dtypes: supported quantized values of `CacheConfig.kv_cache_dtype`.
    has_fp8_weights: True if the kernels support fp8 weights. multiplies_fp8: True if a checkpoint's fp8 weights are
    not expanded.
    warm_up_rows: sizes of steps that launch every kernel; empty if launches compile nothing.
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
        """Return the kernels compiled since the last call."""
        ...

    def scratch_bytes(
        self, *, num_heads: int, num_kv_heads: int, head_dim: int, vocab_size: int, max_seq_len: int, max_tokens: int
    ) -> int:
        """Return an upper bound of the scratch bytes of a step's kernels."""
        ...

    def compute(self, operation: Operation[*Arguments], *args: *Arguments) -> None:
        """Compute in place, with the operation's torch version if the backend has no kernel."""
        ...

    def round_weight(self, weight: Tensor, bits: int, group_size: int = GROUP_MULTIPLE) -> QuantizedWeight:
        """Quantize a weight to 8 or 4 bits. Raises `ValueError` if its dtype is an integer."""
        ...

    def pack_linear(self, weight: WeightToPack, bias: Tensor | None = None) -> PackedLinear:
        """Pack `weight` [out_features, in_features], or its parts, with a bias.

        Activations may have another dtype. Products with quantized weights, except fp8, quantize activations.
        `BlockWeight`s may differ in kind.
        """
        ...

    @property
    def layout(self) -> str | None:
        """Name and version of the packed layout; None if packed weights must not be stored on disk."""
        ...

    def keep_linear(self, packed: PackedLinear) -> tuple[KeptLinear, ...]:
        """Return parts for `restore_linear` that alias the weight, or () if the weight cannot be stored."""
        ...

    def restore_linear(self, kept: Sequence[KeptLinear]) -> PackedLinear:
        """Rebuild a packed weight. The parts' data must be in memory from `allocate`.

        Raises `ValueError` or `KeyError` for invalid parts. Corrupt bytes cause no access out of bounds.
        """
        ...

    def allocate(self, num_bytes: int) -> Tensor:
        """Return aligned bytes."""
        ...

    def empty(self, *shape: int, like: Tensor) -> Tensor:
        """Return contiguous undefined memory of `like`'s dtype and device.

        Recorded forward passes must allocate with this instead of torch.
        """
        ...

    def linear(
        self, x: Tensor, packed: PackedLinear, *, float32_out: bool = False, out: Tensor | None = None
    ) -> Tensor:
        """Return x @ weight.T + bias [num_tokens, out_features], in x's dtype or float32.

        out: contiguous result memory. Integer sums are exact. Float sums, with bias, are float32, rounded once.
        """
        ...

    def gated_linear(self, x: Tensor, packed: PackedLinear, activation: Activation = "silu") -> Tensor:
        """Return activation(gate) * up. The halves of x @ weight.T + bias are gate and up.

        The result has the same bits as gate(linear(x)). The result's row stride may exceed its width.
        """
        ...

    def pack_groups(self, weights: Sequence[PackedLinear]) -> PackedGroups:
        """Group weights of equal shape."""
        ...

    def grouped_linear(
        self,
        x: Tensor,
        packed: PackedGroups,
        group_start: Tensor,
        *,
        sources: Tensor | None = None,
        float32_out: bool = False,
    ) -> Tensor:
        """Apply each group's weight (an expert or an adapter) to its rows, with the bits of `linear`.

        The result is sorted by group. Weights of empty groups are not read.
        group_start int32 [num_groups + 1]: first row of each group, then the end of the last one. Rows of no group are
        neither read nor written.
        sources int64 [num_rows]: row of x for each result row; None if x is sorted by group.
        """
        ...

    def head_linear(self, x: Tensor, packed: PackedGroups, out: Tensor | None = None) -> Tensor:
        """Multiply x [num_tokens, num_heads, in_features] by one weight per head, with the bits of `linear`.

        Returns [num_tokens, num_heads, out_features] in x's dtype, in `out` if given. x and `out` may have any token
        and head strides.
        """
        ...

    def embedding(self, token_ids: Tensor, packed: PackedLinear, dtype: Any, scale: float = 1.0) -> Tensor:
        """Return the weight's rows times `scale`, multiplied in float32 and rounded once."""
        ...

    def take_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        """Return x[rows], contiguous. x: any token stride."""
        ...

    def captures_graphs(self, experts: Iterable[PackedGroups]) -> bool:
        """Return True if `record_forward` can capture graphs of a model with these experts."""
        ...

    def record_forward(
        self,
        forward: Callable[[Tensor, AttentionBatch], Tensor],
        token_ids: Tensor,
        batch: AttentionBatch,
        max_tokens: int,
        decodes: DecodePlan | None = None,
    ) -> tuple[Tensor, Callable[[Tensor, AttentionBatch], Tensor] | None]:
        """Run a forward pass. Return its result, and a faster pass for up to `max_tokens` tokens, or None.

        The faster pass returns the same bits. Its next call overwrites the result.
        `forward` must select output rows with `take_rows`, and may be called with all rows as outputs.
        """
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return x / rms(x) * weight, contiguous (Zhang and Sennrich 2019).

        x is contiguous, or [num_tokens, num_heads, head_dim] with any token stride.
        """
        ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, scale: float = 1.0) -> Tensor:
        """Add x * scale to `residual` in place, and return rms_norm(residual).

        x and `residual` have one dtype. The sum is float32, then rounded.
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
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 0.0,
    ) -> Tensor:
        """Rotate and return q (Su et al. 2021). Write rotated k and unrotated v into their slots. k does not change.

        Without `q_norm`, q is rotated in place. With it, the result may be another tensor, and q is undefined.
        q, k, v [num_tokens, heads, head_dim]: last dimension contiguous, any token stride. k and v may have 0 heads.
        cos_sin float32 [max_positions, rotary_dim]: cosines, then sines.
        interleaved: pair dimensions 2 i and 2 i + 1 (GPT-J); otherwise i and i + rotary_dim / 2 (GPT-NeoX).
        query_scale float32 [max_positions]: multiplies rotated and rounded queries.
        q_norm, k_norm [head_dim], eps: heads are first normalized with these weights, with the bits of `rms_norm`.
        k_cache, v_cache [num_blocks, num_kv_heads, block_size, head_dim]: last two dimensions contiguous, of q's dtype,
        int8 or float8_e4m3fn. Rows are rounded to q's dtype, then for int8 and float8_e4m3fn by `round_kv_rows`.

        If a head's v is not finite, v is written as zeros and k as NaN. Attention is then NaN for rows that see the
        position, and other rows can multiply v by zero.
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
        """Return causal attention over each sequence's KV, [num_tokens, num_heads * value_dim].

        value_dim: the last dimension of v_cache. The result's row stride may exceed its width.
        A row at position p sees positions max(0, p - window + 1) .. p. Query heads share KV heads in equal groups.
        softcap: limits scaled scores. sinks float32 [num_heads]: score of an extra position without a value, which
        every row sees (Xiao et al. 2024).
        """
        ...

    def gate(self, gate_up: Tensor, activation: Activation = "silu", *, group_start: Tensor | None = None) -> Tensor:
        """Return activation(gate) * up. Each contiguous row of `gate_up` holds gate, then up.

        group_start: see `grouped_linear`. Results of rows of no group are undefined. By default, all rows are computed.
        """
        ...

    def sample(self, logits: Tensor, rows: SamplingRows) -> Tensor:
        """Return one token id, int64, per row of float32 logits.

        A greedy row takes the largest logit, the lowest id of equal ones. Other rows take argmax(logits / temperature +
        noise) over the ids that min_p, then top_k, then top_p keep; see `octavo.kernels.noise`. A row with a NaN, or
        only -inf, yields -1.
        """
        ...

    def rejection_sample(
        self, target_sampled: Tensor, draft_ids: Tensor, cu_num_logits: Tensor, num_speculative_steps: int
    ) -> tuple[Tensor, Tensor]:
        """Return each request's accepted tokens: leading drafts that equal the target's choices, and one more choice.

        target_sampled int64: the target's choice for each row.
        draft_ids int64: each row's input token: a request's newest token, then its drafts.
        cu_num_logits int32: first row of each request, then the number of rows.

        Returns int64 [num_requests, num_speculative_steps + 1], padded with -1, and int32 counts. Raises `IndexError`
        if a request has no row or too many.
        """
        ...

    def top_tokens(self, values: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return the k largest of float32 [n, vocab], and their int64 ids. The lowest of tied ids comes first."""
        ...


class RanksKernels(Kernels, Protocol):
    """Kernels of several ranks."""

    def join(self, x: Tensor, borders: tuple[int, ...]) -> Tensor:
        """Concatenate all ranks' columns. borders: each rank's first column, then the total."""
        ...

    def sample_columns(self, logits: Tensor, rows: SamplingRows, borders: tuple[int, ...]) -> Tensor:
        """Do `sample` over all ranks' columns. Only rank 0's result is defined.

        logits: this rank's columns. rows: without min_p, top_k and top_p. borders: as in `join`, multiples of 64.
        """
        ...

    def add_rank_experts(
        self,
        outputs: Tensor,
        ids: Tensor,
        places: Tensor,
        weights: Tensor,
        shared: Tensor,
        shared_gate: Tensor,
        experts: tuple[int, ...],
        columns: tuple[int, ...],
        dtype: Any,
    ) -> Tensor:
        """Return this rank's columns of the result of `add_experts`, [num_tokens, own columns].

        experts: each rank's first expert, then their number. outputs: only rows of this rank's experts are read.
        columns: each rank's first column, then the width. shared: this rank's columns.
        """
        ...

    def round_rows_to_int4(self, rows: Tensor, whole: Tensor, group_size: int) -> QuantizedWeight:
        """Quantize `rows` of the weight `whole`, with the bits of `round_weight`. Reads only samples of `whole`."""
        ...
