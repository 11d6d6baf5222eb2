"""Settings from the environment, which only this module reads."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

API_KEY_VARIABLE = "OCTAVO_API_KEY"
PORT_VARIABLE = "OCTAVO_SERVE_PORT"
_OPERATOR_KEY_VARIABLE = "OCTAVO_OPERATOR_KEY"
SECRET_VARIABLES = (API_KEY_VARIABLE, "OCTAVO_SERVE_API_KEY", _OPERATOR_KEY_VARIABLE)


def cache_directory() -> Path:
    """Return $XDG_CACHE_HOME/octavo, by default ~/.cache/octavo."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "octavo"


def explain_undecodable(text: str) -> str | None:
    """Return an error message for bytes that are invalid in this locale, or None."""
    if not any("\ud800" <= character <= "\udfff" for character in text):
        return None
    encoding = sys.getfilesystemencoding()
    advice = "rename it" if encoding == "utf-8" else "set LC_ALL=C.UTF-8 or PYTHONUTF8=1 in the environment"
    return f"{text!a} has bytes that are not text in {encoding}, the encoding of this locale; {advice}"


def kernels_required() -> bool:
    """Return True if the compiled extension must exist (OCTAVO_REQUIRE_KERNELS=1)."""
    return os.environ.get("OCTAVO_REQUIRE_KERNELS", "0") not in {"", "0"}


def isa_from_environment() -> str | None:
    """Return OCTAVO_ISA or None, for the option isa = auto."""
    return os.environ.get("OCTAVO_ISA") or None


def threads_from_environment() -> int | None:
    """Return the first number of OMP_NUM_THREADS, or None."""
    value = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(value) if value.isdigit() and int(value) else None


def api_key_from_environment() -> str | None:
    """Return OCTAVO_API_KEY or None."""
    return os.environ.get(API_KEY_VARIABLE) or None


def kv_secret_from_environment() -> str:
    """Return OCTAVO_KV_SECRET or "". Engines that exchange KV need equal secrets.

    The secret is hashed into keys of stored KV, so that readers of keys cannot test guesses of prompts.
    """
    return os.environ.get("OCTAVO_KV_SECRET", "")


def environment_of_replicas(api_key: str | None, operator_key: str | None) -> dict[str, str]:
    """Return the environment of replicas, including keys."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OCTAVO_SERVE_")}
    return {**kept, API_KEY_VARIABLE: api_key or "", _OPERATOR_KEY_VARIABLE: operator_key or ""}


def environment_for_nodes(api_key: str | None, operator_key: str | None) -> dict[str, str]:
    """Return the variables that replicas on other machines get, including keys."""
    replicas = environment_of_replicas(api_key, operator_key)
    return {name: value for name, value in replicas.items() if name.startswith("OCTAVO_")}


def environment_of_engine(given: Mapping[str, str]) -> dict[str, str]:
    """Return this node's environment with the variables from `environment_for_nodes`."""
    return {name: value for name, value in os.environ.items() if not name.startswith("OCTAVO_")} | dict(given)


def environment_of_ray() -> dict[str, str]:
    """Return the environment of a process that uses Ray. Ray must not send statistics to its authors."""
    return {"RAY_USAGE_STATS_ENABLED": "0"} | dict(os.environ)


def ray_address_from_environment() -> str | None:
    """Return RAY_ADDRESS or None."""
    return os.environ.get("RAY_ADDRESS") or None


def operator_key_from_environment() -> str | None:
    """Return `AccessConfig.operator_key`."""
    return os.environ.get(_OPERATOR_KEY_VARIABLE) or None


def forget_service_link() -> str | None:
    """Remove and return OCTAVO_SERVE_PORT if Kubernetes set it to a URL such as tcp://10.0.0.1:8000."""
    port = os.environ.get(PORT_VARIABLE, "")
    return os.environ.pop(PORT_VARIABLE) if port.startswith(("tcp://", "udp://")) else None
