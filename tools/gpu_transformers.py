"""Compare greedy tokens on a device in float32 with those of transformers, for random checkpoints in real layout."""

from __future__ import annotations

import importlib.util
import random
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from gpu_engine import free, generated, make_engine
from gpu_states import FAMILIES as RECURRENT
from gpu_states import recurrent_config

from octavo import SamplingParams
from octavo.config import ModelConfig
from octavo.models.random_weights import tiny_config, write_checkpoint

if TYPE_CHECKING:
    from pathlib import Path

    from gpu_device import Check, Entries

FAMILIES = ("Qwen3ForCausalLM", "LlamaForCausalLM", "Gemma3ForCausalLM", *RECURRENT)
MIN_GAP = 1e-3  # between the two best logits: below it, float32 on a device does not determine which one is larger
_STD = 0.1  # of weights: with a smaller one, tokens often repeat
_WIDER = {
    "vocab_size": 4001, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 6,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
}  # fmt: skip


def transformers(check: Check, entries: Entries) -> None:
    """Check for each family that octavo's tokens are those that transformers chooses after the same tokens."""
    if importlib.util.find_spec("transformers") is None:
        entries.add("transformers", lambda: {"left_out": "it is not installed"})
        return
    for family in FAMILIES[:1] if check.is_dry else FAMILIES:
        entries.add(family, partial(_compare, check, family))


def _compare(check: Check, family: str) -> dict[str, Any]:
    changes: dict[str, Any] = {} if check.is_dry else dict(_WIDER)
    if family.startswith("Gemma3") and changes:
        changes["layer_types"] = ["sliding_attention", "full_attention"] * 3
    config = recurrent_config(check, family) if family in RECURRENT else tiny_config(family, **changes)
    path = write_checkpoint(check.folder / family, config, std=_STD)
    rng, sizes = random.Random(0), check.sizes
    lengths = [1, sizes.longest_prompt, *(rng.randint(1, sizes.longest_prompt) for _ in range(sizes.requests - 2))]
    prompts = [[rng.randrange(config["vocab_size"]) for _ in range(length)] for length in lengths]
    answers = _octavo(check, path, prompts)
    free()
    return compared(_load(check, path), check.device, prompts, answers)


def compared(model: Any, device: torch.device, prompts: list[list[int]], answers: list[list[int]]) -> dict[str, Any]:
    """Check that a model of transformers chooses each token of the answers, and count choices that were too close.

    By induction the answers are then those that it would generate. The rest of an answer after a choice that is too
    close is ignored. If more than one prompt in ten has such a choice, another fault is likely.
    """
    differ, num_close = [], 0
    for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([prompt + answer[:-1]], device=device)).logits[0, len(prompt) - 1 :]
        best = logits.float().topk(2)
        wrong = (best.indices[:, 0].cpu() != torch.tensor(answer)).nonzero()
        if not len(wrong):
            continue
        first = int(wrong[0])
        if float(best.values[first, 0] - best.values[first, 1]) < MIN_GAP:
            num_close += 1
        else:
            differ.append([len(prompt), first, index])
    is_equal = not differ and num_close <= len(prompts) // 10
    told = {"is_equal": is_equal, "num_requests": len(prompts), "num_too_close": num_close}
    return told | ({"differ": differ[:10]} if differ else {})


def _octavo(check: Check, path: Path, prompts: list[list[int]]) -> list[list[int]]:
    """Return the answers of requests that all run at the same time."""
    model = ModelConfig(model=str(path), dtype="float32", skip_tokenizer_init=True)
    engine = make_engine(check, model, kv_bytes=1 << 30, dry_kernels="auto")
    params = SamplingParams(temperature=0.0, max_tokens=check.sizes.new_tokens, ignore_eos=True, detokenize=False)
    answers = generated(engine, prompts, params)
    engine.shutdown()
    return answers


def _load(check: Check, path: Path) -> Any:
    from transformers import AutoModelForCausalLM  # noqa: PLC0415  slow, and it may be missing

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    return model.to(check.device).eval()
