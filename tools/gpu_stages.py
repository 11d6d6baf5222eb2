"""What `tools/gpu_check.py` asks of a device: each stage measures one thing and returns what can stand in JSON."""

from __future__ import annotations

import importlib.util
import json
import random
import statistics
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from make_checkpoint import SHAPES

from octavo import LLMEngine, SamplingParams
from octavo.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig
from octavo.kernels import AttentionBatch, SamplingRows, create_kernels
from octavo.kernels.quantization import quantize_int4, quantize_int8
from octavo.kernels.reference import ReferenceKernels
from octavo.models.random_weights import tiny_config, write_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

    from octavo.kernels import Kernels


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much a stage does: enough to say something on a GPU, or so little that an interpreter is done with it.

    rows: of steps that are timed. exact_rows: of steps that must give a row the same bits. layers: (in_features,
    out_features) of products. requests, new_tokens: of the engine's stages. requests_at_once: of nano-vllm's benchmark.
    """

    rows: tuple[int, ...]
    exact_rows: tuple[int, ...]
    layers: tuple[tuple[int, int], ...]
    vocab: int
    peak_values: int
    repeats: int
    requests: int
    new_tokens: int
    requests_at_once: int


ON_GPU = Sizes(
    rows=(1, 64, 256, 4096),
    exact_rows=(1, 2, 17, 63, 64, 65, 300, 1030),
    layers=((1024, 4096), (2048, 1024), (1024, 6144), (3072, 1024), (4096, 6144), (12288, 4096), (1024, 151936)),
    vocab=151936,
    peak_values=1 << 28,
    repeats=20,
    requests=20,
    new_tokens=32,
    requests_at_once=256,
)
DRY = Sizes(
    rows=(1,),
    exact_rows=(1, 5),
    layers=((530, 3),),
    vocab=70,
    peak_values=1 << 10,
    repeats=1,
    requests=2,
    new_tokens=2,
    requests_at_once=2,
)


@dataclass(frozen=True, slots=True)
class Check:
    """What stages share. folder: for what they write."""

    device: torch.device
    sizes: Sizes
    folder: Path
    kernels: Kernels

    def random(self, *shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
        """Return normal numbers, the same on every device."""
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(self.device, dtype)

    def seconds(self, call: Callable[[], object]) -> float:
        """Return the median time of a call, with what it reads out of the cache."""
        flush = torch.empty(self.sizes.peak_values // 4, dtype=torch.int8, device=self.device)
        times = []
        for _ in range(self.sizes.repeats + 1):
            flush.zero_()
            self.wait()
            start = time.perf_counter()
            call()
            self.wait()
            times.append(time.perf_counter() - start)
        return statistics.median(times[1:])

    def wait(self) -> None:
        """Wait until the device is idle."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def open_check(folder: Path, *, is_dry: bool) -> Check:
    """Return what stages share, on the GPU or, dry, in Triton's interpreter."""
    device = torch.device("cpu" if is_dry else "cuda")
    return Check(device, DRY if is_dry else ON_GPU, folder, create_kernels(device, "triton"))


def peaks(check: Check) -> dict[str, Any]:
    """Return which device it is, the bytes it reads and the operations it does in a second."""
    values = torch.ones(check.sizes.peak_values, dtype=torch.bfloat16, device=check.device)
    side = min(8192, int(check.sizes.peak_values**0.5))
    square = check.random(side, side)
    read_s, product_s = check.seconds(values.max), check.seconds(lambda: square @ square)
    name = torch.cuda.get_device_name(check.device) if check.device.type == "cuda" else "interpreter"
    return {
        "device": name,
        "torch": torch.__version__,
        "kernels": check.kernels.identity,
        "bytes_per_s": values.nbytes / read_s,
        "flops_per_s": 2 * side**3 / product_s,
    }


def correctness(check: Check) -> dict[str, Any]:
    """Return, for each operation, its largest error as a multiple of plain torch's, or whether the bits are equal."""
    kernels, plain = check.kernels, ReferenceKernels()
    found: dict[str, Any] = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x, weight = check.random(5, 530, dtype=dtype), check.random(96, 530, dtype=dtype, seed=1)
        norm = check.random(530, dtype=dtype, seed=2)
        results = {
            "linear": [some.linear(x, some.pack_linear(weight)) for some in (kernels, plain)],
            "rms_norm": [some.rms_norm(x, norm, 1e-6) for some in (kernels, plain)],
            "gate": [some.gate(x) for some in (kernels, plain)],
            "gate gelu_tanh": [some.gate(x, "gelu_tanh") for some in (kernels, plain)],
        }
        for name, (result, expected) in results.items():
            ours, theirs = result.double(), expected.double()
            unit = torch.finfo(dtype).eps * float(theirs.abs().max())
            found[f"{name} {dtype}"] = {"units_off": float((ours - theirs).abs().max()) / unit}
    x, weight = check.random(5, 544), check.random(96, 544, seed=1)
    for name, quantized in (("int8", quantize_int8(weight)), ("int4", quantize_int4(weight, 32))):
        ours, theirs = (some.linear(x, some.pack_linear(quantized)) for some in (kernels, plain))
        found[f"linear {name}"] = {"is_equal": torch.equal(ours, theirs)}
    logits, rows = _sampling(check, 8)
    on_host = plain.sample(logits.cpu(), SamplingRows(*(getattr(rows, name).cpu() for name in rows.__slots__)))
    found["sample"] = {"is_equal": torch.equal(kernels.sample(logits, rows).cpu(), on_host)}
    pairs = zip(kernels.top_tokens(logits, 20), plain.top_tokens(logits, 20), strict=True)
    found["top_tokens"] = {"is_equal": all(torch.equal(ours, theirs) for ours, theirs in pairs)}
    return found


def exactness(check: Check) -> dict[str, Any]:
    """Return, for each operation, whether a row has the same bits alone, among others and in any place."""
    kernels, sizes = check.kernels, check.sizes
    most = max(sizes.exact_rows)
    found: dict[str, Any] = {}
    for width, columns in sizes.layers:
        x, weight = check.random(most, width), check.random(columns, width, seed=1) / width**0.5
        for name, stored in _formats(weight).items():
            packed = kernels.pack_linear(stored)
            product = partial(kernels.linear, packed=packed)
            found[f"linear {name} {width} {columns}"] = _is_exact(check, x, product)
        norm = check.random(width, seed=2)
        found[f"rms_norm {width}"] = _is_exact(check, x, partial(kernels.rms_norm, weight=norm, eps=1e-6))
    found["gate"] = _is_exact(check, check.random(most, 512), kernels.gate)
    q = check.random(most, 4, 64)
    together, batch, (keys, values) = _attention(check, q, [3 + 7 * row % 500 for row in range(most)])
    alone = []
    for row in range(0, most, max(1, most // 8)):
        single = AttentionBatch(
            torch.tensor([0, 1], dtype=torch.int32, device=check.device),
            batch.seq_lens[row : row + 1], batch.block_tables[row : row + 1], batch.positions[row : row + 1],
            batch.slot_mapping[row : row + 1], batch.block_size,
        )  # fmt: skip
        result = kernels.paged_attention(q[row : row + 1], keys, values, single, 0.125, None)
        alone.append(torch.equal(result[0], together[row]))
    found["paged_attention"] = all(alone)
    return found


def shares(check: Check) -> dict[str, Any]:
    """Return times of products and of other kernels, each as a share of what its bytes and operations take at best."""
    limit, found = peaks(check), {}
    for width, columns in check.sizes.layers:
        weight = check.random(columns, width, seed=1)
        for rows in check.sizes.rows:
            x = check.random(rows, width)
            for name, stored in _formats(weight).items():
                packed = check.kernels.pack_linear(stored)
                num_bytes = packed.num_bytes + 2 * rows * (width + columns)
                least = max(num_bytes / limit["bytes_per_s"], 2 * rows * width * columns / limit["flops_per_s"])
                taken = check.seconds(partial(check.kernels.linear, x, packed))
                found[f"linear {name} {width} {columns} {rows}"] = {"us": taken * 1e6, "share": least / taken}
            taken = check.seconds(partial(torch.mm, x, weight.T))
            found[f"torch {width} {columns} {rows}"] = {"us": taken * 1e6}
    for rows in check.sizes.rows[:3]:
        logits, parameters = _sampling(check, rows)
        taken = check.seconds(partial(check.kernels.sample, logits, parameters))
        found[f"sample {rows}"] = {"us": taken * 1e6, "share": logits.nbytes / limit["bytes_per_s"] / taken}
        q = check.random(rows, 16, 128)
        _, batch, (keys, values) = _attention(check, q, [15 + 16 * check.sizes.repeats] * rows)
        taken = check.seconds(partial(check.kernels.paged_attention, q, keys, values, batch, 0.1, None))
        num_bytes = 8 * 128 * int(batch.seq_lens.sum())  # keys and values of two heads in two bytes
        found[f"decode {rows}"] = {"us": taken * 1e6, "share": num_bytes / limit["bytes_per_s"] / taken}
    return found


def tokens(check: Check) -> dict[str, Any]:
    """Return whether requests get the same tokens alone and in a crowd, of the built-in model."""
    engine = _engine(check, _random_model(check) if check.sizes is DRY else ModelConfig())
    rng = random.Random(0)
    prompts = [{"prompt_token_ids": [rng.randrange(5, 200) for _ in range(rng.randrange(2, 9))]} for _ in
               range(check.sizes.requests)]  # fmt: skip
    params = [
        SamplingParams(
            temperature=0.8 * (index % 2),
            seed=index,
            max_tokens=check.sizes.new_tokens,
            ignore_eos=True,
            detokenize=False,
        )
        for index in range(len(prompts))
    ]
    crowd = [each.outputs[0].token_ids for each in engine.generate_batch(prompts, params).values()]
    alone = [
        next(iter(engine.generate_batch([prompt], [some]).values())).outputs[0].token_ids
        for prompt, some in zip(prompts, params, strict=True)
    ]
    return {"is_equal": crowd == alone, "num_requests": len(prompts)}


def workloads(check: Check) -> dict[str, Any]:
    """Return tokens a second of one stream, and of many requests at once, with random weights of a real shape."""
    engine = _engine(check, _random_model(check))
    rng = random.Random(0)
    found = {}
    for name, count in (("one stream", 1), ("at once", check.sizes.requests_at_once)):
        high = 8 if check.sizes is DRY else 512
        prompts = [[rng.randrange(5, 50) for _ in range(rng.randrange(4, high))] for _ in range(count)]
        found[name] = _throughput(check, engine, prompts, [check.sizes.new_tokens] * count)
    return found


def nano_vllm(check: Check) -> dict[str, Any]:
    """Return octavo's tokens a second in nano-vllm's benchmark, and nano-vllm's where it is installed, in turns."""
    rng = random.Random(0)
    count, (low, high) = check.sizes.requests_at_once, ((2, 5) if check.sizes is DRY else (100, 1024))
    prompts = [[rng.randrange(5, 50) for _ in range(rng.randint(low, high))] for _ in range(count)]
    lengths = [rng.randint(low, high) for _ in range(count)]
    found: dict[str, Any] = {"octavo": []}
    engine = _engine(check, _random_model(check))
    found["octavo"].append(_throughput(check, engine, prompts, lengths))
    if importlib.util.find_spec("nanovllm") is None:
        return found | {"nano-vllm": "not installed"}
    del engine
    torch.cuda.empty_cache()
    from nanovllm import LLM, SamplingParams as NanoParams  # type: ignore[import-not-found]  # noqa: I001, PLC0415

    folder = check.folder / "weights"
    if not (folder / "model.safetensors").exists():
        write_checkpoint(folder, SHAPES["qwen3-0.6b"])
    peer = LLM(str(folder), enforce_eager=False, max_model_len=4096)
    params = [NanoParams(temperature=0.6, ignore_eos=True, max_tokens=length) for length in lengths]
    peer.generate(["warm"], NanoParams())
    start = time.perf_counter()
    peer.generate(prompts, params, use_tqdm=False)
    return found | {"nano-vllm": [{"output_tok_per_s": sum(lengths) / (time.perf_counter() - start)}]}


STAGES: dict[str, Callable[[Check], dict[str, Any]]] = {
    "peaks": peaks,
    "correctness": correctness,
    "exactness": exactness,
    "tokens": tokens,
    "shares": shares,
    "workloads": workloads,
    "nano_vllm": nano_vllm,
}


def failures(results: dict[str, Any]) -> list[str]:
    """Return what the stages have shown to be wrong."""
    wrong = [
        f"correctness: {name}"
        for name, each in results.get("correctness", {}).items()
        if not each.get("is_equal", True) or each.get("units_off", 0.0) > 8.0
    ]
    wrong += [f"exactness: {name}" for name, is_exact in results.get("exactness", {}).items() if not is_exact]
    if not results.get("tokens", {}).get("is_equal", True):
        wrong.append("tokens: a request has others in a crowd")
    return wrong


def _formats(weight: Tensor) -> dict[str, Any]:
    return {"bfloat16": weight, "int8": quantize_int8(weight)}


def _is_exact(check: Check, x: Tensor, operation: Callable[[Tensor], Tensor]) -> bool:
    together = operation(x)
    return all(
        torch.equal(operation(x[first : first + rows]), together[first : first + rows])
        for rows in check.sizes.exact_rows
        for first in {0, (len(x) - rows) // 2, len(x) - rows}
    )


def _sampling(check: Check, count: int) -> tuple[Tensor, SamplingRows]:
    """Return logits and parameters of rows: greedy, without filters and with each of them."""
    index = torch.arange(count, device=check.device)
    rows = SamplingRows(
        temperature=torch.where(index % 4 == 0, 0.0, 0.8),
        top_k=torch.where(index % 4 == 2, 20, 0).int(),
        top_p=torch.where(index % 4 == 3, 0.9, 1.0),
        min_p=torch.zeros(count, device=check.device),
        seed=index,
        sample_index=index.int() * 0,
        position=index.int(),
    )
    return check.random(count, check.sizes.vocab, dtype=torch.float32) * 4, rows


def _attention(check: Check, q: Tensor, lengths: list[int]) -> tuple[Tensor, AttentionBatch, tuple[Tensor, Tensor]]:
    """Return attention of a row for each sequence of so many tokens, its batch and its caches of two KV heads."""
    count, blocks = len(lengths), max(lengths) // 16 + 1
    k_cache, v_cache = (check.random(blocks * 3, 2, 16, q.shape[2], seed=seed) for seed in (3, 4))
    tables = torch.arange(count * blocks, dtype=torch.int32, device=check.device).view(count, blocks) % len(k_cache)
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=check.device)
    starts = torch.arange(count + 1, dtype=torch.int32, device=check.device)
    batch = AttentionBatch(starts, seq_lens, tables, seq_lens.long() - 1, seq_lens.long() * 0, 16)
    return check.kernels.paged_attention(q, k_cache, v_cache, batch, 0.125, None), batch, (k_cache, v_cache)


def _engine(check: Check, model: ModelConfig) -> LLMEngine:
    return LLMEngine(
        model,
        SchedulerConfig(max_num_seqs=max(2, check.sizes.requests_at_once)),
        cache_config=CacheConfig(kv_cache_memory_bytes=1 << 22) if check.sizes is DRY else CacheConfig(),
        device_config=DeviceConfig(device=check.device.type, kernels="triton"),
    )


def _random_model(check: Check) -> ModelConfig:
    """Return a model of random weights: of the shape of Qwen3-0.6B, or a tiny one."""
    config = tiny_config("Qwen3ForCausalLM") if check.sizes is DRY else SHAPES["qwen3-0.6b"]
    folder = check.folder / "shape"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    longest = min(4096, config["max_position_embeddings"])
    return ModelConfig(model=str(folder), load_format="dummy", skip_tokenizer_init=True, max_model_len=longest)


def _throughput(check: Check, engine: LLMEngine, prompts: list[list[int]], lengths: list[int]) -> dict[str, float]:
    params = [
        SamplingParams(temperature=0.6, max_tokens=length, ignore_eos=True, detokenize=False) for length in lengths
    ]
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    if check.sizes is not DRY:
        engine.generate_batch(inputs[:1], [SamplingParams(max_tokens=2, ignore_eos=True, detokenize=False)])
    start = time.perf_counter()
    engine.generate_batch(inputs, params)
    seconds = time.perf_counter() - start
    return {"wall_s": seconds, "output_tok_per_s": sum(lengths) / seconds}
