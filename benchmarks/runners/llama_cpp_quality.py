"""llama.cpp's side of benchmarks/perplexity.py, in an environment that has llama-cpp-python and numpy.

Reads one line of JSON: {"gguf", "ftype", "home", "threads", "pieces", "prompt", "stream_tokens"}; pieces and prompt are
token ids. Makes a copy of the GGUF file in that format (by way of float32, whatever it is in) under `home`, unless it
is there, and writes one line of JSON: {"bytes", "losses", "prompt_tokens_per_s", "stream_tokens_per_s"}.
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

FTYPES = {
    "BF16": llama_cpp.LLAMA_FTYPE_MOSTLY_BF16,
    "Q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0,
    "Q6_K": llama_cpp.LLAMA_FTYPE_MOSTLY_Q6_K,
    "Q5_K_M": llama_cpp.LLAMA_FTYPE_MOSTLY_Q5_K_M,
    "Q5_1": llama_cpp.LLAMA_FTYPE_MOSTLY_Q5_1,
    "Q5_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q5_0,
    "Q4_1": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_1,
    "Q4_K_M": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M,
    "Q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0,
}


def converted(gguf: Path, ftype: str, home: Path) -> Path:
    """Return the file in a format; made through float32, so that nothing of the format it came in is kept."""
    source, target = home / f"{gguf.stem}.F32.gguf", home / f"{gguf.stem}.{ftype}.gguf"
    for path, origin, kind in ((source, gguf, llama_cpp.LLAMA_FTYPE_ALL_F32), (target, source, FTYPES[ftype])):
        if not path.exists():
            params = llama_cpp.llama_model_quantize_default_params()
            params.ftype, params.allow_requantize, params.nthread = kind, True, 2
            if llama_cpp.llama_model_quantize(str(origin).encode(), str(path).encode(), ctypes.byref(params)):
                path.unlink(missing_ok=True)
                raise SystemExit(f"llama.cpp could not write {path}")
    return target


def loss(llama: llama_cpp.Llama, piece: list[int]) -> float:
    """Return the mean of -log p(token) over the tokens behind the first one."""
    llama.reset()
    llama.eval(piece)
    logits = np.asarray(llama.scores[: len(piece) - 1], dtype=np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    chosen = logits[np.arange(len(piece) - 1), piece[1:]]
    return float(np.mean(np.log(np.exp(logits).sum(axis=1)) - chosen))


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


def main() -> None:
    """Answer one line of standard input."""
    job: dict[str, Any] = json.loads(sys.stdin.readline())
    path = converted(Path(job["gguf"]), job["ftype"], Path(job["home"]))
    options = {"n_threads": job["threads"], "n_threads_batch": job["threads"], "verbose": False}
    losses = []
    if job["pieces"]:
        scored = llama_cpp.Llama(str(path), n_ctx=max(map(len, job["pieces"])) + 8, logits_all=True, **options)
        losses = [loss(scored, piece) for piece in job["pieces"]]
        scored.close()
    llama = llama_cpp.Llama(str(path), n_ctx=len(job["prompt"]) + 128, n_batch=2048, n_ubatch=512, **options)
    prompt, stream = speeds(llama, job["prompt"], job["stream_tokens"])
    answer = {"bytes": path.stat().st_size, "losses": losses}
    print(json.dumps({**answer, "prompt_tokens_per_s": prompt, "stream_tokens_per_s": stream}))


if __name__ == "__main__":
    main()
