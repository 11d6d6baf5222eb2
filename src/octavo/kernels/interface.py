"""The interface that every backend implements.

Operations are batch-invariant: the bits of a row do not depend on the other rows of the batch, because absolute
positions fix the order of each reduction.
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


# "gelu_tanh" is the tanh approximation of GELU (Hendrycks and Gimpel 2016). "clamped_silu" of gpt-oss computes
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

    own: this rank's part. inputs: the input's first column of each rank, then in_features, or None if each rank has
    the whole input. outputs: the first column of each rank in the result, then out_features, or None if each rank
    needs only its own columns.
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
    """A part of a packed weight for storage on disk. data is uint8, bias is float32, and numbers are JSON values."""

    data: Tensor
    bias: Tensor | None
    numbers: dict[str, int | str]


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Inputs of attention for a ragged batch. Tokens of one sequence are adjacent, in order of position.

    query_start  int32 [num_seqs + 1]   first row of each sequence, then the number of rows
    seq_lens     int32 [num_seqs]       KV lengths, including this step's tokens
    block_tables int32 [num_seqs, max_blocks]   of KV group 0; entries that attention does not read are undefined
    positions    int64 [num_tokens]
    slot_mapping int64 [num_tokens]     block_id * block_size + offset
    outputs      rows that need hidden states; None means all rows
    more_groups  the same rows in KV groups 1, 2, ...
    rotary_positions int64 [num_dims, num_tokens]   positions of M-RoPE

    Padding sequences come last, with length 0 and at most one row. If `has_padding_rows`, rows without a sequence
    follow. Padding rows have slot -1, so they read and write nothing. Attention returns zeros for padding rows.
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
        """Return the batch of KV group `index`."""
        return self.more_groups[index - 1] if index and self.more_groups else self


@dataclass(frozen=True, slots=True)
class OutputRows:
    """The rows of a step that need hidden states, which are the last rows of each sequence.

    rows       int64 indices, ascending
    attention  the batch with only these rows
    """

    rows: Tensor
    attention: AttentionBatch


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """Steps to capture as graphs.

    sizes: maps the highest mean number of rows per sequence to numbers of sequences. Keys and values ascend. num_bytes:
    memory limit for all graphs.
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

    identity: names everything that affects the last bits of a result. KV of another identity is not used.
    has_own_threads: True if kernels run in their own thread pool. Torch's threads must then sleep, because OpenMP
    workers would spin on the same cores.
    kv_cache_dtypes: supported quantized values of `CacheConfig.kv_cache_dtype`.
    multiplies_fp8: True if fp8 weights of a checkpoint stay fp8 instead of being expanded.
    warm_up_rows: sizes of warm-up steps that together launch every kernel; empty if kernels are not compiled at launch.
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
        """Return an upper bound of the bytes that attention and sampling allocate in a step."""
        ...

    def compute(self, operation: Operation[*Arguments], *args: *Arguments) -> None:
        """Compute an operation in place. If the backend has no kernel, run the operation's torch version."""
        ...

    def round_weight(self, weight: Tensor, bits: int, group_size: int = GROUP_MULTIPLE) -> QuantizedWeight:
        """Quantize a weight to 8 or 4 bits. Raises `ValueError` if its dtype is an integer."""
        ...

    def pack_linear(self, weight: WeightToPack, bias: Tensor | None = None) -> PackedLinear:
        """Pack `weight` [out_features, in_features], or the sequence of its parts, with a bias.

        Activations may have another dtype than the weight. Products with quantized weights, except fp8, quantize
        activations. Parts that are `BlockWeight`s may have different kinds.
        """
        ...

    @property
    def layout(self) -> str | None:
        """Name and version of the packed layout, or None if packed weights must not be stored on disk."""
        ...

    def keep_linear(self, packed: PackedLinear) -> tuple[KeptLinear, ...]:
        """Return parts that alias the weight, for `restore_linear`, or () if the weight cannot be stored."""
        ...

    def restore_linear(self, kept: Sequence[KeptLinear]) -> PackedLinear:
        """Rebuild a packed weight from parts with data in memory from `allocate`.

        Raises `ValueError` or `KeyError` for invalid parts. Corrupt bytes cause no access out of bounds.
        """
        ...

    def allocate(self, num_bytes: int) -> Tensor:
        """Return aligned bytes."""
        ...

    def empty(self, *shape: int, like: Tensor) -> Tensor:
        """Return contiguous undefined memory of `like`'s dtype and device.

        A forward pass that allocates its results with torch cannot be recorded.
        """
        ...

    def linear(
        self, x: Tensor, packed: PackedLinear, *, float32_out: bool = False, out: Tensor | None = None
    ) -> Tensor:
        """Return x @ weight.T + bias [num_tokens, out_features], in x's dtype or float32.

        out: contiguous memory for the result. Integer sums are exact. Float sums, including the bias, are float32 and
        rounded once.
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
        """Multiply each row by the weight of its group (an expert or an adapter). Gives the same bits as `linear`.

        The result is sorted by group. sources int64 [num_rows]: row of x for each row of the result, or None if x is
        already sorted by group. group_start int32 [num_groups + 1]: first row of each group, then num_rows. Weights of
        empty groups are not read.
        """
        ...

    def head_linear(self, x: Tensor, packed: PackedGroups, out: Tensor | None = None) -> Tensor:
        """Multiply x [num_tokens, num_heads, in_features] by one weight per head. Gives the same bits as `linear`.

        Returns [num_tokens, num_heads, out_features] in x's dtype, written to `out` if given. x and `out` may have any
        strides of tokens and heads.
        """
        ...

    def embedding(self, token_ids: Tensor, packed: PackedLinear, dtype: Any, scale: float = 1.0) -> Tensor:
        """Return the weight's rows times `scale`, multiplied in float32 and rounded once."""
        ...

    def take_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        """Return x[rows], contiguous; x may have any token stride."""
        ...

    def captures_graphs(self, experts: Iterable[PackedGroups]) -> bool:
        """Return True if `record_forward` captures graphs of a model with these experts. Otherwise log the reason."""
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

        `forward` must select output rows with `take_rows`, and may be called with all rows as outputs. The faster pass
        returns the same bits. Its next call overwrites the result.
        """
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return x / rms(x) * weight, contiguous (Zhang and Sennrich 2019).

        x is contiguous, or [num_tokens, num_heads, head_dim] with any token stride.
        """
        ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, scale: float = 1.0) -> Tensor:
        """Add x * scale to `residual` in place, and return rms_norm(residual).

        x and `residual` have the same dtype; the sum is float32, then rounded.
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
        """Rotate q in place (Su et al. 2021), and write rotated k and v into their slots. k is not changed.

        q, k and v are [num_tokens, heads, head_dim] with contiguous last dimension and any token stride. k and v may
        have 0 heads.
        cos_sin float32 [max_positions, rotary_dim]: cosines, then sines. If interleaved, dimension 2 i of a head is
        paired with 2 i + 1 (GPT-J). Otherwise dimension i is paired with i + rotary_dim / 2 (GPT-NeoX).
        query_scale float32 [max_positions]: multiplies rotated and rounded queries.

        k_cache and v_cache are [num_blocks, num_kv_heads, block_size, head_dim]. The last two dimensions are
        contiguous. The dtype is that of q, int8 or float8_e4m3fn. For int8 and float8_e4m3fn, rows are rounded to q's
        dtype, then by `round_kv_rows`.

        If the v of a head and token is not finite, zeros are written for v, and NaN for k. Then attention is NaN for
        rows that see this position. Other rows can multiply v by zero.
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
        """Return each row's causal attention over its sequence's KV, [num_tokens, num_heads * head_dim].

        A row at position p sees positions max(0, p - window + 1) .. p. Query heads share KV heads in equal groups. The
        row stride of the result may exceed its width. softcap applies to scaled scores. sinks float32 [num_heads]:
        score of an extra position that every row sees and that has no value (Xiao et al. 2024).
        """
        ...

    def gate(self, gate_up: Tensor, activation: Activation = "silu") -> Tensor:
        """Return activation(gate) * up. Each contiguous row of `gate_up` holds gate, then up."""
        ...

    def sample(self, logits: Tensor, rows: SamplingRows) -> Tensor:
        """Return one token id, int64, per row of float32 logits.

        A greedy row takes the largest logit, and the lowest id of equal logits. Other rows take argmax(logits /
        temperature + noise) over the ids that min_p, then top_k, then top_p keep; see `octavo.kernels.noise`. A row
        that has a NaN, or only -inf, yields -1.
        """
        ...

    def rejection_sample(
        self, target_sampled: Tensor, draft_ids: Tensor, cu_num_logits: Tensor, num_speculative_steps: int
    ) -> tuple[Tensor, Tensor]:
        """Return each request's accepted tokens: leading drafts that equal the target's choices, and one more choice.

        target_sampled int64: the target's choice for each row. draft_ids int64: input token of each row. In a request's
        first row, this is the newest token. In each later row, it is the draft for the previous row's choice.
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
        """Put the columns of all ranks side by side. borders: first column of each rank, then the total."""
        ...

    def round_rows_to_int4(self, rows: Tensor, whole: Tensor, group_size: int) -> QuantizedWeight:
        """Quantize some rows as `round_weight` quantizes the whole weight, of which it reads only sampled rows."""
        ...
