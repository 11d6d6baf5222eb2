"""Mixture-of-experts work."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ExpertLoad:
    """The work of experts in one step.

    num_tokens  tokens, counted once per expert
    num_reads   experts with tokens
    read_bytes  packed weights of these experts, in all ranks together
    imbalance   tokens of each layer's busiest expert, summed, divided by the sum of the layers' means
    """

    num_tokens: int
    num_reads: int
    read_bytes: int
    imbalance: float


@dataclass(slots=True)
class ExpertStats:
    """Sums of `ExpertLoad`."""

    num_steps: int = 0
    num_tokens: int = 0
    num_reads: int = 0
    read_bytes: int = 0
    imbalance: float = 0.0

    def add(self, load: ExpertLoad | ExpertStats, num_steps: int = 1) -> None:
        """Add the work of `num_steps` steps."""
        self.num_steps += num_steps
        self.num_tokens += load.num_tokens
        self.num_reads += load.num_reads
        self.read_bytes += load.read_bytes
        self.imbalance += load.imbalance

    @property
    def tokens_per_read(self) -> float:
        """Mean tokens per read of an expert's weights."""
        return self.num_tokens / self.num_reads if self.num_reads else 0.0


@dataclass(frozen=True, slots=True)
class ExpertTokens:
    """Total tokens by layer and expert. counts: int64 [layers, num_experts], native byte order."""

    num_experts: int
    counts: bytearray
