"""Compares a start's fingerprint with the stored one.

A different fingerprint is refused at first, and accepted if another process computes it again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
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
    from octavo.models.weight_hashes import FileHashes
    from octavo.models.weight_source import WeightSource

logger = logging.getLogger(__name__)
MAX_FILES = 512
_SUFFIX, _OTHER_SUFFIX = ".json", ".other"
_ROOMS = ("kernels", "models", "worker")  # code in these packages affects results


class KeptFingerprints:
    """A directory with one JSON file per engine. Only the newest `MAX_FILES` files are kept.

    `<key>.json` has the expected fingerprint, `<key>.other` that of the last refused start.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def check(self, engine: Mapping[str, Any], found: EngineFingerprint) -> None:
        """Compare `found` with the stored fingerprint. At the engine's first start, store `found`.

        engine: plain data about everything that affects results. Raises `FingerprintError` if a checksum differs,
        unless another process was refused with the same fingerprint before: then `found` replaces the stored
        fingerprint. An unusable directory only causes a warning.
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
        different = found.differences(kept.fingerprint)
        if not different:
            _remove(path.with_suffix(_OTHER_SUFFIX))
            return
        values = _describe(different, found, kept.fingerprint)
        if not self._outvotes(path, engine, found):
            raise FingerprintError(_refusal(values, path))
        logger.error(
            "this start and the previous one computed different numbers from an earlier one: %s. They replace its "
            "numbers in %s: the earlier start was faulty, or files were damaged later. Compare the checkpoint with "
            "its source",
            values,
            path,
        )

    def _outvotes(self, path: Path, engine: Mapping[str, Any], found: EngineFingerprint) -> bool:
        other_path = path.with_suffix(_OTHER_SUFFIX)
        try:
            other = _read(other_path)
            if other is None or other.process == _process(os.getpid()) or found.differences(other.fingerprint):
                _write(other_path, engine, found)
                return False
            self._keep(path, engine, found)
        except OSError as error:
            logger.warning("%s cannot be used: %s", other_path, error)
            return False
        return True

    def path(self, engine: Mapping[str, Any]) -> Path:
        """Return an engine's file."""
        return self.directory / f"{_digest(json.dumps(engine, sort_keys=True))}{_SUFFIX}"

    def _keep(self, path: Path, engine: Mapping[str, Any], found: EngineFingerprint) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        _write(path, engine, found)
        _remove(path.with_suffix(_OTHER_SUFFIX))
        files = sorted(self.directory.glob(f"*{_SUFFIX}"), key=_age)
        for old in files[:-MAX_FILES]:
            _remove(old)
            _remove(old.with_suffix(_OTHER_SUFFIX))


@dataclass(frozen=True, slots=True)
class _Kept:
    fingerprint: EngineFingerprint
    process: str


def describe_installation() -> dict[str, str]:
    """Describe the processor, libraries and code."""
    from octavo import _kernels  # noqa: PLC0415

    root = Path(octavo.__file__).parent
    files = [Path(_kernels.__file__), *(path for room in _ROOMS for path in sorted((root / room).rglob("*.py")))]
    return {
        "processor": f"{processor_name()}, {_digest(json.dumps(processor_identity()))}",
        "instruction_sets": " ".join(_kernels.instruction_sets()),
        "octavo": octavo.__version__,
        "torch": f"{torch.__version__} on {torch.backends.cpu.get_cpu_capability()}",
        "code": _digest(json.dumps([_content(path) for path in files])),
    }


def describe_model(
    weights: WeightSource, architecture: Architecture, hashes: FileHashes, seed: int | None = None
) -> dict[str, Any]:
    """Describe everything that affects a model's results. seed: for random weights. Raises `OSError`.

    Weights are not read: files are described by their hashes in `hashes`, or else by path and state.
    """
    files = [] if seed is not None else [_hash_or_state(path, hashes) for path in weights.weight_files()]
    configs = [_content(path) for path in weights.config_files()]
    return {"configs": configs, "weights": files, "seed": seed, "architecture": _digest(repr(architecture))}


def _hash_or_state(path: Path, hashes: FileHashes) -> list[str | int]:
    state = FileState.of(path)
    known = hashes.known(path, state)
    return [path.name, known] if known is not None else [str(path.resolve()), *asdict(state).values()]


def _content(path: Path) -> list[str]:
    return [path.name, hashlib.blake2b(path.read_bytes(), digest_size=12).hexdigest()]


def _read(path: Path) -> _Kept | None:
    try:
        values = json.loads(path.read_bytes())
        if values["digest"] == _digest(json.dumps(values["fingerprint"])):
            return _Kept(EngineFingerprint(**values["fingerprint"]), str(values["process"]))
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):
        pass
    logger.warning("%s is damaged: the fingerprint of this start replaces it", path)
    return None


def _write(path: Path, engine: Mapping[str, Any], found: EngineFingerprint) -> None:
    values = asdict(found)
    kept = {
        "engine": dict(engine),
        "fingerprint": values,
        "digest": _digest(json.dumps(values)),
        "process": _process(os.getpid()),
    }
    with written_whole(path) as file:
        file.write(json.dumps(kept, indent=1).encode())


def _remove(path: Path) -> None:
    with suppress(OSError):
        path.unlink()


@cache
def _process(pid: int) -> str:
    return f"{pid}-{secrets.token_hex(8)}"  # pids repeat in containers


def _describe(different: Iterable[str], found: EngineFingerprint, kept: EngineFingerprint) -> str:
    return "; ".join(f"{name} {getattr(kept, name)} then, {getattr(found, name)} now" for name in different)


def _refusal(values: str, path: Path) -> str:
    return (
        "this start computed different numbers from an earlier one with the same files, kernels and processor: "
        f"{values}. Restart. If the next start agrees with the earlier one, this start was faulty: check the memory "
        "and the processor with `octavo doctor`. If it agrees with this one, it is accepted and logs an error: "
        "the earlier start was faulty, or files were damaged since. Then compare the checkpoint with its source and "
        f"remove {path.parent.parent / 'packed'} and {path}"
    )


def _age(path: Path) -> float:
    with suppress(OSError):
        return path.stat().st_mtime
    return 0.0


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
