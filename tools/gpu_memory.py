"""Memory on a device: planned and used bytes, swaps over PCIe, and the bytes to copy to the device's machine."""

from __future__ import annotations

import importlib.metadata
import random
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from gpu_engine import free, generated, make_engine, random_model
from gpu_states import recurrent_model

import octavo
from octavo import SamplingParams
from octavo.config import CacheConfig
from octavo.data.events import EventLog, HostBlocksCopied, RequestPreempted
from octavo.worker.memory import activation_bytes, kernel_scratch_bytes

if TYPE_CHECKING:
    from gpu_device import Check, Entries

    from octavo.config import ModelConfig

HYBRID = "Qwen3_5ForCausalLM"
MOST_CARRIED = 200_000_000  # bytes
_MOST_OFF = 0.02  # of the planned bytes
_ROUNDING = 64 << 20  # bytes: torch reserves memory in pieces of up to 20 MiB for each kind of tensor
_OF_THE_DEVICE = re.compile(r"torch|triton|nvidia-|numpy")  # the machine already has these


def memory(check: Check, entries: Entries) -> None:
    """Check that an engine uses the memory that it planned, with its largest steps and its graphs.

    Of all of it within 2 %. What steps and graphs take is small beside weights and KV, so it is compared with its own
    plan as well: it must not exceed it, and the plan must not be twice as much.
    """
    entries.add("planned", lambda: _planned(check, random_model(check)))
    entries.add("planned with states", lambda: _planned(check, recurrent_model(check, HYBRID)))


def swap(check: Check, entries: Entries) -> None:
    """Check that swapped requests get the same tokens as without swaps; measure bytes per second of swaps."""
    entries.add("swapped", lambda: _swapped(check, random_model(check)))
    entries.add("swapped with states", lambda: _swapped(check, recurrent_model(check, HYBRID)))


def carried(check: Check, entries: Entries) -> None:
    """Check that at most 200 MB have to be copied to a machine that has torch, Triton and NVIDIA's libraries."""
    del check
    entries.add("bytes", lambda: weighed(sizes_to_carry()))


def _planned(check: Check, model: ModelConfig) -> dict[str, Any]:
    """Compare the memory that torch reserves with the plan for weights, KV and a step; on a CPU only weights and KV."""
    free()
    before = _reserved(check)
    engine: Any = make_engine(check, model, dry_kernels="auto")
    worker = engine.core.executor.worker
    most = worker.scheduler_config.max_num_batched_tokens
    weights = sum({id(each): each.num_bytes for each in worker.model.linears}.values())
    architecture, captured = worker.model.architecture, None if check.is_dry else worker.runner.forward_pass.recorded
    step = activation_bytes(architecture, most, min(most, worker.scheduler_config.max_num_seqs), worker.dtype)
    step += kernel_scratch_bytes(architecture, worker.kernels, max_seq_len=worker.max_model_len, max_tokens=most)
    step += worker.scheduler_config.max_num_seqs * architecture.kv_layout.kept_bytes(worker.dtype)
    step += 0 if captured is None else captured.num_bytes  # the engine itself checks graphs against their plan
    planned = weights + worker.kv_cache.num_bytes + (0 if check.is_dry else step)
    built = _reserved(check)
    longest = 8 if check.is_dry else min(most, worker.max_model_len - 2)
    params = SamplingParams(temperature=1.0, top_p=0.9, max_tokens=2, ignore_eos=True, detokenize=False)
    count = max(2, check.sizes.requests_at_once)
    whole_steps = [[5 + index] * longest for index in range(most // longest)]
    for prompts in (whole_steps[:1] if check.is_dry else whole_steps, [[5 + index % 100] for index in range(count)]):
        generated(engine, prompts, params)
    taken = weights + worker.kv_cache.num_bytes if check.is_dry else _reserved(check) - before
    in_steps = step if check.is_dry else taken - weights - worker.kv_cache.num_bytes
    found = {"planned": planned, "taken": taken, "weights": weights, "kv": worker.kv_cache.num_bytes}
    found |= {"step_planned": step, "step_taken": in_steps, "before_steps": built - before}
    engine.shutdown()
    return found | {"is_right": is_near(taken, planned) and is_step_right(in_steps, step)}


def is_near(taken: int, planned: int) -> bool:
    """Return True if the used bytes are close to the planned bytes."""
    return abs(taken - planned) <= _MOST_OFF * planned


def is_step_right(taken: int, planned: int) -> bool:
    """Return True if steps took at most what was planned for them, and at least half, but for torch's rounding."""
    return taken <= planned + _ROUNDING and planned <= 2 * taken + _ROUNDING


def _reserved(check: Check) -> int:
    """Return the peak of the device memory that torch has reserved."""
    return 0 if check.is_dry else torch.cuda.max_memory_reserved(check.device)


def _swapped(check: Check, model: ModelConfig) -> dict[str, Any]:
    """Answer requests with few blocks, so that KV is swapped to host memory and back, and with many blocks."""
    rng, sizes = random.Random(1), check.sizes
    block_size, longest, new_tokens = (4, 24, 16) if check.is_dry else (16, sizes.longest_prompt, 8 * sizes.new_tokens)
    count = 6 if check.is_dry else sizes.requests
    prompts = [[rng.randrange(5, 200) for _ in range(rng.randint(longest // 2, longest))] for _ in range(count)]
    params = [
        SamplingParams(
            temperature=0.8 * (index % 2), seed=index, max_tokens=new_tokens, ignore_eos=True, detokenize=False
        )
        for index in range(count)
    ]
    blocks = [-(-(len(prompt) + new_tokens) // block_size) for prompt in prompts]
    at_once = min(count, max(2, sizes.requests_at_once))
    few, many = max(*blocks, sum(sorted(blocks)[-at_once:]) * 2 // 3), sum(blocks) + count
    told = {}
    for num_blocks in (few, many):
        free()
        log = EventLog()
        cache = CacheConfig(
            block_size=block_size, num_gpu_blocks=num_blocks, swap_space_bytes=(1 << 22) if check.is_dry else 4 << 30
        )
        engine = make_engine(check, model, cache=cache, dry_kernels="auto", sink=log, preemption="swap")
        told[num_blocks] = generated(engine, prompts, params), log
        engine.shutdown()
    (tokens, log), (undisturbed, _) = told[few], told[many]
    num_swapped = sum(each.swapped for each in log.of_type(RequestPreempted))
    found: dict[str, Any] = {"is_equal": tokens == undisturbed, "is_right": num_swapped > 0, "num_swapped": num_swapped}
    for way in ("saved", "loaded"):
        moves = [getattr(each, way) for each in log.of_type(HostBlocksCopied)]
        num_bytes, seconds = sum(each.num_bytes for each in moves), sum(each.seconds for each in moves)
        found |= {f"{way}_bytes": num_bytes, f"{way}_gb_per_s": num_bytes / seconds / 1e9 if seconds else 0.0}
    return found


def sizes_to_carry() -> dict[str, int]:
    """Return the bytes of octavo and of each distribution that it needs to serve, except those that the machine has."""
    package = Path(octavo.__file__).parent
    found = {"octavo": _bytes_of(package), "tools": _bytes_of(Path(__file__).parent)}
    waiting, seen = [("octavo", frozenset({"server"}))], {"octavo"}
    while waiting:
        name, extras = waiting.pop()
        try:
            needed = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # for another system, or not installed here
        for line in needed:
            requirement = re.match(r"[\w.-]+", line)
            extra = re.search(r"extra\s*==\s*['\"]([\w-]+)['\"]", line)
            if requirement is None or (extra is not None and extra[1] not in extras):
                continue
            other = requirement[0].lower().replace("_", "-")
            if other not in seen and not _OF_THE_DEVICE.match(other):
                seen.add(other)
                waiting.append((other, frozenset()))
        if name != "octavo":
            files = importlib.metadata.files(name) or []
            paths = [Path(str(file.locate())) for file in files]
            found[name] = sum(path.stat().st_size for path in paths if path.is_file() and path.suffix != ".pyc")
    return found


def weighed(sizes: dict[str, int]) -> dict[str, Any]:
    """Return the sum, if it is below the limit, and the largest parts."""
    total = sum(sizes.values())
    largest = dict(sorted(sizes.items(), key=lambda item: -item[1])[:8])
    return {"num_bytes": total, "is_right": total <= MOST_CARRIED, "largest": largest}


def _bytes_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc")
