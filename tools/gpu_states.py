"""Recurrent layers on a device: kernels with states in steps of any size, and the models of the engine's stages."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from octavo.config import ModelConfig
from octavo.kernels.operations.copy_rows import copy_rows
from octavo.kernels.operations.gated_delta import gated_delta
from octavo.kernels.operations.gated_norm import gated_norm
from octavo.kernels.operations.keep_rows import keep_rows
from octavo.kernels.operations.mamba2 import mamba2
from octavo.kernels.operations.multiply import multiply
from octavo.kernels.operations.relu_squared import relu_squared
from octavo.kernels.operations.short_conv import short_conv
from octavo.kernels.operations.sigmoid_gate import sigmoid_gate
from octavo.kernels.reference import ReferenceKernels
from octavo.kernels.state_batch import STATE_COLUMNS, StateBatch
from octavo.models.random_weights import tiny_config, write_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from gpu_device import Check, Entries
    from torch import Tensor

    from octavo.kernels import Kernels

_STD = 0.1  # of weights: with a smaller one, tokens often repeat
_WIDER = {
    "vocab_size": 4001, "hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 64,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3_5ForCausalLM": {
        "layer_types": ["linear_attention", "linear_attention", "full_attention"] * 2, "num_hidden_layers": 6,
        "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    },
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "conv", "full_attention"] * 2, "num_hidden_layers": 6},
    "GraniteMoeHybridForCausalLM": {
        "layer_types": ["mamba", "mamba", "attention"] * 2, "num_hidden_layers": 6, "mamba_n_heads": 16,
        "mamba_d_head": 64, "mamba_d_state": 128,
    },
    "NemotronHForCausalLM": {
        "hybrid_override_pattern": "M-ME*E-M", "num_hidden_layers": 8, "mamba_num_heads": 16, "mamba_head_dim": 64,
        "ssm_state_size": 128,
    },
}  # fmt: skip


def recurrent_config(check: Check, family: str) -> dict[str, Any]:
    """Return config.json of a model with recurrent layers: a tiny one in a dry run."""
    return tiny_config(family) if check.is_dry else tiny_config(family, **_WIDER | FAMILIES[family])


def recurrent_model(check: Check, family: str) -> ModelConfig:
    """Return a model with recurrent layers and random weights."""
    folder = check.folder / family
    if not (folder / "config.json").exists():
        write_checkpoint(folder, recurrent_config(check, family), std=_STD)
    return ModelConfig(model=str(folder), skip_tokenizer_init=True)


@dataclass(frozen=True, slots=True)
class StateCase:
    """An operation with states. inputs: of all rows. state: of one sequence. compute: called like the operations."""

    name: str
    inputs: tuple[Tensor, ...]
    state: Tensor
    out_width: int
    compute: Callable[..., None]

    def to(self, device: torch.device) -> StateCase:
        """Return a copy whose inputs and state are on a device."""
        return replace(self, inputs=tuple(each.to(device) for each in self.inputs), state=self.state.to(device))


def state_cases(check: Check, dtype: torch.dtype, num_rows: int) -> list[StateCase]:
    """Return each operation with states, with random inputs of `num_rows` rows."""
    num_heads, num_keys, depth, columns = (2, 1, 8, 16) if check.is_dry else (8, 4, 128, 128)
    values, keys = num_heads * columns, num_keys * depth
    wide = 2 * keys + values

    def numbers(width: int, seed: int, like: torch.dtype = torch.float32) -> Tensor:
        return check.random(width, dtype=like, seed=seed)

    def rows(width: int, seed: int) -> Tensor:
        return check.random(num_rows, width, dtype=dtype, seed=seed)

    def convolve(kernels: Kernels, x: Tensor, kept: Tensor, state: Tensor, batch: StateBatch, out: Tensor) -> None:
        weight = check.random(4, wide, dtype=torch.float32, seed=3).to(x.device)
        short_conv(kernels, x, kept, weight, weight[0, :0], state, batch, True, out)

    def delta(kernels: Kernels, *arguments: Any) -> None:
        *inputs, state, batch, out = arguments
        decay, dt_bias = (numbers(num_heads, seed).to(out.device) for seed in (3, 4))
        gated_delta(kernels, *inputs, -decay.abs(), dt_bias, state, batch, num_keys, False, out)  # type: ignore[call-arg]

    def mamba(kernels: Kernels, *arguments: Any) -> None:
        *inputs, state, batch, out = arguments
        decay, dt_bias, skip = (numbers(num_heads, seed).to(out.device) for seed in (3, 4, 5))
        mamba2(kernels, *inputs, dt_bias, -decay.abs(), skip, 0.001, 2.0, state, batch, num_keys, out)  # type: ignore[call-arg]

    x, a, b = rows(wide, 0), rows(num_heads, 1), rows(num_heads, 2)
    matrix = check.random(num_heads, columns // STATE_COLUMNS, depth, STATE_COLUMNS, dtype=torch.float32, seed=6)
    return [
        StateCase("short_conv", (x,), check.random(3, wide, dtype=dtype, seed=6), wide, convolve),
        StateCase("gated_delta", (x, a, b), matrix / 4, values, delta),
        StateCase("mamba2", (x, a), matrix / 4, values, mamba),
    ]


def advance(
    case: StateCase, kernels: Kernels, lengths: Iterable[int], *, num_kept: int = 0, num_strangers: int = 0
) -> tuple[Tensor, Tensor]:
    """Compute all rows in steps of these lengths. Return the results, and the state after the last row.

    num_kept: Number of a step's last rows that the next step replays. num_strangers: Rows of another sequence, which
    precede the others in each step.
    """
    device, widths = case.state.device, [each.shape[1] for each in case.inputs]
    slots = torch.stack([case.state] * 3)
    kept = torch.full((max(num_kept, 1), sum(widths)), torch.nan, dtype=case.inputs[0].dtype, device=device)
    results, first, replayed, is_alone = [], 0, 0, int(not num_strangers)
    for count in lengths:
        own = [*range(num_strangers), *range(first, first + count)]
        inputs = [each[own] for each in case.inputs]
        keeps = min(num_kept, count) if first + count < len(case.inputs[0]) else 0
        sources = [*range(num_strangers), *range(-1, -1 - replayed, -1), *range(num_strangers, len(own))]
        arrays: list[Iterable[int]] = [
            [0, num_strangers, len(sources)][is_alone:], sources, [1, 0][is_alone:], [2, 0][is_alone:],
            [num_strangers, replayed + count - keeps][is_alone:], [], [], range(len(own) - keeps, len(own)),
            range(keeps),
        ]  # fmt: skip
        batch = StateBatch(*(torch.tensor([*each], dtype=torch.int32, device=device) for each in arrays))
        out = torch.empty(len(own), case.out_width, dtype=inputs[0].dtype, device=device)
        case.compute(kernels, *inputs, *kept.split_with_sizes(widths, dim=1), slots, batch, out)
        x, mixed, rates = (inputs + [inputs[0][:, :0]] * 2)[:3]
        keep_rows(kernels, x, mixed, rates, kept, batch)
        results.append(out[num_strangers:])
        first, replayed = first + count, keeps
    return torch.cat(results), slots[0]


def exact_states(check: Check, entries: Entries) -> None:
    """Check that results and state have the same bits for every division into steps."""
    for dtype in check.sizes.dtypes:
        for case in state_cases(check, dtype, 6 if check.is_dry else check.sizes.prompt):
            entries.add(f"{case.name} {dtype}", partial(is_exact_in_steps, check, case))


def is_exact_in_steps(check: Check, case: StateCase) -> dict[str, Any]:
    """Compare all rows in one step with smaller steps, alone and after other rows, and with replayed rows."""
    num_rows = len(case.inputs[0])
    sizes = (4,) if check.is_dry else check.sizes.chunks
    steps = {size: [min(size, num_rows - first) for first in range(0, num_rows, size)] for size in (1, *sizes)}
    ways: dict[str, tuple[list[int], dict[str, int]]] = {
        **{f"steps of {size}": (lengths, {}) for size, lengths in steps.items()},
        "steps with other rows": (steps[sizes[0]], {"num_strangers": 3}),
        "steps of 1 with replayed rows": (steps[1], {"num_kept": 1}),
        "steps with replayed rows": (steps[sizes[0]], {"num_kept": 3, "num_strangers": 2}),
    }
    whole = advance(case, check.kernels, [num_rows])
    differ = [
        name
        for name, (lengths, options) in ways.items()
        if not all(map(torch.equal, advance(case, check.kernels, lengths, **options), whole))
    ]
    return {"is_equal": not differ} | ({"differ": differ} if differ else {})


def states_against_torch(
    check: Check, entries: Entries, dtype: torch.dtype, units_off: Callable[[Tensor, Tensor], dict[str, float]]
) -> None:
    """Compare operations of recurrent layers with plain torch on the CPU. units_off: see `gpu_correctness`."""
    plain, cpu = ReferenceKernels(), torch.device("cpu")

    def compare(case: StateCase) -> dict[str, float]:
        lengths = [len(case.inputs[0])]
        pairs = zip(advance(case, check.kernels, lengths), advance(case.to(cpu), plain, lengths), strict=True)
        return max((units_off(ours.to(cpu), theirs) for ours, theirs in pairs), key=lambda each: each["units_off"])

    for case in state_cases(check, dtype, 5 if check.is_dry else 64):
        entries.add(f"{case.name} {dtype}", partial(compare, case))
    x, gate = (check.random(5, 1200, dtype=dtype, seed=seed) for seed in (0, 1))

    def made(compute: Callable[..., None], kernels: Kernels, device: torch.device) -> Tensor:
        result, other = x.to(device), gate.to(device)
        compute(kernels, result.view(5, 10, 120), other.view(5, 10, 120))
        return result

    def norm(kernels: Kernels, values: Tensor, gates: Tensor, *, gate_first: bool) -> None:
        weight = check.random(1200 if gate_first else 300, dtype=torch.float32, seed=2).to(values.device)
        flat = values.view(5, 1200)
        gated_norm(kernels, flat.clone(), gates.view(5, 1200), weight, 1e-6, 300, gate_first, flat)

    def product(kernels: Kernels, values: Tensor, gates: Tensor) -> None:
        multiply(kernels, values.view(5, 1200), gates.view(5, 1200))

    def copy(kernels: Kernels, values: Tensor, gates: Tensor) -> None:
        copy_rows(kernels, gates, values)

    def squared(kernels: Kernels, values: Tensor, _gates: Tensor) -> None:
        relu_squared(kernels, values.view(5, 1200))

    near: dict[str, Callable[..., None]] = {
        "gated_norm": partial(norm, gate_first=False),
        "gated_norm gate first": partial(norm, gate_first=True),
        "sigmoid_gate": sigmoid_gate,
    }
    equal: dict[str, Callable[..., None]] = {"multiply": product, "relu_squared": squared, "copy_rows": copy}
    for name, compute in (near | equal).items():
        pair = partial(made, compute)

        def measure(pair: Callable[..., Tensor] = pair, *, is_equal: bool = name in equal) -> dict[str, Any]:
            ours, theirs = pair(check.kernels, check.device).to(cpu), pair(plain, cpu)
            return {"is_equal": torch.equal(ours, theirs)} if is_equal else units_off(ours, theirs)

        entries.add(f"{name} {dtype}", measure)
