"""Attention by libraries that are installed beside octavo: their errors, and their times beside octavo's own."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from gpu_correctness import attention_error
from gpu_device import AttentionCase
from gpu_engine import free, make_engine, random_model
from gpu_speed import HEAD_DIM, HEADS, KV_HEADS

from octavo import SamplingParams
from octavo.errors import ConfigError
from octavo.kernels import create_kernels

if TYPE_CHECKING:
    from gpu_device import Check, Entries

    from octavo.kernels import Kernels

BACKENDS = ("flashinfer-inexact", "flash-attn-3-inexact")
LEAST_ALIKE = 0.9  # of the first tokens: later ones stand behind others where two were as likely


def plugins(check: Check, entries: Entries) -> None:
    """Find, for each library, its error in units of the last place, and octavo's time over its own."""
    for backend in BACKENDS:
        try:
            kernels: Any = create_kernels(check.device, backend)
        except ConfigError as error:  # it is not installed, or does not serve this device
            entries.add(backend, partial(dict, left_out=str(error)))
            continue
        for dtype in (torch.float16, torch.bfloat16):
            for case in dict.fromkeys(_with_floats(each) for each in check.sizes.attention):
                if kernels.covers(case.head_dim, dtype):
                    name = f"{backend} {case.name(dtype)}"
                    entries.add(name, partial(attention_error, check, kernels, dtype, case))
        for count, context in check.sizes.decodes:
            spans = [(context - 1, context)] * count
            entries.add(f"{backend} decode {count} at {context}", partial(_ratio, check, kernels, spans))
        for tokens, context in check.sizes.prefills:
            spans = [(context - tokens, context)]
            entries.add(f"{backend} prefill {tokens} to {context}", partial(_ratio, check, kernels, spans))
        entries.add(f"{backend} engine", partial(_engine, check, backend))


def _with_floats(case: AttentionCase) -> AttentionCase:
    """Return the same attention over keys and values of the activations' dtype."""
    return AttentionCase(case.group, case.head_dim, case.window, case.softcap)


def _ratio(check: Check, library: Kernels, spans: list[tuple[int, int]]) -> dict[str, float]:
    """Time attention of one layer by both. FlashInfer's plan, once a step, is not in it."""
    tables = check.tables(len(spans), max(last for _, last in spans))
    head_dim = 64 if check.is_dry else HEAD_DIM
    caches = check.caches(tables.numel(), KV_HEADS, head_dim, torch.bfloat16)
    batch = check.batch(spans, tables)
    q = check.random(len(batch.positions), HEADS, head_dim)
    own, other = (
        check.seconds(partial(kernels.paged_attention, q, *caches, batch, head_dim**-0.5, None))
        for kernels in (check.kernels, library)
    )
    return {"us": other * 1e6, "us_octavo": own * 1e6, "octavo_over_library": own / other}


def _engine(check: Check, backend: str) -> dict[str, Any]:
    """Answer requests at once with octavo's attention and with the library's: how alike, and how fast."""
    rng, count = random.Random(3), check.sizes.requests_at_once
    longest = min(check.sizes.longest_prompt, 512)
    prompts = [[rng.randrange(5, 200) for _ in range(rng.randint(1, longest))] for _ in range(count)]
    params = SamplingParams(temperature=0.0, max_tokens=check.sizes.new_tokens, ignore_eos=True, detokenize=False)
    tokens, rates = [], []
    for kernels in ("triton", backend):
        free()
        engine = make_engine(check, replace(random_model(check), dtype="bfloat16"), kernels=kernels)
        start = time.perf_counter()
        outputs = engine.generate_batch([{"prompt_token_ids": prompt} for prompt in prompts], params)
        rates.append(count * check.sizes.new_tokens / (time.perf_counter() - start))
        tokens.append([list(each.outputs[0].token_ids) for each in outputs.values()])
        engine.shutdown()
    alike = sum(one[0] == other[0] for one, other in zip(*tokens, strict=True)) / count
    rated = {"output_tok_per_s": rates[1], "octavo_over_library": rates[0] / rates[1]}
    return {"first_tokens_alike": alike, "is_right": alike >= LEAST_ALIKE} | rated
