"""Finds checkpoints."""

from __future__ import annotations

import re
from pathlib import Path

from octavo.errors import ModelError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_HUB_FILES = ["*.json", "*.jinja", "additional_chat_templates/*.jinja"]
_WEIGHTS = "*.safetensors"
_HUB_LEFT_OUT = ["consolidated*.safetensors", "*/*.safetensors"]


def resolve_model_path(model: str | Path, revision: str | None = None, *, weights: bool = True) -> Path:
    """Return a checkpoint's directory. A hub id is downloaded unless it is cached. weights: False skips weights."""
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise ModelError(f"{path} is a file; a model is a directory with config.json and *.safetensors, or a GGUF file")
    if not isinstance(model, str) or not _HUB_ID.fullmatch(model):
        raise ModelError(
            f"{path} does not exist; give a directory in Hugging Face layout, a GGUF file or a hub id (owner/name)"
        )
    try:
        from huggingface_hub import snapshot_download  # noqa: PLC0415 - optional
    except ImportError as error:
        raise ModelError(
            f"there is no directory {model!r}; to download it from the Hugging Face hub install huggingface_hub: pip "
            "install 'octavo[hub]'"
        ) from error
    try:
        files = [*_HUB_FILES, _WEIGHTS] if weights else _HUB_FILES
        found = Path(snapshot_download(model, revision=revision, allow_patterns=files, ignore_patterns=_HUB_LEFT_OUT))
    except Exception as error:
        # snapshot_download does not wrap its HTTP client's exceptions.
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"there is no directory {model!r}, and it could not be downloaded from the Hugging Face hub: {reason}"
        ) from error
    if not any((found / name).is_file() for name in ("config.json", "tokenizer.json")):
        raise ModelError(
            f"{model} has neither config.json nor tokenizer.json on the Hugging Face hub; if it has GGUF files, "
            f"download one and give its path: hf download {model} NAME.gguf --local-dir ."
        )
    return found
