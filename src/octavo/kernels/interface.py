"""The interface of every backend: plain torch, compiled CPU kernels, Triton.

The law for each backend: the result of a row depends on that row alone. The row's own absolute positions fix the order
of each reduction. The number of other rows in the batch and the chunks of a prompt must not change it.
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


Activation = Literal["silu", "gelu_tanh"]  # gelu_tanh: GELU as tanh approximates it (Hendrycks and Gimpel 2016)


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A weight in the layout of one backend. `Kernels.pack_linear` makes it; only that backend reads `storage`."""

    out_features: int
    in_features: int
    storage: Any
    bias: Tensor | None
    num_bytes: int


@dataclass(frozen=True, slots=True)
class PackedGroups:
    """Weights of equal shape, one for each group of rows.

    `Kernels.pack_groups` makes it; only that backend reads `storage`.
    """

    num_groups: int
    out_features: int
    in_features: int
    storage: Any
    num_bytes: int


@dataclass(frozen=True, slots=True)
class KeptLinear:
    """A part of a packed weight in the form that is kept on disk.

    `Kernels.keep_linear` makes it and `Kernels.restore_linear` takes it.

    data uint8 [num_bytes]; bias float32 or None; numbers: the backend's other values, in types of JSON.
    """

    data: Tensor
    bias: Tensor | None
    numbers: dict[str, int | str]


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """The inputs of attention for a ragged batch. Tokens of one sequence are adjacent, in order of position.

    query_start  int32 [num_seqs + 1]   first row of each sequence, then the number of rows
    seq_lens     int32 [num_seqs]       KV length of each sequence, this step's tokens included
    block_tables int32 [num_seqs, max_blocks_per_seq]   block ids in the first KV group; entries past a sequence's end,
                                                        or that none of its rows reads, may hold anything
    positions    int64 [num_tokens]     absolute position of each row
    slot_mapping int64 [num_tokens]     block_id * block_size + offset, where each row's K and V are written
    outputs      the rows whose hidden states are returned; None for all of them
    more_groups  the same rows with the tables and slots of KV groups 1, 2, ...; empty for a cache of one group
    rotary_positions int64 [num_dims, num_tokens]   position of each row in a text with images (M-RoPE); None for models
                                                    whose positions have one dimension

    The padding of a graph comes last: sequences of length 0 that have one row or none, then, if `has_rows_behind`, rows
    of no sequence. The slots of padding rows are -1: nothing is read or written for them, and attention returns zeros.
    """

    query_start: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    positions: Tensor
    slot_mapping: Tensor
    block_size: int
    outputs: OutputRows | None = None
    more_groups: tuple[AttentionBatch, ...] = ()
    has_rows_behind: bool = False
    rotary_positions: Tensor | None = None

    def of_group(self, index: int) -> AttentionBatch:
        """Return the batch with a KV group's tables and slots; those of the first group if the cache has no other."""
        return self.more_groups[index - 1] if index and self.more_groups else self


@dataclass(frozen=True, slots=True)
class OutputRows:
    """Rows of a step whose hidden states are needed, mostly those that are sampled.

    For all other rows the step is complete when the last layer's keys and values are in the cache.

    rows       int64 [num_outputs]   in ascending order
    attention  the batch of these rows alone; they are the last rows of each sequence
    """

    rows: Tensor
    attention: AttentionBatch


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """Steps of few rows for each sequence, to be captured as graphs: decodes, and drafts that are verified.

    sizes: maps the largest mean number of rows of a sequence to the numbers of sequences; both ascend.
    table_width: the most blocks of a sequence. num_bytes: memory limit of all graphs.
    """

    sizes: Mapping[int, tuple[int, ...]]
    table_width: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Parameters of `Kernels.sample`, one entry per row of logits. Tensors on the CPU or on the device of the logits.

    temperature  float32 [n]  0 means greedy: the other fields of the row are then ignored
    top_k        int32 [n]    0 means all
    top_p        float32 [n]  1.0 means all
    min_p        float32 [n]  0.0 means all
    seed         int64 [n]    all 64 bits are used
    sample_index int32 [n]    which of a request's `n` outputs
    position     int32 [n]    number of tokens before the one that is sampled
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    sample_index: Tensor
    position: Tensor

    def take(self, rows: Tensor | slice) -> SamplingRows:
        """Return the parameters of the given rows."""
        return SamplingRows(*(getattr(self, each.name)[rows] for each in fields(self)))


class Kernels(Protocol):
    """Every operation of the hot path. Activations are float32 or bfloat16; sums are kept in float32.

    identity: names everything that decides the last bits of a result. KV of kernels with another identity is not used.
    has_own_threads: these kernels do not use torch's threads. The engine keeps torch's threads asleep, because OpenMP
    workers woken by a small leftover operation would spin on the cores that the kernels' own threads need.
    kv_cache_dtypes: the types that keys and values may be rounded to, by their names in `octavo.config.CacheConfig`.
    has_fp8_weights: whether a weight may be a `octavo.kernels.quantization.Fp8Weight`.
    multiplies_fp8: whether fp8 weights of a checkpoint are better multiplied as they are than expanded once.
    """

    name: str
    has_own_threads: bool
    kv_cache_dtypes: tuple[str, ...]
    has_fp8_weights: bool
    multiplies_fp8: bool

    @property
    def identity(self) -> str:
        """See above."""
        ...

    def scratch_bytes(
        self, *, num_heads: int, num_kv_heads: int, head_dim: int, vocab_size: int, max_seq_len: int, max_tokens: int
    ) -> int:
        """Return the most bytes that attention and sampling allocate for themselves in a step of max_tokens tokens."""
        ...

    def compute(self, operation: Operation[*Arguments], *args: *Arguments) -> None:
        """Compute an operation in place: by the kernel of its name, or by the plain version if there is no kernel."""
        ...

    def round_weight(self, weight: Tensor, bits: int, group_size: int = GROUP_MULTIPLE) -> QuantizedWeight:
        """Round a weight [out_features, in_features] of any floating type to integers of 8 or 4 bits.

        The bits are those of `octavo.kernels.quantization.quantize_int8` and `quantize_int4`; this may be faster.
        Raises `ValueError` for a weight of integers.
        """
        ...

    def pack_linear(self, weight: WeightToPack, bias: Tensor | None = None) -> PackedLinear:
        """Pack `weight` [out_features, in_features], or its parts in order, and an optional bias [out_features].

        The weight is float32, bfloat16 or float16, or it is quantized. Its dtype may differ from that of the
        activations (float16 weights meet float32 activations). A product with a quantized weight quantizes its
        activations, too, unless the weight is fp8. Parts in blocks may be of several kinds.
        """
        ...

    @property
    def layout(self) -> str | None:
        """The name and version of the layout of packed weights; None if they must not be kept on disk."""
        ...

    def keep_linear(self, packed: PackedLinear) -> tuple[KeptLinear, ...]:
        """Return the parts from which `restore_linear` makes the same weight; no parts if it cannot be kept.

        The parts alias the weight's memory.
        """
        ...

    def restore_linear(self, kept: Sequence[KeptLinear]) -> PackedLinear:
        """Return the packed weight of parts that were kept; their data is in memory from `allocate`.

        Whatever the bytes are, the kernels read and write no memory outside the weight. Raises `ValueError` if the
        bytes are not those of such a weight, `KeyError` if a number is missing.
        """
        ...

    def allocate(self, num_bytes: int) -> Tensor:
        """Return uint8 [num_bytes] of undefined content, aligned as this backend needs for packed weights and KV."""
        ...

    def empty(self, *shape: int, like: Tensor) -> Tensor:
        """Return contiguous memory of undefined content for a result, of the dtype and device of `like`.

        A forward pass must allocate its results here and not by torch: otherwise its steps cannot be recorded.
        """
        ...

    def linear(
        self, x: Tensor, packed: PackedLinear, *, float32_out: bool = False, out: Tensor | None = None
    ) -> Tensor:
        """Return x @ weight.T + bias: [num_tokens, in_features] -> [num_tokens, out_features], in x's dtype or float32.

        out: contiguous memory for the result, which is written and returned; None allocates it.

        The sum over in_features and the bias are taken in float32 and rounded once. If the weight is of integers, the
        sum is one of integers, see `octavo.kernels.quantization`.
        """
        ...

    def gated_linear(self, x: Tensor, packed: PackedLinear, activation: Activation = "silu") -> Tensor:
        """Return activation(gate) * up of x @ weight.T + bias: [num_tokens, in] -> [num_tokens, out_features / 2].

        The first half of the out_features are the gates. The bits are those of `gate(linear(x, packed), activation)`:
        gate and up are rounded to x's dtype. The row stride of the result may be larger than the row.
        """
        ...

    def pack_groups(self, weights: Tensor) -> PackedGroups:
        """Pack `weights` [num_groups, out_features, in_features], contiguous, of float32, bfloat16 or float16."""
        ...

    def grouped_linear(self, x: Tensor, packed: PackedGroups, group_start: Tensor) -> Tensor:
        """Return each row times the weight of its group. Groups are experts or adapters; rows are sorted by group.

        x [num_tokens, in_features] of the weights' dtype; group_start int32 [num_groups + 1]: the first row of each
        group, from 0, then num_tokens; a group may be empty. Returns [num_tokens, out_features] in x's dtype; a row's
        bits are those of `linear` with the weight of its group. No family uses it yet.
        """
        ...

    def embedding(self, token_ids: Tensor, packed: PackedLinear, dtype: Any, scale: float = 1.0) -> Tensor:
        """Return rows of the unpacked weight times `scale`: int64 [num_tokens] -> [num_tokens, in_features] in `dtype`.

        The rows are multiplied in float32 and rounded once.
        """
        ...

    def take_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        """Return x[rows]: [num_tokens, ...] and int64 [n] -> [n, ...], contiguous. x may have any token stride."""
        ...

    def captures_graphs(self, head_dims: Iterable[int], dtype: Any) -> bool:
        """Return True if `record_forward` makes graphs of a model's decode steps; otherwise log the reason.

        head_dims: the head dimensions of the model's attention. dtype: the dtype of its activations.
        """
        ...

    def record_forward(
        self,
        forward: Callable[[Tensor, AttentionBatch], Tensor],
        token_ids: Tensor,
        batch: AttentionBatch,
        max_tokens: int,
        decodes: DecodePlan | None = None,
    ) -> tuple[Tensor, Callable[[Tensor, AttentionBatch], Tensor] | None]:
        """Run a forward pass; return its result, and a faster function for any batch of up to `max_tokens` tokens.

        The pass must take its output rows by `take_rows`; here it may be run with all rows of `batch` as outputs.
        decodes: the steps that become graphs; None for no graphs, as when `captures_graphs` returns False.

        The function returns the same bits, in memory that its next call overwrites. It is None if the backend has no
        faster way.
        """
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return x / rms(x) * weight over the last dimension (Zhang and Sennrich 2019).

        x is contiguous, or [num_tokens, num_heads, head_dim] with any token stride; the result is contiguous.
        """
        ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, scale: float = 1.0) -> Tensor:
        """Add x * scale to `residual` in place, return rms_norm(residual). Both [num_tokens, hidden].

        The product and the sum are taken in float32; the sum is rounded to the dtype of both.
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

        q [num_tokens, num_heads, head_dim], k and v [num_tokens, num_kv_heads, head_dim]: the last dimension is
        contiguous, the token stride may be any (they may be views of one fused projection).
        cos_sin float32 [max_positions, rotary_dim]: cosines of the rotary_dim / 2 angles, then sines. The first
        rotary_dim dimensions of a head are rotated; rotary_dim may be 0. Dimension i is paired with i + rotary_dim / 2,
        as in GPT-NeoX, or if interleaved 2 i with 2 i + 1, as in GPT-J.
        query_scale float32 [max_positions]: queries are rotated and rounded, then multiplied by their position's entry.
        k_cache, v_cache [num_blocks, num_kv_heads, block_size, head_dim]: the last two dimensions are contiguous. Their
        dtype is that of q, k and v, or int8 or float8_e4m3fn. For the last two, rows are rounded first to q's dtype,
        then by `octavo.kernels.quantization.round_kv_rows`; scales follow the rows of each block and head (`kv_scales`
        there).
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
    ) -> Tensor:
        """Return causal attention of every row over the KV of its own sequence: [num_tokens, num_heads * head_dim].

        The row stride of the result may be larger than the row. A row at position p sees positions
        max(0, p - window + 1) .. p. Query heads share KV heads in equal groups. Shapes are those of
        `rope_and_write_kv`. Sums run over tiles that are fixed by absolute position. softcap: the cap of scaled scores
        (see `octavo.kernels.operations.soft_cap`), or None.
        """
        ...

    def gate(self, gate_up: Tensor, activation: Activation = "silu") -> Tensor:
        """Return activation(gate) * up: [num_tokens, 2 * intermediate], gate first -> [num_tokens, intermediate]."""
        ...

    def sample(self, logits: Tensor, rows: SamplingRows) -> Tensor:
        """Return one token id per row of float32 logits [n, vocab]: int64 [n].

        Greedy: the largest logit, ties to the lowest id. Otherwise argmax(logits / temperature + noise) over the ids
        that min_p, then top_k, then top_p keep, with the noise of `octavo.kernels.noise`. Logits of -inf never win.
        A row with a NaN, or with nothing above -inf, yields -1.
        """
        ...

    def rejection_sample(
        self, target_sampled: Tensor, draft_ids: Tensor, cu_num_logits: Tensor, num_speculative_steps: int
    ) -> tuple[Tensor, Tensor]:
        """Return the accepted tokens of each request: the drafts that equal the target's choices, and one more choice.

        target_sampled int64 [num_logits]: the target's choice in each row. draft_ids int64 [num_logits]: the input
        token of each row. The first row of a request holds its newest token, and a draft is one row after the choice
        that it guesses. cu_num_logits int32 [num_requests + 1]: the first row of each request, which has one to
        num_speculative_steps + 1 rows, then num_logits.

        Returns sampled int64 [num_requests, num_speculative_steps + 1], filled up with -1, and the number of tokens,
        int32 [num_requests]. The last token is the target's choice at the first draft that differs, or after all of
        them.
        Raises `IndexError` if a request has no row, or more than num_speculative_steps + 1.
        """
        ...

    def top_tokens(self, values: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return (values [n, k], ids int64 [n, k]) of the k largest of float32 [n, vocab]; ties to the lowest id."""
        ...
