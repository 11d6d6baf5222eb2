"""Qwen2 and Qwen2.5: Llama with a bias on q, k and v. Upper layers may have a window."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from octavo.models.architecture import Architecture, read_decoder
from octavo.models.attention import AttentionConfig
from octavo.models.decoder_layer import LayerConfig
from octavo.models.gated_mlp import GatedMLPConfig
from octavo.models.layer_types import SLIDING, read_layer_types
from octavo.models.rope_config import read_rope

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo.models.config_file import ConfigFile

MODELS = {"Qwen2ForCausalLM": "Qwen2, Qwen2.5, QwQ"}
_DEFAULT_WINDOW = 4096  # null means no window


def read_architecture(config: ConfigFile, name: str) -> Architecture:
    """See `Family`."""
    max_positions = config.count("max_position_embeddings", 32768)
    rope = read_rope(config, max_positions)
    attention = AttentionConfig.read(config, rope=rope, default_num_kv_heads=32, qkv_bias=True)
    return read_decoder(
        config,
        name,
        layers=layers_with_windows(config, attention),
        max_context_tokens=rope.max_context_tokens(max_positions),
    )


def layers_with_windows(
    config: ConfigFile,
    attention: AttentionConfig,
    has_window: Callable[[int, int], bool] = lambda index, bound: index >= bound,
) -> tuple[LayerConfig, ...]:
    """Return all layers. has_window(index, max_window_layers): used without `layer_types`."""
    mlp, windows = GatedMLPConfig.read(config), _read_windows(config, has_window)
    return tuple(LayerConfig(attention=replace(attention, window=each), mlp=mlp) for each in windows)


def _read_windows(config: ConfigFile, has_window: Callable[[int, int], bool]) -> tuple[int | None, ...]:
    num_layers = config.count("num_hidden_layers")
    is_given = config.values.get("sliding_window", _DEFAULT_WINDOW) is not None
    uses_window = is_given and config.flag("use_sliding_window", default=False)
    window = config.count("sliding_window", _DEFAULT_WINDOW) if uses_window else None
    if config.has("layer_types"):
        kinds = read_layer_types(config)
        if window is None and SLIDING in kinds:
            raise config.error("layer_types", f"{SLIDING} needs use_sliding_window and sliding_window")
        return tuple(window if kind == SLIDING else None for kind in kinds)
    bound = config.values.get("max_window_layers", 28)
    if isinstance(bound, bool) or not isinstance(bound, int) or bound < 0:
        raise config.error("max_window_layers", "must be an integer, the number of layers")
    return tuple(window if has_window(index, bound) else None for index in range(num_layers))
