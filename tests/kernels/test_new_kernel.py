"""The example kernel of CONTRIBUTING.md: one file for each backend, and one line."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
from test_recording import MAX_TOKENS, step_of
from triton_interpreter import interpreted_kernels, kernels_device

from octavo.kernels import operations
from octavo.kernels.cpu import CpuKernels
from octavo.kernels.reference import ReferenceKernels

ROOT = Path(__file__).resolve().parents[2]
_TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("## Adding a kernel\n")[1].split("\n## ")[0]
PLAIN, HEADER, LINE, TRITON = (text for _, text in re.findall(r"```(\w+)\n(.*?)```", _TEXT, re.DOTALL))
OTHER_SETS = ("Amx", "Avx512Bf16", "Avx512Vnni", "Avx512", "Avx2")


@pytest.fixture(scope="module")
def shift(tmp_path_factory):
    """The operation, with the file of its plain version in the package."""
    folder = tmp_path_factory.mktemp("operations")
    (folder / "shift.py").write_text(PLAIN, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operations, "__path__", [*operations.__path__, str(folder)])
        yield importlib.import_module("octavo.kernels.operations.shift").shift
    del sys.modules["octavo.kernels.operations.shift"]


def test_plain_version_of_documented_kernel_serves_every_backend(shift):
    x = torch.randn(5, 33)
    for kernels in (ReferenceKernels(), CpuKernels("portable", num_threads=1)):
        out = kernels.empty(5, 33, like=x)
        shift(kernels, x, 1.5, out)
        assert torch.equal(out, x + 1.5)


def test_documented_triton_kernel_replaces_plain_version(shift, tmp_path, monkeypatch):
    pytest.importorskip("triton")
    from octavo.kernels import triton as package
    from octavo.kernels.triton.backend import kernel_of

    kernel_of.cache_clear()
    device = kernels_device()
    x = torch.randn(5, 330, device=device)
    with interpreted_kernels() as kernels:
        out = kernels.empty(5, 330, like=x)
        with pytest.warns(RuntimeWarning, match="plain torch computes shift, because no Triton kernel"):
            shift(kernels, x, 1.5, out)
        assert torch.equal(out, x + 1.5)
        kernel_of.cache_clear()
        (tmp_path / "shift.py").write_text(TRITON, encoding="utf-8")
        monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
        shift(kernels, x, 2.5, out)
        assert torch.equal(out, x + 2.5)
        assert kernel_of("shift").__module__ == "octavo.kernels.triton.shift"
    kernel_of.cache_clear()
    del sys.modules["octavo.kernels.triton.shift"]


@pytest.mark.slow
def test_documented_cpp_kernel_compiles_and_is_recorded(shift, tmp_path):
    """Only one instruction set is compiled, without optimization; this takes seconds."""
    generator = torch.Generator().manual_seed(0)
    kernels = CpuKernels("portable", num_threads=2)
    kernels._module = build(tmp_path)
    kernels._calls = kernels.kernel_set = kernels._module.KernelSet("portable", 2, [])
    table = kernels.pack_linear(torch.randn(512, 40, generator=generator))
    x = torch.randn(7, 33, generator=generator)
    out, alone = torch.empty(7, 33), torch.empty(1, 33)
    shift(kernels, x, 1.5, out)
    assert torch.equal(out, x + 1.5)
    shift(kernels, x[6:], 1.5, alone)
    assert torch.equal(alone, out[6:])
    with pytest.raises(ValueError, match="x has another dtype"):
        shift(kernels, x.bfloat16(), 1.5, out)
    with pytest.raises(ValueError, match="out is not contiguous"):
        shift(kernels, x.t().contiguous(), 1.5, out.t())
    with pytest.raises(ValueError, match=r"not \[rows, size\] alike"):
        shift(kernels, x[1:], 1.5, out)

    def forward(ids, _batch):
        hidden = kernels.embedding(ids, table, torch.float32)
        moved = kernels.empty(*hidden.shape, like=hidden)
        shift(kernels, hidden, -0.5, moved)
        return moved

    ids, batch = step_of([3], generator, [0])
    first, again = kernels.record_forward(forward, ids, batch, MAX_TOKENS)
    assert again.calls == ("embedding", "shift")
    assert torch.equal(first, kernels.embedding(ids, table, torch.float32) - 0.5)
    ids, batch = step_of([20, 1, 7], generator, [0] * 3)
    assert torch.equal(again(ids, batch), forward(ids, batch))


def build(folder):
    """Return the kernel module with the new kernel, compiled for the portable instruction set alone."""
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    nanobind = Path(importlib.util.find_spec("nanobind").origin).parent
    sources = shutil.copytree(ROOT / "csrc", folder / "csrc")
    (sources / "shift.h").write_text(HEADER, encoding="utf-8")
    text = (sources / "kernels.h").read_text(encoding="utf-8")
    text, num_includes = re.subn(r'(#include "soft_cap.h"\n)', r'#include "shift.h"\n\1', text)
    text, num_lines = re.subn(r"( +KERNEL\(soft_cap)", lambda found: f"{LINE.rstrip()} \\\n{found.group(1)}", text)
    assert (num_includes, num_lines) == (1, 1)
    (sources / "kernels.h").write_text(text, encoding="utf-8")
    tables = [f"extern const KernelTable k{name}Kernels;\nconst KernelTable k{name}Kernels{{}};" for name in OTHER_SETS]
    (sources / "other_sets.cpp").write_text("\n".join(['#include "kernels.h"', "namespace octavo {", *tables, "}"]))
    target = folder / "_kernels.so"
    subprocess.run(
        [
            compiler, "-shared", "-fPIC", "-fvisibility=hidden", "-std=c++17", "-O0", "-ffp-contract=off", "-w",
            "-Wno-psabi", f"-I{nanobind / 'include'}", f"-I{nanobind / 'ext/robin_map/include'}",
            f"-I{sysconfig.get_path('include')}", "-DNB_DOMAIN=new_kernel",  # types apart from the loaded module's
            *(str(sources / f"{name}.cpp") for name in ("bindings", "thread_pool", "kernels_portable", "other_sets")),
            str(nanobind / "src/nb_combined.cpp"), "-o", str(target), "-lpthread",
        ],
        check=True,
    )  # fmt: skip
    spec = importlib.util.spec_from_file_location("_kernels", target)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
