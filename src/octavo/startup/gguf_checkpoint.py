"""GGUF checkpoints."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from octavo.engine.chat_template import ChatTemplate
from octavo.engine.embedding_config import EmbeddingConfig
from octavo.engine.generation_config import GenerationDefaults
from octavo.engine.gguf_tokenizer import GGUFVocabulary
from octavo.errors import ModelError
from octavo.models.config_file import ConfigFile
from octavo.models.gguf_config import read_gguf_config
from octavo.models.gguf_file import GGUFFile
from octavo.models.gguf_weights import GGUFWeights
from octavo.models.registry import architecture_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from octavo.engine.tokenizer import Tokenizer
    from octavo.models.architecture import Architecture

_TEMPLATE = "tokenizer.chat_template"
_SAMPLING_KEYS = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
_POOLING = {0: "last", 1: "mean", 3: "last"}  # llama.cpp's numbers; 0 means unspecified


class GGUFCheckpoint:
    """The `Checkpoint` of a GGUF file."""

    __slots__ = ("file", "path", "vocabulary", "weights")

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = GGUFFile.read(path)
        self.weights = GGUFWeights(self.file)
        self.vocabulary = GGUFVocabulary(path, self.file.metadata)

    def read_config(self) -> dict[str, Any]:
        """Return the metadata as keys of config.json."""
        return read_gguf_config(self.file, self.weights.architecture, self.weights.family)

    def read_architecture(self) -> Architecture:
        """See `Checkpoint`."""
        config = self.read_config()
        if config["vocab_size"] < self.vocabulary.size:
            raise ModelError(
                f"{self.path}: tokenizer.ggml.tokens has {self.vocabulary.size} tokens, but the embedding has only "
                f"{config['vocab_size']} rows"
            )
        return replace(architecture_of(ConfigFile(self.path, config)), block_bytes=self.weights.block_bytes())

    def check_tokenizer(self) -> None:
        """See `Checkpoint`."""
        self.vocabulary.check()

    def read_tokenizer(self) -> Tokenizer:
        """See `Checkpoint`."""
        return self.vocabulary.build()

    def stored_tokenizer(self) -> bytes | None:
        """See `Checkpoint`."""
        said = sorted((key, value) for key, value in self.file.metadata.items() if key.startswith("tokenizer.ggml."))
        return hashlib.sha256(repr(said).encode()).digest()

    def read_chat_template(self, special_tokens: Mapping[str, str]) -> ChatTemplate | None:
        """See `Checkpoint`."""
        texts = {
            key.removeprefix(_TEMPLATE).removeprefix(".") or "default": value
            for key, value in self.file.metadata.items()
            if key == _TEMPLATE or key.startswith(f"{_TEMPLATE}.")
        }
        for name, text in texts.items():
            if not isinstance(text, str):
                raise ModelError(f"{self.path}: {_TEMPLATE} ({name}) must be a string")
        return ChatTemplate({name: str(text) for name, text in texts.items()}, special_tokens) if texts else None

    def read_generation_defaults(self) -> GenerationDefaults:
        """See `Checkpoint`."""
        fields = ConfigFile(self.path, self.file.metadata, "")
        sampling: dict[str, float | int] = {}
        for key, name in _SAMPLING_KEYS.items():
            full = f"general.sampling.{key}"
            if fields.has(full):
                value = fields.number(full, above=-1.0)
                sampling[name] = int(value) if name == "top_k" else value
        return GenerationDefaults(sampling, self.vocabulary.eos_token_ids(), self.path)

    def read_embedding_config(self) -> EmbeddingConfig:
        """See `Checkpoint`."""
        key = f"{self.weights.architecture}.pooling_type"
        kind = self.file.metadata.get(key, 0)
        if not isinstance(kind, int) or kind not in _POOLING:
            return EmbeddingConfig(problem=f"{key} = {kind!r}; octavo supports only last and mean")
        return EmbeddingConfig(_POOLING[kind])
