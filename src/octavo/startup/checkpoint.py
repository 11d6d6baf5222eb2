"""What octavo asks of a checkpoint, whatever holds it: its configuration, weights, tokenizer, template and defaults."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from octavo.assets import built_in_path
from octavo.config.environment import explain_undecodable
from octavo.errors import ModelError
from octavo.models.gguf_file import check_piece
from octavo.models.model_path import resolve_model_path
from octavo.models.weight_files import some
from octavo.startup.folder_checkpoint import FolderCheckpoint
from octavo.startup.gguf_checkpoint import GGUFCheckpoint

if TYPE_CHECKING:
    from collections.abc import Mapping

    from octavo.engine.chat_template import ChatTemplate
    from octavo.engine.embedding_config import EmbeddingConfig
    from octavo.engine.generation_config import GenerationDefaults
    from octavo.engine.tokenizer import Tokenizer
    from octavo.models.architecture import Architecture
    from octavo.models.weight_source import WeightSource


class Checkpoint(Protocol):
    """A model as its files describe it. Each method reads, and raises `ModelError` for what is missing or broken."""

    @property
    def path(self) -> Path:
        """Where it is: what a process that is to open the same one is told."""
        ...

    @property
    def weights(self) -> WeightSource:
        """The weights, not opened."""
        ...

    def read_config(self) -> dict[str, Any]:
        """Return the keys of config.json, as they stand there."""
        ...

    def read_architecture(self) -> Architecture:
        """Return what the model computes."""
        ...

    def check_tokenizer(self) -> None:
        """Raise what `read_tokenizer` would, as far as that can be seen at once: before anything is loaded."""
        ...

    def read_tokenizer(self) -> Tokenizer:
        """Return the tokenizer."""
        ...

    def stored_tokenizer(self) -> bytes | None:
        """Return what the tokenizer is made of, or None where there is none: of equal bytes it is the same."""
        ...

    def read_chat_template(self, special_tokens: Mapping[str, str]) -> ChatTemplate | None:
        """Return the chat template, or None where there is none; special_tokens: those of the tokenizer."""
        ...

    def read_generation_defaults(self) -> GenerationDefaults:
        """Return how its makers sample, and where sequences end."""
        ...

    def read_embedding_config(self) -> EmbeddingConfig:
        """Return how it makes embeddings."""
        ...


def open_checkpoint(model: str | Path, *, weights: bool = True) -> Checkpoint:
    """Find a checkpoint by its path, hub id or the name of a built-in one; a file is a GGUF file. Raises `ModelError`.

    weights: False where only what stands beside them is read; then they are not downloaded.
    """
    model = built_in_path(str(model)) or model
    if problem := explain_undecodable(str(model)):
        raise ModelError(f"the model's path {problem}")
    path = Path(model).expanduser()
    check_piece(path)
    if path.is_file():
        return GGUFCheckpoint(path)
    if path.is_dir() and not (path / "config.json").exists() and (files := sorted(path.glob("*.gguf"))):
        raise ModelError(f"{path} is a folder of GGUF files; name one of them: {some([str(each) for each in files])}")
    return FolderCheckpoint(resolve_model_path(model, weights=weights))
