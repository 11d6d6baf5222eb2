"""Measure the CPU time that a GPU's host needs to launch a forward pass, on a machine without a GPU.

    TRITON_INTERPRET=0 python tools/host_time.py [--layers 28] [--quantization int8] [--profile]

Triton compiles the kernels for a target that this machine need not have, and its driver launches nothing. All work of
Python, torch's allocations and Triton's launcher before the driver's call is done as on a GPU, with tensors on the CPU.
Results of the kernels are whatever their memory holds, so each sampled token is replaced by token 0.

The table has medians over forward passes of a prompt (launched kernel by kernel) and of a decode step (one graph). The
driver itself is not included: it needs a few microseconds for each launch, and for each graph.
"""

from __future__ import annotations

import argparse
import cProfile
import ctypes
import pstats
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from compile_kernels import TARGETS, NoDevice
from triton.runtime import driver

import octavo.kernels
from octavo import LLM, SamplingParams
from octavo.kernels.triton import matmul
from octavo.kernels.triton.backend import TritonKernels
from octavo.models.random_weights import tiny_config, write_checkpoint
from octavo.worker.forward_pass import ForwardPass

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

_QWEN3_0_6B = {
    "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8,
    "head_dim": 128,
}  # fmt: skip
_PROCESSORS = 132  # of an H100
_SEQS, _PROMPT, _DECODES = 4, 40, 4
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of mallopt(3)


class _Launcher:
    """Launches nothing, and counts. The arguments describe a kernel, and a launch."""

    num_launches = 0

    def __init__(self, *_: Any) -> None:
        pass

    def __call__(self, *_: Any) -> None:
        _Launcher.num_launches += 1


class _Loader:
    def load_binary(self, *_: Any) -> tuple[int, int, int, int, int]:
        """Return a module, a function, registers, spilled registers and the maximum of threads."""
        return 0, 0, 32, 0, 1024

    def get_device_properties(self, _device: str) -> dict[str, int]:
        return {"max_shared_mem": max(each[3] for each in TARGETS.values())}


class SilentDevice(NoDevice):
    """A driver that loads and launches nothing."""

    launcher_cls = _Launcher
    utils = _Loader()


class NoGraphs:
    """A pool of graphs that do nothing when they are launched."""

    num_bytes = 0

    def __init__(self, *device: torch.device) -> None:
        pass

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """Call `run` once."""
        run()
        return lambda: None


class HostKernels(TritonKernels):
    """Triton kernels for tensors on the CPU, which are not computed."""

    graph_pool = NoGraphs

    def __init__(self) -> None:
        super().__init__()
        self.warm_up_rows = ()

    def sample(self, logits: Tensor, rows: Any) -> Tensor:
        """Return token 0 for each row."""
        super().sample(logits, rows)
        return torch.zeros(len(logits), dtype=torch.int32)


class Passes:
    """Measures all forward passes: seconds of the thread's CPU time, and launches, by the number of rows."""

    def __init__(self, profile: cProfile.Profile | None) -> None:
        self.seconds: dict[int, list[float]] = {}
        self.launches: dict[int, int] = {}
        self._profile, self._forward = profile, ForwardPass.__call__
        ForwardPass.__call__ = lambda *args: self._measured(*args)  # type: ignore[method-assign]  # noqa: PLW0108 - binds

    def _measured(self, forward: ForwardPass, token_ids: Tensor, batch: Any) -> Tensor:
        first, start = _Launcher.num_launches, time.thread_time()
        if self._profile is not None and self.launches:
            hidden = self._profile.runcall(self._forward, forward, token_ids, batch)
        else:
            hidden = self._forward(forward, token_ids, batch)
        self.seconds.setdefault(len(token_ids), []).append(time.thread_time() - start)
        self.launches[len(token_ids)] = _Launcher.num_launches - first
        return hidden


def measure(target: str, num_layers: int, quantization: str | None, repeats: int, *, profile: bool) -> None:
    """Print the table, and with `profile` the functions that take the most time."""
    _keep_freed_memory()
    driver.set_active(SilentDevice(target))
    octavo.kernels._triton_kernels = lambda *_: HostKernels()  # noqa: SLF001
    matmul.num_processors = lambda device: _PROCESSORS  # noqa: ARG005
    with tempfile.TemporaryDirectory() as folder:
        config = tiny_config("Qwen3ForCausalLM", num_hidden_layers=num_layers, **_QWEN3_0_6B)
        write_checkpoint(Path(folder), config)
        llm = LLM(
            folder, kernels="triton", device="cpu", dtype="bfloat16", quantization=quantization,
            skip_tokenizer_init=True, max_cudagraph_capture_size=_SEQS, num_gpu_blocks_override=64, max_model_len=256,
            max_num_seqs=_SEQS, max_num_batched_tokens=256, enable_prefix_caching=False,
        )  # fmt: skip
        _wait_for_other_threads()
        profiler = cProfile.Profile() if profile else None
        passes = Passes(profiler)
        for _ in range(repeats):
            params = SamplingParams(max_tokens=_DECODES, ignore_eos=True, detokenize=False)
            llm.generate([[5] * _PROMPT] * _SEQS, params, use_tqdm=False)
    print(f"{target}, {num_layers} layers, {quantization or 'bfloat16'}\n")
    print("| forward pass | kernels launched | CPU ms |\n|---|---|---|")
    for name, num_rows in ("prompt, kernel by kernel", _PROMPT * _SEQS), ("decode step, one graph", _SEQS):
        each = 1000 * statistics.median(passes.seconds[num_rows])
        print(f"| {name} | {passes.launches[num_rows]} | {each:.2f} |")
    if profiler is not None:
        pstats.Stats(profiler).sort_stats("tottime").print_stats(25)


def _keep_freed_memory() -> None:
    """Let the C library reuse freed memory, as torch's allocator for GPUs does, instead of asking the system."""
    allocator = ctypes.CDLL(None)
    for option in (_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD):
        allocator.mallopt(option, 1 << 30)


def _wait_for_other_threads() -> None:
    """Wait for the thread that touches the KV cache of a CPU. It would double the times; a GPU has no such thread."""
    for thread in threading.enumerate():
        if thread.name == "octavo-kv-memory":
            thread.join()


def main() -> None:
    """Run as a command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", choices=sorted(TARGETS), default="sm_90")
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--quantization", choices=["int8", "int4"])
    parser.add_argument("--repeats", type=int, default=30, help="prompts and answers (default: 30)")
    parser.add_argument("--profile", action="store_true", help="show the functions that take the most time")
    args = parser.parse_args()
    measure(args.target, args.layers, args.quantization, args.repeats, profile=args.profile)


if __name__ == "__main__":
    main()
