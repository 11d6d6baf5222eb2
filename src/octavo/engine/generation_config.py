"""Read a checkpoint's EOS ids and sampling defaults, as in vLLM."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from octavo.errors import ModelError

if TYPE_CHECKING:
    from pathlib import Path

_SAMPLING_KEYS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens")
_PARAMETER_NAMES = {"max_new_tokens": "max_tokens"}  # keys that octavo names differently
_WHOLE_KEYS = frozenset({"top_k", "max_new_tokens"})


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """A checkpoint's default sampling parameters and EOS ids.

    sampling: Values by parameter name.
    eos_token_ids: Ids from generation_config.json, or else from config.json.
    path: generation_config.json, for error messages.
    """

    sampling: dict[str, float | int]
    eos_token_ids: tuple[int, ...]
    path: Path


def read_generation_defaults(directory: Path) -> GenerationDefaults:
    """Read generation_config.json and config.json. Raises `ModelError`."""
    path = directory / "generation_config.json"
    values = read_json_object(path)
    given = [key for key in _SAMPLING_KEYS if values.get(key) is not None]
    sampling = {_PARAMETER_NAMES.get(key, key): _number(path, key, values[key]) for key in given}
    eos = _token_ids(path, values.get("eos_token_id"))
    config_path = directory / "config.json"
    return GenerationDefaults(
        sampling, eos or _token_ids(config_path, read_json_object(config_path).get("eos_token_id")), path
    )


def read_json(path: Path, missing: Any = None) -> Any:
    """Return a JSON file's content, or `missing` if no file exists. Raises `ModelError`."""
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        return missing
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON ({error}); download it again") from error


def read_json_object(path: Path) -> dict[str, Any]:
    """Return a JSON file's object, or {} if no file exists. Raises `ModelError`."""
    values = read_json(path, {})
    if not isinstance(values, dict):
        raise ModelError(f"{path} must be a JSON object, but is a JSON {type(values).__name__}")
    return values


def _number(path: Path, key: str, value: Any) -> float | int:
    kinds = (int,) if key in _WHOLE_KEYS else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not math.isfinite(value):
        raise ModelError(f"{path}: {key} = {value!r} must be a {'whole ' if key in _WHOLE_KEYS else ''}number")
    return value


def _token_ids(path: Path, value: Any) -> tuple[int, ...]:
    # Negative ids mean no EOS.
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(isinstance(id_, bool) or not isinstance(id_, int) for id_ in ids):
        raise ModelError(f"{path}: eos_token_id = {value!r} must be a token id or a list of them")
    return tuple(id_ for id_ in ids if id_ >= 0)
