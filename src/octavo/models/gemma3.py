"""Gemma 3 (text): Gemma 2 with norms of queries and keys, and another rotary embedding in windows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.models.gemma2 import read_mixed
from octavo.models.layer_types import FULL, SLIDING
from octavo.models.rope_config import RopeConfig, read_rope

if TYPE_CHECKING:
    from octavo.models.architecture import Architecture
    from octavo.models.config_file import ConfigFile

MODELS = {"Gemma3ForCausalLM": "Gemma 3"}
_DEFAULTS = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "max_position_embeddings": 131_072,
}


def read_architecture(config: ConfigFile, name: str) -> Architecture:
    """Read Gemma 3's keys. `max_position_embeddings` includes scaling.

    Raises `ModelError` for soft-capped scores, which transformers ignores.
    """
    config = config.with_defaults(**_DEFAULTS)
    rope, local_rope = _read_ropes(config)
    pattern = config.count("sliding_window_pattern")
    return read_mixed(config, name, rope=rope, local_rope=local_rope, pattern=pattern, qk_norm="head")


def _read_ropes(config: ConfigFile) -> tuple[RopeConfig, RopeConfig]:
    max_positions, local_theta = (
        config.count("max_position_embeddings"),
        config.number("rope_local_base_freq", 10_000.0),
    )
    kinds = config.section("rope_parameters")
    full, local = (None, None) if kinds is None else (kinds.section(FULL), kinds.section(SLIDING))
    rope = read_rope(config.with_defaults(rope_theta=1_000_000.0), max_positions, section=full)
    if local is None:
        return rope, RopeConfig(theta=local_theta)
    return rope, read_rope(config, max_positions, section=local.with_defaults(rope_theta=local_theta))
