"""Metrics under vLLM's names."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from prometheus_client import Metric
from prometheus_client.registry import Collector

from octavo.data.kv_tiers import DEVICE

if TYPE_CHECKING:
    from collections.abc import Iterator


class VllmName(NamedTuple):
    """One of vLLM's metrics.

    name: vLLM's name, without the prefix `vllm:`.
    source: octavo's metric, without the prefix `octavo:`.
    only: The label and value of the samples that vLLM's metric has, or None for all samples.
    """

    name: str
    source: str
    only: tuple[str, str] | None = None


_SAME = (
    "cache_config_info",
    "e2e_request_latency_seconds",
    "generation_tokens",
    "inter_token_latency_seconds",
    "iteration_tokens_total",
    "kv_cache_usage_perc",
    "num_preemptions",
    "num_requests_running",
    "num_requests_waiting",
    "prefix_cache_queries",
    "prompt_tokens",
    "request_decode_time_seconds",
    "request_generation_tokens",
    "request_prefill_time_seconds",
    "request_prompt_tokens",
    "request_queue_time_seconds",
    "request_success",
    "spec_decode_num_accepted_tokens",
    "spec_decode_num_accepted_tokens_per_pos",
    "spec_decode_num_draft_tokens",
    "spec_decode_num_drafts",
    "time_to_first_token_seconds",
)
VLLM_NAMES = (
    *(VllmName(name, name) for name in _SAME),
    VllmName("prefix_cache_hits", "kv_tier_hit_tokens", ("tier", DEVICE)),  # vLLM does not count host memory
    VllmName("time_per_output_token_seconds", "inter_token_latency_seconds"),  # older versions of vLLM
)
_LABELS = {"kv_cache_dtype": "cache_dtype"}
_ENGINE = {"engine": "0"}


class VllmNames(Collector):
    """Yields a collector's metrics with the prefix `vllm:` if vLLM has them, and otherwise unchanged.

    keeps_all: True to also yield octavo's names of the metrics that vLLM has.
    """

    def __init__(self, source: Collector, *, keeps_all: bool) -> None:
        self._source = source
        self._replaced = set() if keeps_all else {each.source for each in VLLM_NAMES if each.only is None}

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics."""
        for family in self._source.collect():
            source = family.name.removeprefix("octavo:")
            if source not in self._replaced:
                yield family
            for each in VLLM_NAMES:
                if each.source == source:
                    yield _renamed(family, each)


def _renamed(family: Metric, new: VllmName) -> Metric:
    renamed = Metric(f"vllm:{new.name}", family.documentation, family.type)
    label, value = new.only or (None, None)
    for sample in family.samples:
        if label is not None and sample.labels[label] != value:
            continue
        labels = {_LABELS.get(name, name): each for name, each in sample.labels.items() if name != label}
        name = renamed.name + sample.name.removeprefix(family.name)
        renamed.samples.append(sample._replace(name=name, labels={**labels, **_ENGINE}))
    return renamed
