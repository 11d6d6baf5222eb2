"""The largest batch, run once on request: what a full step really takes, kept for later starts.

TGI warms up with its largest prefill at every start; octavo computes the bytes from shapes and starts at once. The
probe is for whoever wants the measured figure instead: it runs one step of `max_num_batched_tokens`, looks for the
largest that fits where memory does not suffice, and keeps the result in the user's cache directory, by model, number
formats, device and limits.
"""

from __future__ import annotations

import gc
import hashlib
import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from octavo.config import cache_directory
from octavo.errors import ConfigError
from octavo.worker.memory import free_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)
_PEAK_KEY = "VmHWM:"
_MORE_FREE = 1.1
_PRECISION = 16  # the largest step is found to a sixteenth


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What the largest step took.

    max_batch_prefill_tokens: rows of the largest step that ran. peak_bytes: what the process grew by meanwhile; memory
    that it had freed before and used again does not show. free_bytes: what was free before.
    """

    max_batch_prefill_tokens: int
    peak_bytes: int
    seconds: float
    free_bytes: int

    def serves(self, max_num_batched_tokens: int, free: int) -> bool:
        """Whether it need not be measured again: all ran that is asked for, or not much more memory is free now."""
        return self.max_batch_prefill_tokens >= max_num_batched_tokens or free < _MORE_FREE * self.free_bytes


def probe_file(*identity: object) -> Path:
    """Return where the result for this model, dtype, device and limits is kept."""
    name = hashlib.sha256(json.dumps([str(part) for part in identity]).encode()).hexdigest()[:24]
    return cache_directory() / "probes" / f"{name}.json"


def kept_result(path: Path) -> ProbeResult | None:
    """Return an earlier probe's result; None where there is none that can be read."""
    try:
        return ProbeResult(**json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        logger.warning("the kept probe %s cannot be read (%s); it is ignored", path, error)
        return None


def probe_largest_batch(
    run: Callable[[int], float], max_num_batched_tokens: int, device: torch.device, path: Path
) -> ProbeResult:
    """Run the largest step that memory allows and keep the result in `path`.

    run(num_tokens) computes one step of so many tokens and returns its seconds.
    Raises `ConfigError` when not even one token fits.
    """
    free, held = free_bytes(device), _held_bytes(device)
    fits, too_many, num_tokens = 0, max_num_batched_tokens + 1, max_num_batched_tokens
    result: ProbeResult | None = None
    while fits < num_tokens < too_many:
        gc.collect()  # what is freed meanwhile would hide what the step takes
        _reset_peak(device)
        try:
            seconds = run(num_tokens)
        except (MemoryError, RuntimeError) as error:
            if not _is_out_of_memory(error):
                raise
            logger.info("a step of %d tokens does not fit: %s", num_tokens, error)
            too_many = num_tokens
        else:
            fits = num_tokens
            result = ProbeResult(fits, max(_peak(device) - held, 0), seconds, free)
        if too_many - fits > max(fits // _PRECISION, 1):
            num_tokens = (fits + too_many) // 2
    if result is None:
        raise ConfigError("not even a step of one token fits into the free memory")
    _keep(result, path)
    return result


def _keep(result: ProbeResult, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(result)) + "\n")
    except OSError as error:
        logger.warning("%s cannot be written (%s): the next start measures again", path, error.strerror)


def _is_out_of_memory(error: Exception) -> bool:
    """Torch's CPU allocator has no error of its own."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "allocate memory" in str(error)


def _held_bytes(device: torch.device) -> int:
    """Return the bytes held now."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else _status_bytes("VmRSS:")


def _reset_peak(device: torch.device) -> None:
    """Start a new measurement of the peak."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        logger.debug("the peak of this process cannot be reset; the probe reports its highest so far")


def _peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _status_bytes(_PEAK_KEY)


def _status_bytes(key: str) -> int:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(key)), 0)
