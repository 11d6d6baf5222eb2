"""The limits of workloads, computed from their arithmetic, the bytes that their steps read, and measured limits."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from octavo.models.declared import in_order

if TYPE_CHECKING:
    from octavo.models.architecture import Architecture

_BITS = {"bf16": (16.0, 16.0), "int8": (8.0, 8.0), "int4": (4.5, 8.0)}  # bits of a weight in layers and in lm_head


@dataclass(frozen=True, slots=True)
class Work:
    """Multiplied weights for one token in all layers, and for one row of logits; bytes of a token's KV in 16 bits.

    last: the part of `layers` that the last layer multiplies after keys and values; most tokens of a prompt do not need
    it.
    """

    layers: int
    last: int
    lm_head: int
    kv_bytes: int

    @classmethod
    def of(cls, architecture: Architecture) -> Work:
        """Count the work of a model's matrix products, and the bytes of its keys and values."""
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

    A step takes at least the longer one of its arithmetic time (products / peak) and its reading time (all weights
    once, and the KV of decoding requests / bandwidth). There are at least as many steps as the longest output has
    tokens. The sum over all steps is at least the longer one of the two total times, and equal to it if every step has
    the same share of both. So no schedule is faster.

    Assumptions: for a prompt, the last layer's computations after keys and values are needed only for the last token.
    Attention, norms, sampling, and reading KV for later chunks of the same prompt take no time. Embeddings and lm_head
    have 8 bits if weights are int4. KV has 16 bits; with the prefix cache, a shared prefix is read once per step.
    Several tokens of a request per step (speculation) are not considered.
    """
    peak = limits["bfloat16_flops"] if precision == "bf16" else limits["byte_ops"]
    layer_bits, head_bits = _BITS[precision]
    weight_bytes = (work.layers * layer_bits + work.lm_head * head_bits) / 8

    def seconds(steps: int, tokens: int, rows: int, kv_tokens: int) -> float:
        """Return the minimum time of `steps` with `tokens` in the layers, `rows` of logits and `kv_tokens` read."""
        arithmetic = 2 * (work.layers * tokens - work.last * (tokens - rows) + work.lm_head * rows) / peak
        reading = (steps * weight_bytes + kv_tokens * work.kv_bytes) / limits["bytes_read"]
        return max(arithmetic, reading)

    def together(requests: list[dict[str, Any]], shared: int = 0) -> float:
        """Return the minimum time to answer all requests. shared: number of common tokens at their beginning.

        The first token of each request is sampled in the step of its prompt.
        """
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
    """Return the KV tokens that all decode steps of a request read: the i-th step reads the prompt and i more."""
    return sum(prompt + i for i in range(1, out))
