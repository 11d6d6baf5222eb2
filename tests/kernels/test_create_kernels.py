"""The choice of the backend, and that the compiled one exists on machines that need it."""

import errno
import importlib.util
import os
import subprocess
import sys
import textwrap

import pytest
import torch
from kernel_backends import ALL_ISAS, compiled_kernels

from octavo.config import DeviceConfig
from octavo.errors import ConfigError
from octavo.kernels import create_kernels, default_instruction_set, instruction_sets

CPU = torch.device("cpu")


@pytest.mark.skipif(
    os.environ.get("OCTAVO_REQUIRE_KERNELS", "") in ("", "0"), reason="compiled kernels are optional here"
)
def test_required_compiled_kernels_are_installed():
    from octavo import _kernels

    assert _kernels.instruction_sets()[-1] == "portable"


def test_auto_backend_prefers_compiled_cpu_kernels():
    compiled_kernels()
    assert create_kernels(CPU, num_threads=1).name == "cpu"
    assert create_kernels(CPU, "cpu", num_threads=1).name == "cpu"
    assert create_kernels(CPU, "reference").name == "reference"
    assert create_kernels(torch.device("meta")).name == "reference"


def test_missing_compiled_kernels_fall_back_to_reference_with_warning(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "octavo._kernels" else found(name))
    with pytest.warns(RuntimeWarning, match="without its compiled kernels"):
        assert create_kernels(CPU).name == "reference"
    with pytest.raises(ConfigError, match="OCTAVO_REQUIRE_KERNELS"):
        create_kernels(CPU, "cpu")
    assert create_kernels(CPU, "reference").name == "reference"  # requested explicitly: no warning


def test_unknown_or_unusable_backend_is_refused():
    with pytest.raises(
        ConfigError,
        match=r"choose auto, reference, cpu, triton or fast-inexact",
    ):
        create_kernels(CPU, "cuda")
    with pytest.raises(ConfigError, match="'meta'"):
        create_kernels(torch.device("meta"), "cpu")


def test_unsupported_instruction_set_is_refused():
    compiled_kernels()
    with pytest.raises(ValueError, match="sve"):
        compiled_kernels_without_skip("sve")


def compiled_kernels_without_skip(isa):
    from octavo.kernels.cpu import CpuKernels

    return CpuKernels(isa)


def test_isa_option_selects_instruction_set():
    compiled_kernels()
    for isa in instruction_sets():
        assert create_kernels(CPU, num_threads=1, isa=isa).isa == isa
    assert create_kernels(CPU, num_threads=1).isa == default_instruction_set()


def test_octavo_isa_variable_selects_auto_instruction_set(monkeypatch):
    compiled_kernels()
    monkeypatch.delenv("OCTAVO_ISA", raising=False)
    assert create_kernels(CPU, num_threads=1).isa == instruction_sets()[0]
    monkeypatch.setenv("OCTAVO_ISA", "portable")
    assert create_kernels(CPU, num_threads=1).isa == "portable"
    assert create_kernels(CPU, num_threads=1, isa=instruction_sets()[0]).isa == instruction_sets()[0]
    monkeypatch.setenv("OCTAVO_ISA", "avx9")
    with pytest.raises(ConfigError, match=r"OCTAVO_ISA=avx9 cannot be used: this processor has .*portable"):
        create_kernels(CPU)


def test_unusable_isa_option_is_refused(monkeypatch):
    compiled_kernels()
    monkeypatch.setattr("octavo.kernels.instruction_sets", lambda: ("avx2", "portable"))
    with pytest.raises(ConfigError, match="'amx' cannot be used: this processor has avx2, portable"):
        create_kernels(CPU, isa="amx")
    for device, backend in ((CPU, "reference"), (torch.device("meta"), "auto")):
        with pytest.raises(ConfigError, match="'avx2' cannot be used: no compiled kernels are installed"):
            create_kernels(device, backend, isa="avx2")
    with pytest.raises(ConfigError, match="isa must be one of auto, amx"):
        DeviceConfig(isa="sse")


def test_set_num_threads_does_not_change_results(generator):
    kernels = compiled_kernels(num_threads=1)
    x, weight = torch.randn(20, 300, generator=generator), torch.ones(300)
    expected = kernels.rms_norm(x, weight, 1e-6)
    for number in (3, 1, 2):
        kernels.set_num_threads(number)
        assert kernels.num_threads == number
        assert torch.equal(kernels.rms_norm(x, weight, 1e-6), expected)
    with pytest.raises(ValueError, match="at least 1"):
        kernels.set_num_threads(0)


def test_concurrent_callers_share_one_thread_pool(generator):
    from concurrent.futures import ThreadPoolExecutor

    kernels = compiled_kernels()
    packed = kernels.pack_linear(torch.randn(200, 300, generator=generator))
    inputs = [torch.randn(rows, 300, generator=generator) for rows in (1, 20, 3, 50) * 10]
    expected = [kernels.linear(x, packed) for x in inputs]
    with ThreadPoolExecutor(4) as callers:
        results = list(callers.map(lambda x: kernels.linear(x, packed), inputs))
    assert all(map(torch.equal, results, expected))


@pytest.mark.turn(12)
def test_kernels_work_in_forked_child_process():
    compiled_kernels()
    script = """
        import os, torch
        torch.set_num_threads(1)  # its threads are not ours
        from octavo.kernels.cpu import CpuKernels
        kernels = CpuKernels(num_threads=3)
        x, weight = torch.randn(400, 300), torch.ones(300)
        expected = kernels.rms_norm(x, weight, 1e-6)
        child = os.fork()
        if child == 0:
            same = torch.equal(kernels.rms_norm(x, weight, 1e-6), expected)
            threads = len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 3
            os._exit(0 if same and threads == 3 else 1)
        assert os.waitpid(child, 0)[1] == 0
    """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], timeout=60, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EPERM])
def test_refused_amx_permission_logs_warning(monkeypatch, caplog, error):
    compiled_kernels()
    from octavo import _kernels

    create_kernels(CPU, num_threads=1)
    assert "AMX" not in caplog.text
    monkeypatch.setattr(_kernels, "tiles_refused", lambda: error)
    monkeypatch.setattr(_kernels, "instruction_sets", lambda: ["portable"])
    assert create_kernels(CPU, num_threads=1).isa == "portable"
    assert f"refuses AMX to this process ({os.strerror(error)})" in caplog.text
    with pytest.raises(ConfigError, match="refuses AMX"):
        create_kernels(CPU, isa="amx")


@pytest.mark.parametrize("isa", ALL_ISAS)
def test_every_instruction_set_of_this_processor_computes(isa):
    """The skips of this test name the instruction sets that this run does not test."""
    kernels = compiled_kernels(isa)
    x = torch.ones(1, 64)
    assert torch.equal(kernels.linear(x, kernels.pack_linear(torch.ones(3, 64))), torch.full((1, 3), 64.0))
