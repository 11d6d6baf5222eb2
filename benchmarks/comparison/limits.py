"""What bounds a workload: its arithmetic and the bytes of its weights, by the limits measured here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.models.architecture import Architecture

_BITS = {"bf16": (16.0, 16.0), "int8": (8.0, 8.0), "int4": (4.5, 8.0)}  # of layers and of lm_head


@dataclass(frozen=True, slots=True)
class Work:
    """Multiplied weights of one token in all layers, and of one row of logits."""

    layers: int
    lm_head: int

    @classmethod
    def of(cls, architecture: Architecture) -> Work:
        """Count a model's matrix products."""
        a = architecture
        attention = a.hidden_size * a.head_dim * (2 * a.num_heads + 2 * a.num_kv_heads)
        return cls(a.num_layers * (attention + 3 * a.hidden_size * a.intermediate_size), a.vocab_size * a.hidden_size)


def best_possible(work: Work, workloads: dict[str, Any], precision: str, limits: dict[str, float]) -> dict[str, float]:
    """Return the limit of each workload, in its unit (see benchmarks/runners/protocol.py).

    Attention, norms and sampling count as nothing. Embeddings and lm_head count 8 bits where weights are int4.
    """
    rate = limits["bfloat16_flops"] if precision == "bf16" else limits["byte_ops"]
    layer_bits, head_bits = _BITS[precision]
    token_bytes = (work.layers * layer_bits + work.lm_head * head_bits) / 8

    def seconds(num_tokens: int, num_rows: int) -> float:
        return 2 * (work.layers * num_tokens + work.lm_head * num_rows) / rate

    def together(requests: list[dict[str, Any]], shared: int = 0) -> float:
        tokens = sum(len(request["prompt"]) + request["out"] - 1 for request in requests)
        return seconds(tokens - shared * (len(requests) - 1), sum(request["out"] for request in requests))

    length = len(workloads["C"][0]["prompt"])
    prompts = [request["prompt"] for request in workloads["D"][0]]
    shared = next(i for i in range(len(prompts[0])) if any(prompt[i] != prompts[0][i] for prompt in prompts))
    return {
        "A": limits["bytes_read"] / token_bytes,
        "B": together(workloads["B"]),
        "C": length / seconds(length, 1),
        "D off": together(workloads["D"][0]),
        "D on": together(workloads["D"][0], shared),
    }
