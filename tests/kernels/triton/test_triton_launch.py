"""Launches find the compiled kernel that Triton would find."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel, compiler, make_backend
from triton.knobs import HookChain
from triton.runtime.jit import create_function_from_signature

from octavo.kernels.triton import launch
from octavo.kernels.triton.launch import Kernel, cdiv, power_of_2_from


def add(out_ptr, x_ptr, num_rows, width, scale, IS_ROUNDED: tl.constexpr, WIDTH: tl.constexpr):
    tl.store(out_ptr + num_rows * width, tl.load(x_ptr) * scale + WIDTH + IS_ROUNDED)


class Device:
    """A driver that compiles nothing and records launches."""

    def __init__(self, backend="cuda", name=0):
        self.backend, self.name, self.compiled, self.launched = backend, name, [], []
        self.make = Compiled

    def get_current_device(self):
        return self.name

    def get_current_stream(self, device):
        return f"stream of {device}"

    def get_current_target(self):
        return SimpleNamespace(backend=self.backend)

    def run(self, *args, grid, warmup, **constants):
        assert not warmup
        self.compiled.append((grid, args, constants))
        number = len(self.compiled)
        return self.make(lambda grid, args: self.launched.append((number, grid, args)))


class Compiled:
    """A compiled kernel with Triton's attributes."""

    function, packed_metadata = "function", "metadata"

    def __init__(self, launched):
        self.launched = launched

    def run(self, x, y, z, stream, function, packed_metadata, launch_metadata, enter_hook, exit_hook, *args):
        given = stream[:6], function, packed_metadata, launch_metadata, enter_hook, exit_hook
        if given != ("stream", "function", "metadata", None, None, None):
            raise AssertionError(given)
        self.launched((x, y, z), args)


class OfTriton(Compiled):
    """A compiled kernel that Triton launches."""

    run = property()

    def __getitem__(self, grid):
        return lambda *args: self.launched(("by Triton", *grid[:3]), args)


@pytest.fixture
def silent(monkeypatch):
    device = Device()
    monkeypatch.setattr(launch, "driver", SimpleNamespace(active=device))
    monkeypatch.setattr(Kernel, "run", lambda _self, *args, **options: device.run(*args, **options))
    return device


def floats(num_values=8, offset=0, dtype=torch.float32):
    return torch.zeros(num_values + offset, dtype=dtype)[offset:]


def test_a_repeated_launch_passes_all_arguments_in_the_order_of_the_signature(silent):
    kernel, args = Kernel(add), (floats(), floats(), 3, 5, 0.5)
    for grid in ((7,), (8, 2), (9, 2, 4)):
        kernel[grid](*args, WIDTH=32, num_warps=2, IS_ROUNDED=True)
    assert silent.compiled == [((7,), args, {"WIDTH": 32, "num_warps": 2, "IS_ROUNDED": True})]
    assert [(number, grid) for number, grid, _ in silent.launched] == [(1, (8, 2, 1)), (1, (9, 2, 4))]
    assert all(given == (*args, True, 32) for _, _, given in silent.launched)


@pytest.mark.parametrize(
    "other",
    [
        {"x": floats(dtype=torch.bfloat16)},
        {"x": floats(offset=1)},
        {"num_rows": 1},
        {"num_rows": 32},
        {"num_rows": 1 << 31},
        {"num_rows": -(1 << 31) - 1},
        {"scale": 2},
        {"scale": True},
        {"width": True},
        {"IS_ROUNDED": False},
        {"num_warps": 4},
    ],
    ids=str,
)
def test_what_triton_compiles_for_is_compiled_anew(silent, other):
    kernel = Kernel(add)
    for changes in ({}, other, {}, other):
        given = {"x": floats(), "num_rows": 3, "width": 5, "scale": 0.5, "IS_ROUNDED": True, "num_warps": 2} | changes
        args = [given.pop(name) for name in ("x", "num_rows", "width", "scale")]
        kernel[(1,)](floats(), *args, WIDTH=32, **given)
    assert [number for number, _, _ in silent.launched] == [1, 2]


def test_numbers_that_are_not_specialized_use_one_compiled_kernel(silent):
    kernel = Kernel(add, do_not_specialize=["num_rows", "width"])
    for num_rows in (1, 3, 16, 100):
        kernel[(1,)](floats(), floats(), num_rows, 2 * num_rows, 0.5, IS_ROUNDED=True, WIDTH=8)
    assert len(silent.compiled) == 1


def test_each_device_has_its_compiled_kernels(silent):
    kernel = Kernel(add)
    for silent.name in (0, 1, 0, 1):
        kernel[(1,)](floats(), floats(), 3, 5, 0.5, IS_ROUNDED=True, WIDTH=8)
    assert len(silent.compiled) == len(silent.launched) == 2


def test_amd_leaves_each_launch_to_triton(silent):
    """On AMD's GPUs, Triton also specializes code for the size of a tensor."""
    silent.backend = "hip"
    kernel = Kernel(add)
    for _ in range(3):
        kernel[(1,)](floats(), floats(), 3, 5, 0.5, IS_ROUNDED=True, WIDTH=8)
    assert len(silent.compiled) == 3


def launched_twice(silent, between=lambda: None):
    kernel, args = Kernel(add), (floats(), floats(), 3, 5, 0.5)
    kernel[(7,)](*args, IS_ROUNDED=True, WIDTH=8)
    between()
    kernel[(7,)](*args, IS_ROUNDED=True, WIDTH=8)
    ((_, grid, given),) = silent.launched
    return grid, given == (*args, True, 8)


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
@pytest.mark.parametrize("hook", [print, HookChain()], ids=["a function", "a chain"])
def test_triton_launches_if_a_profiler_has_hooks(silent, monkeypatch, name, hook):
    """The hooks may be set after the kernel was compiled."""
    silent.make = type("Both", (OfTriton,), {"run": Compiled.run})
    if hook is not print:
        monkeypatch.setattr(hook, "calls", [print])
    result = launched_twice(silent, lambda: monkeypatch.setattr(triton.knobs.runtime, name, hook))
    assert result == (("by Triton", 7, 1, 1), True)


@pytest.mark.parametrize("hook", [None, HookChain()], ids=["none", "an empty chain"])
def test_hooks_that_do_nothing_are_not_called(silent, monkeypatch, hook):
    monkeypatch.setattr(triton.knobs.runtime, "launch_enter_hook", hook)
    assert launched_twice(silent) == ((7, 1, 1), True)


def test_triton_launches_if_its_compiled_kernels_have_other_attributes(silent):
    silent.make = OfTriton
    assert launched_twice(silent) == (("by Triton", 7, 1, 1), True)


def test_compiled_kernels_get_the_arguments_that_triton_passes(silent, monkeypatch):
    """Triton's own function that launches a kernel is the reference."""
    monkeypatch.setattr(compiler.driver, "_active", silent)
    monkeypatch.setattr(triton.knobs.runtime, "launch_enter_hook", None)
    monkeypatch.setattr(triton.knobs.runtime, "launch_exit_hook", None)
    passed, of_triton = [], CompiledKernel.__new__(CompiledKernel)
    vars(of_triton).update(
        module=0, function="function", packed_metadata="metadata", _run=lambda *args: passed.append(args)
    )
    silent.make = lambda _: of_triton
    kernel, args = Kernel(add), (floats(), floats(), 3, 5, 0.5)
    for _ in range(2):
        kernel[7, 2](*args, IS_ROUNDED=True, WIDTH=8)
    of_triton[7, 2, 1](*args, True, 8)
    monkeypatch.setitem(vars(of_triton), "module", None)  # otherwise some versions unload the module
    own, expected = passed
    assert all(given is right or given == right for given, right in zip(own, expected, strict=True))


def test_a_launch_that_only_compiles_is_not_kept(silent, monkeypatch):
    kernel = Kernel(add)
    with monkeypatch.context() as patch:
        patch.setattr(Kernel, "run", lambda *_args, **_options: None)
        kernel[(1,)](floats(), floats(), 3, 5, 0.5, IS_ROUNDED=True, WIDTH=8)
    kernel[(1,)](floats(), floats(), 3, 5, 0.5, IS_ROUNDED=True, WIDTH=8)
    assert len(silent.compiled) == 1


def test_arguments_with_equal_specialization_are_equal_to_triton():
    """Triton's own function is the reference, on all pairs of 900 lists of arguments."""
    kernel = Kernel(add, do_not_specialize=["width"])
    backend = make_backend(GPUTarget("cuda", 90, 32))
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    numbers = [0, 1, 2, 16, -16, 48, (1 << 31) - 1, 1 << 31, 1 << 40, -(1 << 31)]
    pointers = [
        *(floats(offset=offset) for offset in (0, 1, 2, 4)),
        floats(dtype=torch.bfloat16),
        floats(dtype=torch.int8),
    ]
    found = {}
    for x in pointers:
        for num_rows in numbers:
            for width in (1, 3, 16, 1 << 31, 1 << 32):
                for scale in (0.5, 1.0, 16.0):
                    args = (floats(), x, num_rows, width, scale)
                    _, properties, _ = bind(*args, IS_ROUNDED=True, WIDTH=8)
                    own = kernel.specialization(args)
                    assert found.setdefault(own, str(properties)) == str(properties), args
    assert len(found) == len(set(found.values())), "the same code is looked up under several keys"


@pytest.mark.parametrize(("numerator", "denominator"), [(0, 3), (1, 3), (3, 3), (4, 3), (10**12 + 1, 7)])
def test_cdiv_rounds_up(numerator, denominator):
    quotient = cdiv(numerator, denominator)
    assert (quotient - 1) * denominator < numerator <= quotient * denominator


def test_powers_of_two():
    assert [power_of_2_from(number) for number in (1, 2, 3, 4, 5, 64, 65)] == [1, 2, 4, 4, 8, 64, 128]
