"""The engine on a device: equal tokens with and without other requests, throughput, comparison with its peers."""

from __future__ import annotations

import atexit
import gc
import importlib.util
import json
import random
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from gpu_states import FAMILIES, recurrent_model
from make_checkpoint import SHAPES, TOKENIZER_SIZE, train_tokenizer, write_tokenizer

from octavo import LLMEngine, SamplingParams
from octavo.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig
from octavo.models.random_weights import tiny_config, write_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from gpu_device import Check, Entries

    from octavo import RequestOutput
    from octavo.data.events import EventSink

_DRY_SHAPE = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
_TURNS = 2  # of octavo and its peer, one after the other


def tokens(check: Check, entries: Entries) -> None:
    """Check that models give a request the same tokens alone and with others that cut its prompt.

    Models with recurrent layers answer the requests once more, from saved states.
    """
    entries.add("built-in model", partial(_same_tokens, check, random_model(check) if check.is_dry else ModelConfig()))
    for family in FAMILIES:
        entries.add(family, lambda family=family: _same_tokens(check, recurrent_model(check, family), num_rounds=2))  # type: ignore[misc]


def workloads(check: Check, entries: Entries) -> None:
    """Measure tokens per second of one stream and of many concurrent requests, with random weights of a real shape.

    Of one stream the prompt is measured apart from the tokens after it.
    """
    rng = random.Random(0)
    high = 8 if check.is_dry else 512
    prompts = [
        [rng.randrange(5, 50) for _ in range(rng.randrange(4, high))] for _ in range(check.sizes.requests_at_once)
    ]
    entries.add("one stream", partial(_one_stream, check, [rng.randrange(5, 50) for _ in range(high)]))
    entries.add("many streams", partial(_octavo, check, prompts, [check.sizes.new_tokens] * len(prompts)))


def peers(check: Check, entries: Entries) -> None:
    """Measure tokens per second in nano-vllm's benchmark: octavo and the installed ones of its peers, in turns."""
    rng = random.Random(0)
    count, (low, high) = check.sizes.requests_at_once, ((2, 5) if check.is_dry else (100, 1024))
    prompts = [[rng.randrange(5, 50) for _ in range(rng.randint(low, high))] for _ in range(count)]
    lengths = [rng.randint(low, high) for _ in range(count)]
    found = {name: run for name, (module, run) in _PEERS.items() if importlib.util.find_spec(module) is not None}
    for turn in range(1, _TURNS + 1) if found else (1,):
        entries.add(f"octavo {turn}", partial(_octavo, check, prompts, lengths))
        for name, run in found.items():
            entries.add(f"{name} {turn}", partial(_peer, run, check.folder / "weights", prompts, lengths))
    for name in _PEERS.keys() - found.keys():
        entries.add(name, lambda: {"left_out": "it is not installed"})


def _same_tokens(check: Check, model: ModelConfig, num_rounds: int = 1) -> dict[str, Any]:
    sizes, rng = check.sizes, random.Random(0)
    vocab, dry_kernels = 200 if check.is_dry else 1500, None if num_rounds == 1 else "auto"
    cache = CacheConfig(block_size=4, num_gpu_blocks=40) if check.is_dry else CacheConfig(kv_cache_memory_bytes=1 << 30)
    lengths = [1, sizes.longest_prompt, *(rng.randint(1, sizes.longest_prompt) for _ in range(sizes.requests - 2))]
    prompts = [[rng.randrange(5, vocab) for _ in range(length)] for length in lengths]
    params = [
        SamplingParams(
            temperature=0.8 * (index % 2), seed=index, max_tokens=sizes.new_tokens, ignore_eos=True, detokenize=False
        )
        for index in range(len(prompts))
    ]
    alone_engine = make_engine(check, model, cache=cache, dry_kernels=dry_kernels)
    alone = [generated(alone_engine, [prompt], [some])[0] for prompt, some in zip(prompts, params, strict=True)]
    cut: dict[str, Any] = {
        "long_prefill_token_threshold": max(1, sizes.longest_prompt // 7),
        "max_num_batched_tokens": 512,
    }
    crowd_engine = make_engine(check, model, cache=cache, dry_kernels=dry_kernels, **cut)
    crowds = [generated(crowd_engine, prompts, params) for _ in range(num_rounds)]
    differ = [
        length for length, one, *others in zip(lengths, alone, *crowds, strict=True) if others.count(one) < num_rounds
    ]
    found: dict[str, Any] = {"is_equal": not differ, "num_requests": len(prompts)}
    if num_rounds > 1:
        found["is_right"] = crowd_engine.core.metrics.stats.prefix_cache_hits > 0
    return found | ({"prompts_that_differ": differ} if differ else {})


def generated(
    engine: LLMEngine, prompts: Sequence[list[int]], params: SamplingParams | Sequence[SamplingParams]
) -> list[list[int]]:
    """Answer prompts of token ids together; return the token ids of each answer.

    Raises `RuntimeError` if an answer ended for another reason than its length, or has another number of tokens than
    `max_tokens`. Two engines whose steps all fail would otherwise give equal answers: empty ones.
    """
    each_params = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    outputs = engine.generate_batch([{"prompt_token_ids": prompt} for prompt in prompts], list(each_params))
    if len(outputs) != len(prompts):
        raise RuntimeError(f"{len(outputs)} of {len(prompts)} requests were answered")
    faults = [fault(output, wanted.max_tokens) for output, wanted in zip(outputs.values(), each_params, strict=True)]
    if found := next(filter(None, faults), None):
        raise RuntimeError(found)
    return [list(output.outputs[0].token_ids) for output in outputs.values()]


def fault(output: RequestOutput, num_tokens: int | None) -> str | None:
    """Return why a finished output is wrong: each of its answers must end by its length, after `num_tokens` tokens."""
    for answer in output.outputs:
        if answer.finish_reason != "length" or len(answer.token_ids) != num_tokens:
            return (
                f"request {output.request_id} ended with {answer.finish_reason!r} after {len(answer.token_ids)} of "
                f"{num_tokens} tokens: {output.error or 'no error was reported'}"
            )
    return None


def make_engine(
    check: Check,
    model: ModelConfig,
    *,
    kv_bytes: int | None = None,
    cache: CacheConfig | None = None,
    dry_graphs: int = 0,
    kernels: str = "triton",
    dry_kernels: str | None = None,
    sink: EventSink | None = None,
    **scheduler: Any,
) -> LLMEngine:
    """Return an engine with the defaults of its device, and decode graphs.

    dry_graphs: the most rows of a graph in a dry run; 0 for no graphs.
    dry_kernels: the kernels of a dry run, if different: "auto" for stages that test the engine, as the interpreter is
    slow. kv_bytes: size of the KV cache, by default all free memory; `cache` replaces it.
    """
    kv_bytes = 1 << 22 if check.is_dry else kv_bytes
    if cache is None:
        cache = CacheConfig() if kv_bytes is None else CacheConfig(kv_cache_memory_bytes=kv_bytes)
    return LLMEngine(
        model,
        SchedulerConfig(max_num_seqs=check.sizes.max_num_seqs, **scheduler),
        cache_config=cache,
        device_config=DeviceConfig(
            device=check.device.type,
            kernels=dry_kernels if check.is_dry and dry_kernels else kernels,
            max_cudagraph_capture_size=dry_graphs if check.is_dry else None,
        ),
        sink=sink,
    )


def random_model(check: Check) -> ModelConfig:
    """Return a model with random weights: with the shape of Qwen3-0.6B, or a tiny one in a dry run."""
    config = tiny_config("Qwen3ForCausalLM", **_DRY_SHAPE) if check.is_dry else SHAPES["qwen3-0.6b"]
    folder = check.folder / "shape"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return ModelConfig(model=str(folder), load_format="dummy", skip_tokenizer_init=True)


def _octavo(check: Check, prompts: list[list[int]], lengths: list[int]) -> dict[str, float]:
    """Return octavo's throughput."""
    free()
    engine = make_engine(check, random_model(check))
    params = [
        SamplingParams(temperature=0.6, max_tokens=length, ignore_eos=True, detokenize=False) for length in lengths
    ]
    if not check.is_dry:
        generated(engine, prompts[:1], SamplingParams(max_tokens=2, ignore_eos=True, detokenize=False))
    start = time.perf_counter()
    num_tokens = sum(map(len, generated(engine, prompts, params)))
    seconds = time.perf_counter() - start
    engine.shutdown()
    return {"wall_s": seconds, "output_tok_per_s": num_tokens / seconds}


def _one_stream(check: Check, prompt: list[int]) -> dict[str, float]:
    """Return the seconds of a prompt until its first token, and the rate of the tokens after it."""
    free()
    engine = make_engine(check, random_model(check))
    generated(engine, [prompt[::-1]], SamplingParams(max_tokens=2, ignore_eos=True, detokenize=False))
    num_tokens = check.sizes.stream_tokens
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
    start = time.perf_counter()
    engine.add_request("stream", {"prompt_token_ids": prompt}, params)
    first, last = None, None
    while engine.has_unfinished_requests():
        for output in engine.step():
            last = output
            if first is None and output.outputs[0].token_ids:
                first, num_first = time.perf_counter(), len(output.outputs[0].token_ids)
    end = time.perf_counter()
    engine.shutdown()
    if first is None or last is None or (found := fault(last, num_tokens)):
        raise RuntimeError(found if first and last else "the request returned no token")
    rate = (num_tokens - num_first) / (end - first)
    return {"num_prompt_tokens": len(prompt), "first_token_s": first - start, "output_tok_per_s": rate}


def _peer(
    run: Callable[[Path, list[list[int]], list[int]], tuple[float, int]],
    folder: Path,
    prompts: list[list[int]],
    lengths: list[int],
) -> dict[str, float]:
    """Return a peer's throughput. run: returns its seconds and the number of tokens that it generated."""
    free()
    if not (folder / "tokenizer.json").exists():
        write_checkpoint(folder, SHAPES["qwen3-0.6b"])
        write_tokenizer(folder, train_tokenizer(TOKENIZER_SIZE))
    seconds, num_tokens = run(folder, prompts, lengths)
    if num_tokens != sum(lengths):
        raise RuntimeError(f"it generated {num_tokens} of {sum(lengths)} tokens")
    return {"wall_s": seconds, "output_tok_per_s": num_tokens / seconds}


def _vllm(folder: Path, prompts: list[list[int]], lengths: list[int]) -> tuple[float, int]:
    import vllm  # type: ignore[import-not-found]  # noqa: PLC0415

    peer = vllm.LLM(str(folder), max_model_len=4096, gpu_memory_utilization=0.8)
    params = [vllm.SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=length) for length in lengths]
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    peer.generate(inputs[:1], params[:1], use_tqdm=False)
    start = time.perf_counter()
    outputs = peer.generate(inputs, params, use_tqdm=False)
    return time.perf_counter() - start, sum(len(output.outputs[0].token_ids) for output in outputs)


def _nano_vllm(folder: Path, prompts: list[list[int]], lengths: list[int]) -> tuple[float, int]:
    from nanovllm import LLM, SamplingParams as NanoParams  # type: ignore[import-not-found]  # noqa: I001, PLC0415

    peer = LLM(str(folder), enforce_eager=False, max_model_len=4096)
    try:
        params = [NanoParams(temperature=0.6, ignore_eos=True, max_tokens=length) for length in lengths]
        peer.generate(["warm"], NanoParams())
        start = time.perf_counter()
        num_tokens = sum(len(each["token_ids"]) for each in peer.generate(prompts, params, use_tqdm=False))
        seconds = time.perf_counter() - start
    finally:
        atexit.unregister(peer.exit)  # it has been called already
        peer.exit()
    return seconds, num_tokens


_PEERS = {"vllm": ("vllm", _vllm), "nano-vllm": ("nanovllm", _nano_vllm)}  # name -> module, how to run it


def free() -> None:
    """Free the memory of deleted engines: reference cycles hold tensors until they are collected."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
