"""Settings from the environment: nothing else of octavo reads any there."""

from __future__ import annotations

import os
import sys
from pathlib import Path

API_KEY_VARIABLE = "OCTAVO_API_KEY"
PORT_VARIABLE = "OCTAVO_SERVE_PORT"
_OPERATOR_KEY_VARIABLE = "OCTAVO_OPERATOR_KEY"
# The engine process has no use for them.
SECRET_VARIABLES = (API_KEY_VARIABLE, "OCTAVO_SERVE_API_KEY", _OPERATOR_KEY_VARIABLE)


def cache_directory() -> Path:
    """Return where octavo keeps what it found out: $XDG_CACHE_HOME/octavo, by default ~/.cache/octavo."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "octavo"


def explain_undecodable(text: str) -> str | None:
    """Explain why an argument or a path holds bytes that are not text in this locale; None if all of it is text.

    Python keeps such bytes as lone surrogates, which neither JSON nor a library that expects UTF-8 takes.
    """
    if not any("\ud800" <= character <= "\udfff" for character in text):
        return None
    encoding = sys.getfilesystemencoding()
    advice = "rename it" if encoding == "utf-8" else "set LC_ALL=C.UTF-8 or PYTHONUTF8=1 in the environment"
    return f"{text!a} has bytes that are not text in {encoding}, the encoding of this locale; {advice}"


def kernels_required() -> bool:
    """Whether a missing compiled extension is an error (OCTAVO_REQUIRE_KERNELS=1) and not a warning."""
    return os.environ.get("OCTAVO_REQUIRE_KERNELS", "0") not in {"", "0"}


def isa_from_environment() -> str | None:
    """Return the instruction set that `auto` means (OCTAVO_ISA), or None for the best one of the processor.

    It reaches every process that the caller starts, for tests of one instruction set on a processor that has several.
    """
    return os.environ.get("OCTAVO_ISA") or None


def threads_from_environment() -> int | None:
    """Return how many threads shall compute (the first number of OMP_NUM_THREADS), or None where it says nothing."""
    asked = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(asked) if asked.isdigit() and int(asked) else None


def api_key_from_environment() -> str | None:
    """Return the key that clients of the server must send (OCTAVO_API_KEY), or None where none is set."""
    return os.environ.get(API_KEY_VARIABLE) or None


def kv_secret_from_environment() -> str:
    """Return what goes into the keys of KV in stores (OCTAVO_KV_SECRET), "" where nothing is set.

    Who reads keys there and does not know it cannot test guesses of what was asked. Engines share what they store where
    it is the same. Prefill and decode engines prove to each other that they know it.
    """
    return os.environ.get("OCTAVO_KV_SECRET", "")


def environment_of_replicas(api_key: str | None, operator_key: str | None) -> dict[str, str]:
    """Return the environment of servers that this one starts: their commands have all options but the keys."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("OCTAVO_SERVE_")}
    return {**own, API_KEY_VARIABLE: api_key or "", _OPERATOR_KEY_VARIABLE: operator_key or ""}


def operator_key_from_environment() -> str | None:
    """Return the key of whoever has started this server as a replica, beside those of a file."""
    return os.environ.get(_OPERATOR_KEY_VARIABLE) or None


def forget_service_link() -> str | None:
    """Forget an OCTAVO_SERVE_PORT that is none, and return it: tcp://10.0.0.1:8000, say.

    Kubernetes describes a Service called octavo-serve so, in every container of its namespace.
    """
    port = os.environ.get(PORT_VARIABLE, "")
    return os.environ.pop(PORT_VARIABLE) if port.startswith(("tcp://", "udp://")) else None
