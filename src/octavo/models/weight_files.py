"""Finds weight files and translates tensor names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.errors import ModelError
from octavo.models.config_file import ConfigFile

if TYPE_CHECKING:
    from collections.abc import Iterable

BARE_EMBEDDING = "embed_tokens.weight"  # exists if names lack "model."
# Prefixes of the text part, which transformers writes in either order.
_TEXT_PART = re.compile(r"^language_model\.(?=(?:model|lm_head)\.)|(?<=^model\.)language_model\.")
_OTHER_PARTS = re.compile(
    r"(model\.)?(vision_tower|audio_tower|vision_embedder|embed_vision|embed_audio|multi_modal_projector|visual)\."
)
_MIXTRAL = re.compile(r"\.block_sparse_moe\.(experts\.\d+\.)?(gate|w1|w2|w3)(?=\.)")
_GRANITE = re.compile(
    r"\.block_sparse_moe\.(input_linear\.weight|output_linear\.weight|router\.layer|router|experts)(?=\.|$)"
)
_GRANITE_PARTS = {
    "input_linear.weight": "experts.gate_up_proj",
    "output_linear.weight": "experts.down_proj",
    "router.layer": "router",
}
_SHARED = re.compile(r"\.shared_mlp\.(input|output)_linear(?=\.)")
_SHARED_PARTS = {"input": "gate_up_proj", "output": "down_proj"}
_GEMMA = re.compile(r"(\.layers\.\d+)\.(router|experts)(?:\.proj(?=\.))?(?=\.)")
# One sublayer per layer, and names of a backbone.
_OUTSIDE = re.compile(r"^(?:backbone|model)\.(embeddings|norm_f)(?=\.)")
_OUTSIDE_PARTS = {"embeddings": "embed_tokens", "norm_f": "norm"}
_MIXER = re.compile(r"^(?:backbone|model)(\.layers\.(?:\d+|\*)\.)(?:mixer\.(\w+)|norm)(?=\.|$)")
_MIXER_PARTS = dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), "self_attn") | dict.fromkeys(
    ("up_proj", "down_proj", "gate", "experts", "shared_experts", "fc1_latent_proj", "fc2_latent_proj"), "mlp"
)
_MIXTRAL_PARTS = {"gate": "gate", "w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
# Parts of LFM2's names and what replaces them, in this order.
LFM2_PARTS = {
    "model.embedding_norm.": "model.norm.",
    ".operator_norm.": ".input_layernorm.",
    ".ffn_norm.": ".post_attention_layernorm.",
    ".self_attn.out_proj.": ".self_attn.o_proj.",
    ".self_attn.q_layernorm.": ".self_attn.q_norm.",
    ".self_attn.k_layernorm.": ".self_attn.k_norm.",
    ".feed_forward.expert_bias": ".mlp.gate.e_score_correction_bias",
    ".feed_forward.": ".mlp.",
    ".w1.": ".gate_proj.",
    ".w2.": ".down_proj.",
    ".w3.": ".up_proj.",
}
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def find_weight_files(directory: Path) -> list[Path]:
    """Return model.safetensors, otherwise the index's files, otherwise all safetensors files."""
    single = directory / "model.safetensors"
    if single.is_file():
        return [single]
    index_path = directory / "model.safetensors.index.json"
    if index_path.is_file():
        return _indexed_files(index_path)
    if found := sorted(directory.glob("*.safetensors")):
        return found
    pickles = sorted(path.name for pattern in _PICKLES for path in directory.glob(pattern))
    if pickles:
        raise ModelError(
            f"{directory} has its weights only as {some(pickles)}; octavo reads only safetensors, because a pickle "
            "can run code when it is loaded. Convert it with transformers: from_pretrained(...).save_pretrained(...)"
        )
    raise ModelError(
        f"{directory} holds no *.safetensors weights; download the checkpoint again, or give a GGUF file's path"
    )


def _indexed_files(index_path: Path) -> list[Path]:
    index = ConfigFile.read(index_path)
    weight_map = index.section("weight_map")
    if weight_map is None or not all(isinstance(name, str) for name in weight_map.values.values()):
        raise index.error("weight_map", "must map tensor names to file names")
    names = sorted(set(weight_map.values.values()))
    for name in names:
        if Path(name).name != name:
            raise ModelError(f"{index_path}: {name!r} is not a plain file name")
        if not (index_path.parent / name).is_file():
            raise ModelError(f"{index_path.parent}: {name} is missing, one of {len(names)} files in {index_path.name}")
    return [index_path.parent / name for name in names]


def stored_names(directory: Path) -> set[str]:
    """Return the names of all tensors. Return nothing for broken files, which fail to load."""
    from safetensors import SafetensorError, safe_open  # noqa: PLC0415

    names: set[str] = set()
    try:
        for path in find_weight_files(directory):
            with safe_open(path, framework="numpy") as file:
                names.update(file.keys())
    except (ModelError, SafetensorError, OSError):
        return set()
    return names


def was_saved_without_head(directory: Path) -> bool:
    """Return True for an embedding model (names without `model.`, or a modules.json) without lm_head.

    Return False for broken files.
    """
    names = stored_names(directory)
    if not names:
        return False
    is_for_embeddings = BARE_EMBEDDING in names or (directory / "modules.json").is_file()
    return is_for_embeddings and not any(name.startswith("lm_head.") for name in names)


def some(names: list[str]) -> str:
    """Return three names, and how many follow."""
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def decoder_names(stored: Iterable[str]) -> dict[str, str]:
    """Map a decoder's tensor names to the files' names. Embedding models often lack `model.`."""
    stored = list(stored)
    if BARE_EMBEDDING in stored:
        return {f"model.{name}": name for name in stored}
    return {part_name(_TEXT_PART.sub("", name)): name for name in stored if not _OTHER_PARTS.match(name)}


def part_name(name: str) -> str:
    """Return octavo's name of a layer's tensor or module."""
    if match := _OUTSIDE.match(name):
        return f"model.{_OUTSIDE_PARTS[match[1]]}{name[match.end() :]}"
    if match := _MIXER.match(name):
        part, own = match[2], name[match.end() :]
        kept = "input_layernorm" if part is None else f"{_MIXER_PARTS.get(part, 'mamba')}.{part}"
        return f"model{match[1]}{kept}{own}"
    if match := _MIXTRAL.search(name):
        return name.replace(match[0], f".mlp.{match[1] or ''}{_MIXTRAL_PARTS[match[2]]}")
    if match := _GRANITE.search(name):
        return name.replace(match[0], f".mlp.{_GRANITE_PARTS.get(match[1], match[1])}")
    if match := _SHARED.search(name):
        return name.replace(match[0], f".mlp.{_SHARED_PARTS[match[1]]}")
    name = _GEMMA.sub(r"\1.mlp.\2", name)
    for theirs, ours in LFM2_PARTS.items():
        name = name.replace(theirs, ours)
    return name
