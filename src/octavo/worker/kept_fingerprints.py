"""Fingerprints that earlier starts kept in the user's cache directory: a start that computes otherwise is refused."""

from __future__ import annotations

import hashlib
import json
import logging
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import octavo
from octavo.data.fingerprint import EngineFingerprint
from octavo.errors import FingerprintError
from octavo.kernels.machine import processor_identity, processor_name
from octavo.models.weight_hashes import FileState, written_whole

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from octavo.models.architecture import Architecture
    from octavo.models.weight_source import WeightSource

logger = logging.getLogger(__name__)
MAX_FILES = 512
_SUFFIX = ".json"
_ROOMS = ("kernels", "models", "worker")  # their code decides the bits of a result


class KeptFingerprints:
    """A directory of fingerprints, one JSON file for each engine that was started; the oldest of many are removed."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def check(self, engine: Mapping[str, Any], found: EngineFingerprint) -> None:
        """Compare a start with the first one of the same engine; keep its fingerprint if there was none.

        engine: all that the numbers may depend on, as plain data. A directory that cannot be used costs one warning.
        Raises `FingerprintError` if a checksum differs.
        """
        path = self.path(engine)
        try:
            kept = _read(path)
            if kept is None:
                self._keep(path, engine, found)
                return
        except OSError as error:
            logger.warning("the fingerprint of this start cannot be compared with %s: %s", path, error)
            return
        if different := found.differences(kept):
            raise FingerprintError(_describe(different, found, kept, path))

    def path(self, engine: Mapping[str, Any]) -> Path:
        """Return the file of an engine."""
        return self.directory / f"{_digest(json.dumps(engine, sort_keys=True))}{_SUFFIX}"

    def _keep(self, path: Path, engine: Mapping[str, Any], found: EngineFingerprint) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        values = asdict(found)
        text = json.dumps(
            {"engine": dict(engine), "fingerprint": values, "digest": _digest(json.dumps(values))}, indent=1
        )
        with written_whole(path) as file:
            file.write(text.encode())
        files = sorted(self.directory.glob(f"*{_SUFFIX}"), key=_age)
        for old in files[:-MAX_FILES]:
            with suppress(OSError):
                old.unlink()


def describe_installation() -> dict[str, str]:
    """Return what the numbers of every model depend on here: processor, libraries, and the code that is installed."""
    from octavo import _kernels  # noqa: PLC0415  only compiled kernels have fingerprints

    root = Path(octavo.__file__).parent
    files = [Path(_kernels.__file__), *(path for room in _ROOMS for path in sorted((root / room).rglob("*.py")))]
    return {
        "processor": f"{processor_name()}, {_digest(json.dumps(processor_identity()))}",
        "instruction_sets": " ".join(_kernels.instruction_sets()),
        "octavo": octavo.__version__,
        "torch": f"{torch.__version__} on {torch.backends.cpu.get_cpu_capability()}",
        "code": _digest(json.dumps([_state(path) for path in files])),
    }


def describe_model(weights: WeightSource, architecture: Architecture, seed: int | None = None) -> dict[str, Any]:
    """Return what a model's numbers depend on: its shapes, and the state of its files (size, times, inode).

    A file that is written again may hold other numbers. seed: of random weights, which have no files.
    """
    files = weights.config_files() + ([] if seed is not None else weights.weight_files())
    return {"files": [_state(path) for path in files], "seed": seed, "architecture": _digest(repr(architecture))}


def _state(path: Path) -> list[str | int]:
    return [str(path.resolve()), *asdict(FileState.of(path)).values()]


def _read(path: Path) -> EngineFingerprint | None:
    """Return the kept fingerprint; None if there is no file or its digest is wrong. Raises `OSError`."""
    try:
        values = json.loads(path.read_bytes())
        if values["digest"] == _digest(json.dumps(values["fingerprint"])):
            return EngineFingerprint(**values["fingerprint"])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):
        pass
    logger.warning("%s is damaged: the fingerprint of this start takes its place", path)
    return None


def _describe(different: Iterable[str], found: EngineFingerprint, kept: EngineFingerprint, path: Path) -> str:
    values = "; ".join(f"{name} {getattr(kept, name)} then, {getattr(found, name)} now" for name in different)
    return (
        f"this start computes other numbers than an earlier one with the same files, kernels and processor: {values}. "
        "Start again. If that succeeds, this start was faulty: the memory or the processor may be, look at "
        "`octavo doctor`. If it fails again, compare the checkpoint with its source and remove "
        f"{path.parent.parent / 'packed'}; if it fails still, the earlier start was faulty: remove {path}"
    )


def _age(path: Path) -> float:
    with suppress(OSError):  # another process may remove it meanwhile
        return path.stat().st_mtime
    return 0.0


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
