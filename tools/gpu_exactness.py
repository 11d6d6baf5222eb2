"""Check that a row has the same bits on a device alone, among other rows, at any place, and with any prompt chunks."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from gpu_device import in_blocks
from gpu_states import exact_states

from octavo.kernels.block_weight import BlockKind
from octavo.kernels.operations.choose_experts import SOFTMAX, choose_experts
from octavo.kernels.quantization import quantize_fp8, quantize_int4, quantize_int8

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpu_device import AttentionCase, Check, Entries
    from torch import Tensor

_STRANGERS = (1, 60, 3)  # tokens of other prompts, which precede the compared prompt in the batch
_ROWS_A_LAUNCH = 40  # the most decodes in a small launch: larger ones are not split into partitions


def exactness(check: Check, entries: Entries) -> None:
    """Check for each operation that the bits of a row depend on nothing but the row itself."""
    sizes, most = check.sizes, max(check.sizes.exact_rows)
    for width, columns in sizes.layers:
        for name, dtype in (("float32", torch.float32), ("float16", torch.float16), ("bfloat16", torch.bfloat16)):
            entries.add(f"linear {name} {width} {columns}", partial(_product, check, width, columns, dtype))
        for name, stored in (
            ("int8", quantize_int8),
            ("int4", lambda weight: quantize_int4(weight, 32)),
            ("fp8", quantize_fp8),
        ):
            product = partial(_product, check, width, columns, torch.bfloat16, stored)
            entries.add(f"linear {name} {width} {columns}", product)
        for kind in (BlockKind.Q4_K, BlockKind.Q6_K):
            whole = width - width % kind.block_values
            product = partial(_product, check, whole, columns, torch.bfloat16, partial(in_blocks, kind))
            entries.add(f"linear {kind.name} {whole} {columns}", product)
        entries.add(f"rms_norm {width}", partial(_norm, check, width))
    x, factors = check.random(most, 512), check.random(512, dtype=torch.float32, seed=1)
    entries.add("gate", lambda: _is_exact(check, x, check.kernels.gate))

    def weights_of_experts(logits: Tensor) -> Tensor:
        ids = torch.empty(len(logits), 8, dtype=torch.int32, device=check.device)
        weights = torch.empty(len(logits), 8, device=check.device)
        options = (SOFTMAX, 1, 1, False, 0.0, 1.0)
        choose_experts(check.kernels, logits, logits[:0], factors, ids, weights, *options)
        return weights

    entries.add("choose_experts", lambda: _is_exact(check, x.float(), weights_of_experts))
    for dtype in sizes.dtypes:
        for case in sizes.attention:
            entries.add(case.name(dtype), partial(_attention, check, dtype, case))
    exact_states(check, entries)


def _product(
    check: Check, width: int, columns: int, dtype: torch.dtype, stored: Callable[[Tensor], Any] = lambda weight: weight
) -> dict[str, Any]:
    x = check.random(max(check.sizes.exact_rows), width, dtype=dtype)
    weight = check.random(columns, width, dtype=dtype, seed=1) / width**0.5
    return _is_exact(check, x, partial(check.kernels.linear, packed=check.kernels.pack_linear(stored(weight))))


def _norm(check: Check, width: int) -> dict[str, Any]:
    x, weight = check.random(max(check.sizes.exact_rows), width), check.random(width, seed=2)
    return _is_exact(check, x, partial(check.kernels.rms_norm, weight=weight, eps=1e-6))


def _is_exact(check: Check, x: Tensor, operation: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    together = operation(x)
    differ = [
        [first, rows]
        for rows in check.sizes.exact_rows
        for first in sorted({0, (len(x) - rows) // 2, len(x) - rows})
        if not torch.equal(operation(x[first : first + rows]), together[first : first + rows])
    ]
    return _told(differ)


def _attention(check: Check, dtype: torch.dtype, case: AttentionCase) -> dict[str, Any]:
    """Compare a prompt in one chunk with other chunks, alone and with other rows, and with few and many decodes.

    All use one cache, so the slots after a chunk, which must not be read, contain random numbers.
    """
    most, strangers = check.sizes.prompt, len(_STRANGERS)
    tables = check.tables(strangers + 1, most)
    caches = case.views(*check.caches(tables.numel(), 2, case.head_dim, case.kv_dtype or dtype))
    q = check.random(most, 2 * case.group, case.head_dim, dtype=dtype)
    others = check.random(sum(_STRANGERS), 2 * case.group, case.head_dim, dtype=dtype, seed=7)
    sinks = check.random(2 * case.group, dtype=torch.float32) if case.has_sinks else None

    def rows(spans: list[tuple[int, int]], *, in_company: bool = False) -> Tensor:
        """Return attention of spans of the prompt, each as a sequence, in order."""
        company = [(most - tokens, most) for tokens in _STRANGERS if tokens <= most] if in_company else []
        before = sum(last - first for first, last in company)
        ids = [*range(len(company)), *[strangers] * len(spans)]
        queries = torch.cat([others[:before], *(q[first:last] for first, last in spans)])
        batch = check.batch([*company, *spans], tables[ids])
        scale = float(case.head_dim**-0.5)
        attended = check.kernels.paged_attention(queries, *caches, batch, scale, case.window, case.softcap, sinks)
        return attended[before:]

    whole = rows([(0, most)])
    decodes = [(position, position + 1) for position in range(most)]
    chunks = [(first, min(first + size, most)) for size in check.sizes.chunks for first in range(0, most, size)]
    at_borders = {0, most // 2, most - 1, *range(63, most, 64), *range(64, most, 64)}
    ways = [
        *(("a chunk", [chunk], False) for chunk in chunks),
        *(("a chunk in company", [chunk], True) for chunk in chunks),
        ("all as decodes", decodes, False),
        *(("decodes", decodes[first : first + _ROWS_A_LAUNCH], False) for first in range(0, most, _ROWS_A_LAUNCH)),
        *(("a decode alone", [decodes[position]], False) for position in sorted(at_borders)),
    ]
    return _told(
        [
            [spans[0][0], spans[-1][1], name]
            for name, spans, in_company in ways
            if not torch.equal(rows(spans, in_company=in_company), whole[spans[0][0] : spans[-1][1]])
        ]
    )


def _told(differ: list[list[Any]]) -> dict[str, Any]:
    """Return the entry: if nothing differs, and the first differences otherwise."""
    return {"is_equal": not differ} | ({"differ": differ[:10], "num_differ": len(differ)} if differ else {})
