"""What bounds a workload: its arithmetic, and the bytes that its steps read, by the limits measured here."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from octavo.models.declared import in_order

if TYPE_CHECKING:
    from octavo.models.architecture import Architecture

_BITS = {"bf16": (16.0, 16.0), "int8": (8.0, 8.0), "int4": (4.5, 8.0)}  # of layers and of lm_head


@dataclass(frozen=True, slots=True)
class Work:
    """Multiplied weights of one token in all layers, and of one row of logits; bytes of a token's KV in 16 bits.

    last: of `layers`, what the last one multiplies behind its keys and values, which nobody needs of most of a prompt.
    """

    layers: int
    last: int
    lm_head: int
    kv_bytes: int

    @classmethod
    def of(cls, architecture: Architecture) -> Work:
        """Count a model's matrix products and keys and values."""
        tensors, last = architecture.tensors(), architecture.layers[-1].attention
        kv = 2 * last.num_kv_heads * last.head_dim * architecture.hidden_size
        return cls(
            _num_multiplied(tensors.layers),
            _num_multiplied(tensors.layers[-1]) - kv,
            _num_multiplied(tensors.embedding),
            architecture.kv_layout.bytes_per_token("bfloat16"),
        )


def _num_multiplied(declared: object) -> int:
    return sum(math.prod(shape) for each in in_order(declared) for shape in each.shapes.values() if len(shape) == 2)


def best_possible(work: Work, workloads: dict[str, Any], precision: str, limits: dict[str, float]) -> dict[str, float]:
    """Return the limit of each workload, in its unit (see benchmarks/runners/protocol.py).

    A step takes as long as the longer of its arithmetic (products over the peak) and its reading (all weights once, and
    the KV of who decodes, over the bandwidth), and there are at least as many steps as the longest output has tokens.
    The sum of that over the steps is never less than the longer of the two sums, and equals it where every step has an
    even share of both: no schedule is faster. What the last layer makes of a prompt's tokens behind their keys and
    values need not be computed but for the last one. The arithmetic of attention, norms, sampling, and the KV that a
    prompt's own later chunks read count as nothing. Embeddings and lm_head count 8 bits where weights are int4. KV
    counts 16 bits, and that of a shared prefix once a step where the cache is on. Several tokens of a request a step
    (speculation) are left out.
    """
    peak = limits["bfloat16_flops"] if precision == "bf16" else limits["byte_ops"]
    layer_bits, head_bits = _BITS[precision]
    weight_bytes = (work.layers * layer_bits + work.lm_head * head_bits) / 8

    def seconds(steps: int, tokens: int, rows: int, kv_tokens: int) -> float:
        """Return the least for `tokens` in the layers, `rows` of logits and `kv_tokens` read, in `steps`."""
        arithmetic = 2 * (work.layers * tokens - work.last * (tokens - rows) + work.lm_head * rows) / peak
        reading = (steps * weight_bytes + kv_tokens * work.kv_bytes) / limits["bytes_read"]
        return max(arithmetic, reading)

    def together(requests: list[dict[str, Any]], shared: int = 0) -> float:
        """Answer all, which begin with the same `shared` tokens; each one's first token comes of its prompt's step."""
        steps = max(request["out"] for request in requests)
        tokens = sum(len(request["prompt"]) + request["out"] - 1 for request in requests)
        rows = sum(request["out"] for request in requests)
        kv_tokens = sum(_tokens_read(len(request["prompt"]) - shared, request["out"]) for request in requests)
        return seconds(steps, tokens - shared * (len(requests) - 1), rows, kv_tokens + shared * (steps - 1))

    one = workloads["A"][0]
    decodes = one["out"] - 1
    length = len(workloads["C"][0]["prompt"])
    prompts = [request["prompt"] for request in workloads["D"][0]]
    shared = next(i for i in range(len(prompts[0])) if any(prompt[i] != prompts[0][i] for prompt in prompts))
    return {
        "A": decodes / seconds(decodes, decodes, decodes, _tokens_read(len(one["prompt"]), one["out"])),
        "B": together(workloads["B"]),
        "C": length / seconds(1, length, 1, 0),
        "D off": together(workloads["D"][0]),
        "D on": together(workloads["D"][0], shared),
    }


def _tokens_read(prompt: int, out: int) -> int:
    """Return over how many tokens of KV a request's decode steps look: the i-th sees the prompt and i more."""
    return sum(prompt + i for i in range(1, out))
