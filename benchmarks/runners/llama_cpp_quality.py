"""The llama.cpp part of benchmarks/perplexity.py, for an environment with llama-cpp-python and numpy.

Reads one line of JSON: {"gguf", "ftype", "home", "threads", "pieces", "prompt", "stream_tokens"}; pieces and prompt are
token ids. Converts the GGUF file to the format (via float32, whatever its format) under `home`, unless that file
exists. Writes one line of JSON: {"path", "bytes", "losses", "rates"}. ftype null: use the original file. rates: tokens
per second of the prompt and of one stream after it; absent without a prompt.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

_FLOATS = {"F32": llama_cpp.LLAMA_FTYPE_ALL_F32, "F16": llama_cpp.LLAMA_FTYPE_MOSTLY_F16}
_MXFP4, _MXFP4_FTYPE = 39, 38  # in ggml.h and llama.h; llama-cpp-python names neither
FTYPES = _FLOATS | {
    "BF16": llama_cpp.LLAMA_FTYPE_MOSTLY_BF16,
    "Q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0,
    "Q6_K": llama_cpp.LLAMA_FTYPE_MOSTLY_Q6_K,
    "Q5_K_M": llama_cpp.LLAMA_FTYPE_MOSTLY_Q5_K_M,
    "Q5_K_S": llama_cpp.LLAMA_FTYPE_MOSTLY_Q5_K_S,
    "Q5_1": llama_cpp.LLAMA_FTYPE_MOSTLY_Q5_1,
    "Q5_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q5_0,
    "Q4_1": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_1,
    "Q4_K_M": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M,
    "Q4_K_S": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_S,
    "Q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0,
    "MXFP4": _MXFP4_FTYPE,
}


def converted(gguf: Path, ftype: str, home: Path) -> Path:
    """Return the file in a format, converted via float32, so that the original format has no influence."""
    source, target = home / f"{gguf.stem}.F32.gguf", home / f"{gguf.stem}.{ftype}.gguf"
    for path, origin, kind in ((source, gguf, llama_cpp.LLAMA_FTYPE_ALL_F32), (target, source, FTYPES[ftype])):
        if not path.exists():
            params = llama_cpp.llama_model_quantize_default_params()
            params.ftype, params.allow_requantize, params.nthread = kind, True, 2
            if kind == _MXFP4_FTYPE:
                params.tt_overrides = dense_in_mxfp4()
            if llama_cpp.llama_model_quantize(str(origin).encode(), str(path).encode(), ctypes.byref(params)):
                path.unlink(missing_ok=True)
                raise SystemExit(f"llama.cpp could not write {path}")
    return target


def dense_in_mxfp4() -> Any:
    """Return overrides with which llama.cpp quantizes every layer to MXFP4, not only experts and the rest to Q8_0."""
    overrides = (llama_cpp.llama_model_tensor_override * 3)()
    for override, pattern in zip(overrides, (rb"attn_.*\.weight", rb"ffn_.*\.weight"), strict=False):
        override.pattern, override.type = pattern, _MXFP4  # an empty entry ends the list
    return overrides


def loss(llama: llama_cpp.Llama, piece: list[int]) -> float:
    """Return the mean of -log p(token) over the tokens after the first one."""
    llama.reset()
    llama.eval(piece)
    losses = []
    for logits, token in zip(llama.scores, piece[1:], strict=False):  # one row at a time: all are 512 MB for Gemma
        shifted = logits - logits.max()
        losses.append(np.log(np.exp(shifted).sum(dtype=np.float64)) - shifted[token])
    return float(np.mean(losses))


def speeds(llama: llama_cpp.Llama, prompt: list[int], stream_tokens: int) -> tuple[float, float]:
    """Return tokens per second of a prompt and of one greedy stream after 32 of its tokens."""
    llama.reset()
    begin = time.perf_counter()
    llama.eval(prompt)
    prompt_s = time.perf_counter() - begin
    llama.reset()
    llama.eval(prompt[:32])
    begin = time.perf_counter()
    for _ in range(stream_tokens - 1):
        llama.eval([int(np.argmax(np.ctypeslib.as_array(llama._ctx.get_logits(), shape=(llama.n_vocab(),))))])  # noqa: SLF001
    return len(prompt) / prompt_s, (stream_tokens - 1) / (time.perf_counter() - begin)


@llama_cpp.llama_log_callback
def say_nothing(_level: int, _text: bytes, _data: object) -> None:
    """Suppress llama.cpp's log, which has a line for each tensor."""


def main() -> None:
    """Process one line of standard input."""
    llama_cpp.llama_log_set(say_nothing, None)
    job: dict[str, Any] = json.loads(sys.stdin.readline())
    gguf = Path(job["gguf"])
    path = gguf if job["ftype"] is None else converted(gguf, job["ftype"], Path(job["home"]))
    options = {"n_threads": job["threads"], "n_threads_batch": job["threads"], "verbose": False}
    losses: list[float] = []
    rates: list[float] = []
    if job["pieces"]:
        scored = llama_cpp.Llama(str(path), n_ctx=max(map(len, job["pieces"])) + 8, logits_all=True, **options)
        losses = [loss(scored, piece) for piece in job["pieces"]]
        scored.close()
    if job["prompt"]:
        llama = llama_cpp.Llama(str(path), n_ctx=len(job["prompt"]) + 128, n_batch=2048, n_ubatch=512, **options)
        rates = list(speeds(llama, job["prompt"], job["stream_tokens"]))
    print(json.dumps({"path": str(path), "bytes": path.stat().st_size, "losses": losses, "rates": rates}))


if __name__ == "__main__":
    main()
