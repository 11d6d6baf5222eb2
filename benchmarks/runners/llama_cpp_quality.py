"""llama.cpp's side of benchmarks/perplexity.py, in an environment that has llama-cpp-python and numpy.

Reads one line of JSON: {"gguf", "ftype", "home", "threads", "pieces", "prompt", "stream_tokens"}; pieces and prompt are
token ids. Makes a copy of the GGUF file in that format (by way of float32, whatever it is in) under `home`, unless it
is there, and writes one line of JSON: {"path", "bytes", "losses", "rates"}. ftype null: the file as it is. rates are
tokens a second of the prompt and of one stream behind it; none without a prompt.
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
    """Return the file in a format; made through float32, so that nothing of the format it came in is kept."""
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
    """Return what has llama.cpp round every layer to MXFP4: left alone it does so to experts, and the rest to Q8_0."""
    overrides = (llama_cpp.llama_model_tensor_override * 3)()
    for override, pattern in zip(overrides, (rb"attn_.*\.weight", rb"ffn_.*\.weight"), strict=False):
        override.pattern, override.type = pattern, _MXFP4  # the last one, empty, ends them
    return overrides


def loss(llama: llama_cpp.Llama, piece: list[int]) -> float:
    """Return the mean of -log p(token) over the tokens behind the first one."""
    llama.reset()
    llama.eval(piece)
    losses = []
    for logits, token in zip(llama.scores, piece[1:], strict=False):  # a row at a time: they are 512 MB of Gemma's
        shifted = logits - logits.max()
        losses.append(np.log(np.exp(shifted).sum(dtype=np.float64)) - shifted[token])
    return float(np.mean(losses))


def speeds(llama: llama_cpp.Llama, prompt: list[int], stream_tokens: int) -> tuple[float, float]:
    """Return tokens a second of a prompt and of one greedy stream behind 32 of its tokens."""
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
    """Keep a line for each tensor out of what is printed."""


def main() -> None:
    """Answer one line of standard input."""
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
