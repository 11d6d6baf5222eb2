"""Interface of checkpoints."""

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
    """A model as its files describe it. Methods read files and raise `ModelError`."""

    @property
    def path(self) -> Path:
        """The path for another process."""
        ...

    @property
    def weights(self) -> WeightSource:
        """Return unopened weights."""
        ...

    def read_config(self) -> dict[str, Any]:
        """Read config.json."""
        ...

    def read_architecture(self) -> Architecture:
        """Read the architecture."""
        ...

    def check_tokenizer(self) -> None:
        """Raise errors of `read_tokenizer` that are found quickly."""
        ...

    def read_tokenizer(self) -> Tokenizer:
        """Return the tokenizer."""
        ...

    def stored_tokenizer(self) -> bytes | None:
        """Return bytes that identify the tokenizer, or None."""
        ...

    def read_chat_template(self, special_tokens: Mapping[str, str]) -> ChatTemplate | None:
        """Return the chat template, or None."""
        ...

    def read_generation_defaults(self) -> GenerationDefaults:
        """Return sampling defaults and EOS ids."""
        ...

    def read_embedding_config(self) -> EmbeddingConfig:
        """Return how embeddings are computed."""
        ...


def open_checkpoint(model: str | Path, *, weights: bool = True) -> Checkpoint:
    """Open a model by its path, hub id or built-in name. A file is read as GGUF. weights: False to download none."""
    model = built_in_path(str(model)) or model
    if problem := explain_undecodable(str(model)):
        raise ModelError(f"the model's path {problem}")
    path = Path(model).expanduser()
    check_piece(path)
    if path.is_file():
        return GGUFCheckpoint(path)
    if path.is_dir() and not (path / "config.json").exists() and (files := sorted(path.glob("*.gguf"))):
        raise ModelError(
            f"{path} is a directory of GGUF files; give the path of one of them: {some([str(each) for each in files])}"
        )
    return FolderCheckpoint(resolve_model_path(model, weights=weights))
