"""Chooses a worker's device."""

from __future__ import annotations

import torch

from octavo.errors import ConfigError


def resolve_device(name: str | None) -> torch.device:
    """Return the named device, by default a GPU if available. Raises `ConfigError` if it cannot be used."""
    if name is None or name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device {name!r} is unknown; use cpu or cuda") from None
    if device.type not in {"cpu", "cuda"}:
        raise ConfigError(f"device {name!r} is not supported; use cpu or cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device cuda was requested, but torch finds no GPU")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"device {name!r} was requested, but torch finds {torch.cuda.device_count()} GPUs, numbered from 0"
        )
    return device


def use_device(device: torch.device) -> None:
    """Make a numbered GPU current. Triton launches on the current GPU, even if tensors are on another."""
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)


def machine_name(device: torch.device) -> str:
    """Return the GPU's name, or the processor's instruction sets."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else torch.backends.cpu.get_cpu_capability()
