"""Translates a GGUF file's rotary embedding to config.json."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from octavo.errors import ModelError

if TYPE_CHECKING:
    from octavo.models.gguf_config import GGUFFields

ROPE_FREQUENCIES, LONG_FACTORS, SHORT_FACTORS = (
    "rope_freqs.weight",
    "rope_factors_long.weight",
    "rope_factors_short.weight",
)
# Llama 3.1's low_freq_factor, high_freq_factor, original_max_position_embeddings.
_LLAMA3 = (1.0, 4.0, 8192)
_YARN = "rope.scaling.yarn_"
_NO_TURN = 1e20
# llama.cpp's defaults, and the only architecture with betas in files.
_BETA_FAST, _BETA_SLOW, _READS_BETAS = 32.0, 1.0, "mistral3"


def read_gguf_rope(fields: GGUFFields) -> dict[str, Any]:
    """Return `rope_parameters`."""
    theta = fields.number("rope.freq_base", 10_000.0)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    kind = fields.values.text("rope.scaling.type", "linear")  # llama.cpp's default
    factor = fields.optional("rope.scaling.factor") or fields.optional("rope.scale_linear") or 1.0
    original = fields.optional("rope.scaling.original_context_length")
    if fields.has(ROPE_FREQUENCIES):
        return rope | _read_llama3(fields, theta)
    if fields.has(LONG_FACTORS):
        rope |= {"rope_type": "longrope", "long_factor": fields.factors(LONG_FACTORS)}
        rope |= {"short_factor": fields.factors(SHORT_FACTORS)} if fields.has(SHORT_FACTORS) else {}
        given = {
            "original_max_position_embeddings": original,
            "attention_factor": fields.optional("rope.scaling.attn_factor"),
        }
        return rope | {key: value for key, value in given.items() if value is not None}
    if factor == 1.0 or kind == "none":
        return rope
    rope |= {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        rope |= _read_yarn(fields, factor)
        if original is not None:
            rope["original_max_position_embeddings"] = original
    return rope


def read_proportional(fields: GGUFFields, theta: float) -> dict[str, Any]:
    """Return `rope_parameters` of partly rotated heads. Stored frequency divisors are 1, then huge."""
    divisors = fields.factors(ROPE_FREQUENCIES) if fields.has(ROPE_FREQUENCIES) else []
    turned, width = divisors.count(1.0), 2 * len(divisors)
    if not turned or width != fields.head_dim or min([*divisors[turned:], _NO_TURN]) < _NO_TURN:
        raise ModelError(
            f"{fields.file.path}: {ROPE_FREQUENCIES} must have {fields.head_dim // 2} numbers: 1 for rotated pairs, "
            f"then at least {_NO_TURN:g}"
        )
    share = 2 * turned / width
    if int(share * width // 2) < turned:
        share = math.nextafter(share, 2.0)
    return {"rope_type": "proportional", "rope_theta": theta, "partial_rotary_factor": share}


def _read_yarn(fields: GGUFFields, factor: float) -> dict[str, Any]:
    """Return yarn's numbers as in llama.cpp (`llama_context`). Log the file's unused values."""
    is_read = fields.architecture == _READS_BETAS
    multiplier = fields.optional(f"{_YARN}log_multiplier") if is_read else None
    attention_factor = _yarn_mscale(factor, 1.0) / (1.0 if multiplier is None else _yarn_mscale(factor, multiplier))
    attention_factor *= fields.optional("rope.scaling.attn_factor") or 1.0
    beta_fast, beta_slow = fields.optional(f"{_YARN}beta_fast"), fields.optional(f"{_YARN}beta_slow")
    computed = {
        "attention_factor": attention_factor,
        "beta_fast": beta_fast if is_read and beta_fast is not None else _BETA_FAST,
        "beta_slow": beta_slow if is_read and beta_slow is not None else _BETA_SLOW,
    }
    said = {"ext_factor": 1.0, "attn_factor": attention_factor}
    said |= {name: computed[name] for name in ("beta_fast", "beta_slow")}
    for name, number in said.items():
        given = fields.values.values.get(f"{_YARN}{name}")
        if isinstance(given, (int, float)) and not math.isclose(given, number, rel_tol=1e-5):
            fields.warn(f"{_YARN}{name} = {given:g} is not used: like llama.cpp, octavo uses {number:g}")
    return computed


def _yarn_mscale(factor: float, multiplier: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * multiplier * math.log(factor) + 1.0


def _read_llama3(fields: GGUFFields, theta: float) -> dict[str, Any]:
    stored = fields.factors(ROPE_FREQUENCIES)
    low, high, original = _LLAMA3
    factor = max(stored)
    computed = []
    for index in range(len(stored)):
        wavelength = 2 * math.pi * theta ** (index / len(stored))
        share = min(max((original / wavelength - low) / (high - low), 0.0), 1.0)
        computed.append(1 / ((1 - share) / factor + share))
    if not np.allclose(stored, computed, rtol=1e-5):
        raise ModelError(
            f"{fields.file.path}: {ROPE_FREQUENCIES} differs from the values of Llama 3 with "
            "original_max_position_embeddings = "
            f"{original} and factor = {factor:g}; octavo supports no other rotary embedding"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }
