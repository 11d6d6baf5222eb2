"""Finds a draft model's checkpoint and checks that it fits the target."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from octavo.config import WEIGHT_BITS
from octavo.errors import ConfigError, ModelError
from octavo.models.draft_checkpoint import DraftCheckpoint
from octavo.models.weight_bytes import weight_bytes
from octavo.startup.checkpoint import open_checkpoint

if TYPE_CHECKING:
    from octavo.config import ModelConfig, SpeculativeConfig
    from octavo.models.architecture import Architecture
    from octavo.startup.checkpoint import Checkpoint
    from octavo.startup.launch import ServedModel

logger = logging.getLogger(__name__)

_WORTHWHILE_SHARE = 0.8  # of the model's bytes. A larger draft model is hardly faster


def find_draft_checkpoint(
    speculative: SpeculativeConfig | None, config: ModelConfig, target: ServedModel
) -> DraftCheckpoint | None:
    """Return the draft model's checkpoint, or None. config: of the target model. Raises `ConfigError`."""
    if speculative is None or not speculative.drafts_by_model:
        return None
    if speculative.model is None:
        return _rounded(config, target, speculative.quantization or "int4")
    name, weights = speculative.model, config.load_format != "dummy"
    try:
        checkpoint = open_checkpoint(name, weights=weights)
        architecture = checkpoint.read_architecture()
    except ModelError as error:
        raise ConfigError(f"model of speculative_config: {error}") from error
    _check_shapes(name, architecture, target.architecture)
    if not config.skip_tokenizer_init:
        _check_tokenizer(name, checkpoint, target.text)
    longest = min(architecture.max_context_tokens, target.max_model_len)
    if longest < target.max_model_len:
        logger.warning(
            "%s was made for %d positions, fewer than the %d of the model: no tokens are drafted in longer texts",
            name,
            longest,
            target.max_model_len,
        )
    return DraftCheckpoint(
        name=name,
        weights=checkpoint.weights,
        architecture=architecture,
        quantization=speculative.quantization,
        max_model_len=longest,
        shares_kv=False,
    )


def _rounded(config: ModelConfig, target: ServedModel, quantization: str) -> DraftCheckpoint:
    """Return the target in fewer bits."""
    stored = target.architecture.stored
    if stored is not None:
        raise ConfigError(
            f"method quantized needs weights that are not quantized, but {target.checkpoint.path} has integers of "
            f"{stored.bits} bits; use another method of speculative_config"
        )
    floats = target.architecture.stored_floats
    if quantization == "fp8" and config.quantization is None and floats is not None and floats.bits == 8:
        raise ConfigError(
            f"method quantized drafts with the model's weights in fp8, but those of {target.checkpoint.path} are FP8 "
            "already; use int4, or another method of speculative_config"
        )
    if WEIGHT_BITS[config.quantization] <= WEIGHT_BITS[quantization]:
        raise ConfigError(
            f"method quantized drafts with the model's weights in {quantization}, but the model itself is loaded in "
            f"{config.quantization}, so a draft would take as long as a token; use another method of "
            "speculative_config"
        )
    architecture = target.architecture
    if architecture.block_bytes and config.quantization is None:
        as_it_is, rounded = (
            weight_bytes(architecture, architecture.dtype, quantization=each) for each in (None, quantization)
        )
        if rounded > _WORTHWHILE_SHARE * as_it_is:
            raise ConfigError(
                f"method quantized drafts with the model's weights in {quantization}, but {target.checkpoint.path} "
                f"is hardly larger without it: {rounded / 1e6:.0f} of {as_it_is / 1e6:.0f} MB; use another method of "
                "speculative_config"
            )
    return DraftCheckpoint(
        name=f"the model itself in {quantization}",
        weights=target.checkpoint.weights,
        architecture=target.architecture,
        quantization=quantization,
        max_model_len=target.max_model_len,
        shares_kv=True,
    )


def _check_shapes(name: str, draft: Architecture, target: Architecture) -> None:
    if not draft.has_head:
        raise ConfigError(f"model of speculative_config: {name} computes embeddings, not tokens (it has no lm_head)")
    if draft.kv_layout.states:
        raise ConfigError(
            f"model of speculative_config: {name} has recurrent layers, and octavo cannot draft with them yet"
        )
    if draft.vocab_size != target.vocab_size:
        raise ConfigError(
            f"model of speculative_config: {name} has a vocabulary of {draft.vocab_size:,} tokens, but the model has "
            "one of "
            f"{target.vocab_size:,}; both must be equal"
        )
    if draft.num_position_dims != target.num_position_dims:
        raise ConfigError(
            f"model of speculative_config: positions of {name} have {draft.num_position_dims} dimensions, but those "
            f"of the model have {target.num_position_dims}"
        )
    if draft.num_parameters > target.num_parameters:
        raise ConfigError(
            f"model of speculative_config: {name} has {draft.num_parameters:,} parameters, more than the model's "
            f"{target.num_parameters:,}; a draft model must be smaller"
        )


def _check_tokenizer(name: str, draft: Checkpoint, target: Checkpoint) -> None:
    stored = draft.stored_tokenizer()
    if stored is None:
        logger.warning("%s has no tokenizer: it is assumed to use the model's tokens", name)
        return
    if stored == target.stored_tokenizer():
        return
    draft_vocab, target_vocab = (each.read_tokenizer().backend.get_vocab() for each in (draft, target))
    for token, number in target_vocab.items():
        # Converters to GGUF give unused ids the token [PADn]. No text produces these tokens.
        if draft_vocab.get(token) != number and (token in draft_vocab or token != f"[PAD{number}]"):
            there = f"number {draft_vocab[token]}" if token in draft_vocab else "no token"
            raise ConfigError(
                f"model of speculative_config: {name} has another vocabulary: token {number} of the model, {token!r}, "
                f"is {there} in it; both must be equal"
            )
