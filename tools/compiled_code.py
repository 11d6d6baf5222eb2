"""Search the text of a compiled kernel for what makes its results depend on timing or fusion."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from octavo.kernels.triton.proxy_fences import is_fenced

if TYPE_CHECKING:
    from collections.abc import Iterable

_PRODUCTS = {
    "wgmma": r"wgmma\.mma_async\.sync\.aligned\.(m\d+n\d+k\d+)",
    "tcgen05": r"tcgen05\.mma\.\S*kind::(\w+)",
    "mma": r"mma\.sync\.aligned\.(m\d+n\d+k\d+)",
    "mfma": r"v_mfma_[if]32_(\d+x\d+x\d+)",
}
_THREADS_OF_GROUP = 128
_WAIT_FOR_PRODUCTS = "wgmma.wait_group"
_SHARED_WRITE = re.compile(r"cp\.async\.c[ag]|st\.shared|stmatrix")
_FUSED = re.compile(r"\bfma\.rn(\.ftz)?\.f32")
_DOT_OF_FLOAT32 = re.compile(r"tt\.dot [^:\n]*: tensor<\d+x\d+xf32>")
_TF32 = re.compile(r"tt\.dot .*inputPrecision = tf32 : tensor<\d+x\d+xf32>")


def products(text: str) -> str:
    """Return the instructions that multiply matrices, with their shapes, in PTX or the assembly of an AMD GPU."""
    found = {f"{name} {shape}" for name, pattern in _PRODUCTS.items() for shape in re.findall(pattern, text)}
    return " + ".join(sorted(found))


def wide_offsets(ttir: str) -> int:
    """Return how many offsets to pointers have 64 bits: those that may exceed 2^31 values must."""
    return len(re.findall(r"tt\.addptr .*, (?:tensor<[\dx]+x)?i64\b", ttir))


def faults(kernel: Any, *, rereads: bool = False) -> list[str]:
    """Return what is wrong with the code of a compiled kernel.

    rereads: its last loop reads memory that its first loop wrote.
    """
    found = ["enable_fp_fusion is not False"] if kernel.metadata.enable_fp_fusion else []
    ptx, ttir = kernel.asm.get("ptx"), kernel.asm["ttir"]
    if _TF32.search(ttir):
        found.append("a product of float32 is rounded to tf32")
    if rereads and not has_barrier_between_loops(ttir):
        found.append("a loop reads what other threads wrote, without a barrier")
    if ptx is None:
        return found
    if not is_fenced(ptx):
        found.append("a product reads copies without a fence between the proxies")
    if not are_groups_synchronized(ptx):
        found.append("a warp group overwrites shared memory that another one's product may still read")
    if _FUSED.search(ptx) and "math.fma" not in ttir and not _DOT_OF_FLOAT32.search(ttir):
        found.append("a multiplication and an addition are fused")
    return found


def are_groups_synchronized(ptx: str) -> bool:
    """Return False if threads of several warp groups write shared memory after a wait for products, without a barrier.

    `wgmma.wait_group` waits for the products of the own warp group. Triton before 3.9 takes it for a wait of all.
    """
    threads = re.search(r"\.reqntid (\d+)", ptx)
    if threads is None or int(threads[1]) <= _THREADS_OF_GROUP:
        return True
    may_read = False
    for line in _with_loops_twice(ptx.split("\n")):
        if _WAIT_FOR_PRODUCTS in line:
            may_read = True
        elif "bar.sync" in line or "barrier.sync" in line:
            may_read = False
        elif may_read and _SHARED_WRITE.search(line):
            return False
    return True


def has_barrier_between_loops(ttir: str) -> bool:
    """Return True if a barrier stands between the first loop and the last one."""
    places = [match.start() for match in re.finditer(r"scf\.for", ttir)]
    barrier = re.search(r"\b(gpu|ttg)\.barrier", ttir)
    return len(places) >= 2 and barrier is not None and places[0] < barrier.start() < places[-1]


def _with_loops_twice(lines: list[str]) -> Iterable[str]:
    """Yield the lines, and each loop's lines again after its end."""
    labels: dict[str, int] = {}
    for number, line in enumerate(lines):
        yield line
        if label := re.match(r"(\$\w+):", line):
            labels[label[1]] = number
        elif (jump := re.search(r"\bbra(?:\.uni)?\s+(\$\w+)", line)) and jump[1] in labels:
            yield from lines[labels[jump[1]] : number + 1]
