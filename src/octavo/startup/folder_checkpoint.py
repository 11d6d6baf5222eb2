"""A checkpoint in Hugging Face's layout."""

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
    """An `octavo.startup.checkpoint.Checkpoint` of a folder."""

    __slots__ = ("path", "weights")

    def __init__(self, path: Path) -> None:
        self.path = path
        self.weights = FolderWeights(path)

    def read_config(self) -> dict[str, Any]:
        """Read config.json; {} if it does not exist."""
        return read_json_object(self.path / "config.json")

    def read_architecture(self) -> Architecture:
        """Read config.json by the rules of its family."""
        return read_architecture(self.path)

    def check_tokenizer(self) -> None:
        """Raise without a tokenizer.json."""
        Tokenizer.check_directory(self.path)

    def read_tokenizer(self) -> Tokenizer:
        """Read tokenizer.json and related files."""
        return Tokenizer.from_directory(self.path)

    def stored_tokenizer(self) -> bytes | None:
        """Return the bytes of tokenizer.json, if it exists."""
        path = self.path / "tokenizer.json"
        return path.read_bytes() if path.is_file() else None

    def read_chat_template(self, special_tokens: Mapping[str, str]) -> ChatTemplate | None:
        """Read chat_template.jinja, or the template in tokenizer_config.json."""
        return ChatTemplate.from_directory(self.path, special_tokens)

    def read_generation_defaults(self) -> GenerationDefaults:
        """Read generation_config.json."""
        return read_generation_defaults(self.path)

    def read_embedding_config(self) -> EmbeddingConfig:
        """Read modules.json and the modules' folders."""
        return read_embedding_config(self.path)
