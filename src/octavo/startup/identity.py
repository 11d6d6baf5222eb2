"""Compares fingerprints of an engine's starts, and makes the keys under which engines share KV."""

from __future__ import annotations

import hashlib
import logging
from typing import TYPE_CHECKING, Any

import torch

from octavo import __version__
from octavo.config import cache_directory, kv_secret_from_environment
from octavo.models.packed_cache import HASHES_FILE
from octavo.models.weight_hashes import FileHashes
from octavo.models.weights_identity import WeightsIdentity
from octavo.worker.kept_fingerprints import KeptFingerprints, describe_installation, describe_model

if TYPE_CHECKING:
    from octavo.config import DeviceConfig, EngineConfig, ModelConfig
    from octavo.data.fingerprint import EngineFingerprint
    from octavo.data.worker_info import WorkerInfo
    from octavo.models.draft_checkpoint import DraftCheckpoint
    from octavo.startup.launch import ServedModel

logger = logging.getLogger(__name__)
_SHOWN_KEY = 100


def find_identity(config: ModelConfig, served: ServedModel) -> WeightsIdentity:
    """Return the weights' identity, which a thread computes."""
    seed = config.seed if config.load_format == "dummy" else None
    return WeightsIdentity(served.checkpoint.weights, served.architecture, seed)


def check_fingerprint(
    config: EngineConfig,
    served: ServedModel,
    fingerprint: EngineFingerprint,
    info: WorkerInfo,
    draft: DraftCheckpoint | None,
    dtype: str,
    identity: WeightsIdentity | None,
) -> EngineFingerprint:
    """Compare the fingerprint with those of this engine's earlier starts, and return it.

    identity: hash of the weights, so that copied files are recognized. Nothing is compared if packed_cache_bytes is 0
    or the fingerprint has no checksums. Raises `FingerprintError` if checksums differ, and `ModelError` if weights were
    changed.
    """
    logger.info("fingerprint: %s", fingerprint.summary)
    if not config.model.packed_cache_bytes or not fingerprint.logits:
        return fingerprint
    if identity is not None:
        identity.result()  # stores hashes for `_describe_engine`
    try:
        kept = KeptFingerprints(cache_directory() / "fingerprints")
        engine = _describe_engine(config, served, info, draft, dtype)
    except (OSError, RuntimeError) as error:  # a file was removed, or no home directory exists
        logger.warning("the fingerprint of this start cannot be compared: %s", error)
        return fingerprint
    kept.check(engine, fingerprint)
    return fingerprint


def _describe_engine(
    config: EngineConfig, served: ServedModel, info: WorkerInfo, draft: DraftCheckpoint | None, dtype: str
) -> dict[str, Any]:
    model = config.model
    seed = model.seed if model.load_format == "dummy" else None
    hashes = FileHashes(cache_directory() / "packed" / HASHES_FILE)
    return {
        "model": describe_model(served.checkpoint.weights, served.architecture, hashes, seed),
        "draft": None if draft is None else describe_model(draft.weights, draft.architecture, hashes, seed),
        "formats": [dtype, info.dtype, info.kv_dtype, model.quantization, model.group_size],
        "draft_formats": None if draft is None else [draft.quantization, draft.max_model_len],
        "kernels": [info.kernels, info.kernel_layout],
        "lengths": [served.max_model_len, info.num_warm_up_tokens],
        **describe_installation(),
        **_describe_ranks(config.device),
    }


def _describe_ranks(device: DeviceConfig) -> dict[str, Any]:
    if device.tensor_parallel_size == 1:
        return {}
    by_expert = {"divides_by_expert": True} if device.enable_expert_parallel else {}
    return {"ranks": device.tensor_parallel_size, **by_expert}


def cache_keys(
    config: EngineConfig, info: WorkerInfo, dtype: str, identity: WeightsIdentity | None, fingerprint: EngineFingerprint
) -> tuple[str, ...]:
    """Return descriptions of all that KV depends on, except tokens. Engines share KV only if all are equal.

    identity: hash of the weights, or None if KV stays in this engine.
    """
    model, cache = config.model, config.cache
    keys = [
        f"kv:{info.kv_dtype} in blocks of {cache.block_size}, layout {info.kv_layout_version}",
        f"weights:{dtype} for {info.dtype}, {model.quantization}:{model.group_size}",
        f"kernels:{info.kernels} on {info.device}",
    ]
    if identity is not None:
        secret = hashlib.sha256(kv_secret_from_environment().encode()).hexdigest()
        versions = f"octavo {__version__}, torch {torch.__version__} on {info.machine}"
        keys += [f"model:{identity.result()}", f"versions:{versions}", f"secret:{secret}"]
        keys.append(f"fingerprint:{fingerprint.kv_identity}")
    return tuple(keys)


def kv_format(keys: tuple[str, ...]) -> dict[str, str]:
    """Return the texts of `cache_keys` by name, for a router. Omits the secret, and hashes long texts."""
    values = dict(key.split(":", 1) for key in keys)
    values.pop("secret", None)
    return {
        name: text if len(text) <= _SHOWN_KEY else hashlib.sha256(text.encode()).hexdigest()[:16]
        for name, text in values.items()
    }
