"""Reads `config.json`. Errors name the file, key and value."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from octavo.errors import ModelError

if TYPE_CHECKING:
    from pathlib import Path

_MISSING = object()

# Keys that change tokens, with harmless values. Other values are refused if a family does not read the key.
_CHANGES_TOKENS: dict[str, tuple[Any, ...]] = {
    "attn_logit_softcapping": (None, 0),
    "final_logit_softcapping": (None, 0),
    "logit_scale": (None, 1),
    "logits_scaling": (None, 1),
    "embedding_multiplier": (None, 1),
    "residual_multiplier": (None, 1),
    "attention_multiplier": (None,),
    "query_pre_attn_scalar": (None,),
    "attention_sinks": (None, False),
    "use_sinks": (None, False),
    "attention_chunk_size": (None,),
    "no_rope_layers": (None, []),
    "no_rope_layer_interval": (None,),
    "clip_qkv": (None,),
    "alibi": (None, False),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "n_routed_experts": (None, 0),
    "per_layer_config": (None, {}),
    "block_configs": (None, []),
    "is_encoder_decoder": (None, False),
    "is_causal": (None, True),
    "use_bidirectional_attention": (None, False),
    "attn_output_gate": (None, True),
    "normalization_function": (None, "rmsnorm"),
    "block_use_swiglu": (None, True),
    "use_pos_enc": (None, True),
}


class ConfigFile:
    """A JSON object that records read keys. Methods raise `ModelError` for wrong values."""

    __slots__ = ("_read_keys", "path", "prefix", "values")

    def __init__(self, path: Path, values: dict[str, Any], prefix: str = "") -> None:
        self.path = path
        self.values = values
        self.prefix = prefix
        self._read_keys: set[str] = set()

    @classmethod
    def read(cls, path: Path) -> ConfigFile:
        """Read a JSON object."""
        try:
            values = json.loads(path.read_bytes())
        except OSError as error:
            raise ModelError(f"{path} cannot be read ({error.strerror}); a checkpoint needs it") from error
        except (ValueError, RecursionError) as error:
            raise ModelError(f"{path} is not valid JSON ({error}); download it again") from error
        if not isinstance(values, dict):
            raise ModelError(f"{path} has a JSON {type(values).__name__}, but an object was expected")
        return cls(path, values)

    def with_defaults(self, **defaults: Any) -> ConfigFile:
        """Return a copy with defaults for missing and null keys."""
        other = ConfigFile(self.path, self.values | {k: v for k, v in defaults.items() if not self.has(k)}, self.prefix)
        other._read_keys = self._read_keys
        return other

    def with_values(self, values: dict[str, Any]) -> ConfigFile:
        """Return a copy with other values."""
        other = ConfigFile(self.path, self.values | values, self.prefix)
        other._read_keys = self._read_keys
        return other

    def error(self, key: str, problem: str) -> ModelError:
        """Make an error about `key`."""
        shown = repr(self.values.get(key))
        return ModelError(f"{self.path}: {self.prefix}{key} = {shown[:200]}: {problem}")

    def has(self, key: str) -> bool:
        """Return False for a missing or null key."""
        return self.values.get(key) is not None

    def count(self, key: str, default: Any = _MISSING) -> int:
        """Return a whole number of at least 1."""
        value = self._get(key, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
            raise self.error(key, "must be an integer from 1 to 2147483647")
        return value

    def number(self, key: str, default: Any = _MISSING, *, above: float = 0.0) -> float:
        """Return a finite number above `above`."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= above:
            raise self.error(key, f"must be a number above {above:g}")
        return float(value)

    def numbers(self, key: str) -> tuple[float, ...]:
        """Return finite numbers above 0."""
        values = self._get(key, _MISSING)
        are_numbers = isinstance(values, list) and all(
            isinstance(each, int | float) and not isinstance(each, bool) and math.isfinite(each) and each > 0
            for each in values
        )
        if not are_numbers:
            raise self.error(key, "must be a list of numbers above 0")
        return tuple(map(float, values))

    def whole_number(self, key: str, most: int) -> int:
        """Return a whole number from 0, the default, to `most`."""
        value = self._get(key, 0)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
            raise self.error(key, f"must be an integer from 0 to {most}")
        return value

    def whole_numbers(self, key: str, default: list[int]) -> list[int]:
        """Return whole numbers."""
        values = self._get(key, default)
        if not isinstance(values, list) or any(isinstance(v, bool) or not isinstance(v, int) for v in values):
            raise self.error(key, "must be a list of integers")
        return values

    def optional_number(self, key: str, *, above: float = 0.0) -> float | None:
        """Like `number`, or None for a missing or null key."""
        return self.number(key, above=above) if self.has(key) else None

    def flag(self, key: str, default: Any = _MISSING) -> bool:
        """Return a boolean."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, "must be true or false")
        return value

    def text(self, key: str, default: Any = _MISSING) -> str:
        """Return a string."""
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self.error(key, "must be a string")
        return value

    def section(self, key: str) -> ConfigFile | None:
        """Return a nested object, or None if missing, null or empty."""
        value = self.values.get(key)
        if value is None or value == {}:
            return None
        if not isinstance(value, dict):
            raise self.error(key, "must be an object")
        return ConfigFile(self.path, value, f"{self.prefix}{key}.")

    def token_ids(self, key: str) -> tuple[int, ...]:
        """Return nonnegative token ids from a number, a list or null."""
        value = self.values.get(key)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if any(isinstance(id_, bool) or not isinstance(id_, int) for id_ in ids):
            raise self.error(key, "must be a token id or a list of them")
        return tuple(id_ for id_ in ids if id_ >= 0)

    def refuse_unread(self, family: str) -> None:
        """Raise `ModelError` if an unread key would change the tokens."""
        for key, harmless in _CHANGES_TOKENS.items():
            if key not in self._read_keys and self.values.get(key) not in harmless:
                raise self.error(key, f"octavo does not support this for {family}; it would generate wrong tokens")

    def mark(self, key: str) -> None:
        """Record a read key."""
        self._read_keys.add(key)

    def unread(self) -> list[str]:
        """Return unread keys."""
        return [key for key in self.values if key not in self._read_keys]

    def _get(self, key: str, default: Any) -> Any:
        self._read_keys.add(key)
        value = self.values.get(key)
        if value is not None:
            return value
        if default is _MISSING:
            state = "is null" if key in self.values else "is missing"
            raise ModelError(f"{self.path}: {self.prefix}{key} {state}; this architecture needs it")
        return default
