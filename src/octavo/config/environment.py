"""Settings from the environment. No other module of octavo reads settings there."""

from __future__ import annotations

import os
import sys
from pathlib import Path

API_KEY_VARIABLE = "OCTAVO_API_KEY"
PORT_VARIABLE = "OCTAVO_SERVE_PORT"
_OPERATOR_KEY_VARIABLE = "OCTAVO_OPERATOR_KEY"
# The engine process needs none of these.
SECRET_VARIABLES = (API_KEY_VARIABLE, "OCTAVO_SERVE_API_KEY", _OPERATOR_KEY_VARIABLE)


def cache_directory() -> Path:
    """Return the directory of octavo's cache: $XDG_CACHE_HOME/octavo, by default ~/.cache/octavo."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "octavo"


def explain_undecodable(text: str) -> str | None:
    """Return a message if an argument or a path has bytes that are not text in this locale; None if all is text.

    Python keeps such bytes as lone surrogates. JSON and libraries that expect UTF-8 do not accept them.
    """
    if not any("\ud800" <= character <= "\udfff" for character in text):
        return None
    encoding = sys.getfilesystemencoding()
    advice = "rename it" if encoding == "utf-8" else "set LC_ALL=C.UTF-8 or PYTHONUTF8=1 in the environment"
    return f"{text!a} has bytes that are not text in {encoding}, the encoding of this locale; {advice}"


def kernels_required() -> bool:
    """Return True if a missing compiled extension is an error (OCTAVO_REQUIRE_KERNELS=1) instead of a warning."""
    return os.environ.get("OCTAVO_REQUIRE_KERNELS", "0") not in {"", "0"}


def isa_from_environment() -> str | None:
    """Return the instruction set that `auto` means (OCTAVO_ISA), or None for the processor's best one.

    All child processes inherit it, so that tests can use one instruction set on a processor that has several.
    """
    return os.environ.get("OCTAVO_ISA") or None


def threads_from_environment() -> int | None:
    """Return the number of computing threads (the first number of OMP_NUM_THREADS), or None if it is not set."""
    asked = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(asked) if asked.isdigit() and int(asked) else None


def api_key_from_environment() -> str | None:
    """Return the key that clients of the server must send (OCTAVO_API_KEY), or None if it is not set."""
    return os.environ.get(API_KEY_VARIABLE) or None


def kv_secret_from_environment() -> str:
    """Return the secret that is part of the keys of KV in stores (OCTAVO_KV_SECRET), "" if it is not set.

    Without the secret, a reader of the store's keys cannot test guesses of prompts. Engines with the same secret share
    the KV that they store. Prefill and decode engines prove to each other that they know it.
    """
    return os.environ.get("OCTAVO_KV_SECRET", "")


def environment_of_replicas(api_key: str | None, operator_key: str | None) -> dict[str, str]:
    """Return the environment for replicas. It has their keys; all other options are in their command lines."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("OCTAVO_SERVE_")}
    return {**own, API_KEY_VARIABLE: api_key or "", _OPERATOR_KEY_VARIABLE: operator_key or ""}


def operator_key_from_environment() -> str | None:
    """Return the key of the router that has started this server as a replica, or None.

    It is accepted in addition to the keys of a file.
    """
    return os.environ.get(_OPERATOR_KEY_VARIABLE) or None


def forget_service_link() -> str | None:
    """Remove OCTAVO_SERVE_PORT from the environment if it is a URL such as tcp://10.0.0.1:8000; return its old value.

    Kubernetes sets it for a Service called octavo-serve, in every container of its namespace. Returns None if the
    variable is no such URL.
    """
    port = os.environ.get(PORT_VARIABLE, "")
    return os.environ.pop(PORT_VARIABLE) if port.startswith(("tcp://", "udp://")) else None
