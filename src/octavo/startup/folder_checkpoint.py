"""Hugging Face checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from octavo.engine.chat_template import ChatTemplate
from octavo.engine.embedding_config import EmbeddingConfig, read_embedding_config
from octavo.engine.generation_config import GenerationDefaults, read_generation_defaults, read_json_object
from octavo.engine.tokenizer import Tokenizer
from octavo.models.registry import read_architecture
from octavo.models.weight_source import FolderWeights

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from octavo.models.architecture import Architecture


class FolderCheckpoint:
    """The `Checkpoint` of a folder."""

    __slots__ = ("path", "weights")

    def __init__(self, path: Path) -> None:
        self.path = path
        self.weights = FolderWeights(path)

    def read_config(self) -> dict[str, Any]:
        """Read config.json, or return {} if missing."""
        return read_json_object(self.path / "config.json")

    def read_architecture(self) -> Architecture:
        """See `Checkpoint`."""
        return read_architecture(self.path)

    def check_tokenizer(self) -> None:
        """See `Checkpoint`."""
        Tokenizer.check_directory(self.path)

    def read_tokenizer(self) -> Tokenizer:
        """See `Checkpoint`."""
        return Tokenizer.from_directory(self.path)

    def stored_tokenizer(self) -> bytes | None:
        """See `Checkpoint`."""
        path = self.path / "tokenizer.json"
        return path.read_bytes() if path.is_file() else None

    def read_chat_template(self, special_tokens: Mapping[str, str]) -> ChatTemplate | None:
        """See `Checkpoint`."""
        return ChatTemplate.from_directory(self.path, special_tokens)

    def read_generation_defaults(self) -> GenerationDefaults:
        """See `Checkpoint`."""
        return read_generation_defaults(self.path)

    def read_embedding_config(self) -> EmbeddingConfig:
        """See `Checkpoint`."""
        return read_embedding_config(self.path)
