"""gated_linear has the bits of gate(linear), for every kernel and number of rows."""

import pytest
import torch
from kernel_backends import compiled_kernels

from octavo.kernels.quantization import quantize_int4, quantize_int8

FORMATS = {"bfloat16": torch.Tensor.bfloat16, "int8": quantize_int8, "int4": lambda weight: quantize_int4(weight, 32)}
FUSED = {
    "amx": {"bfloat16", "int8"},
    "avx512_bf16": {"bfloat16", "int8", "int4"},
    "avx512_vnni": {"int8", "int4"},
    "avx512": {"int8", "int4"},
    "avx2": {"int8", "int4"},
    "portable": {"int8", "int4"},
}
ROWS = (0, 1, 2, 3, 14, 15, 16, 17, 32, 33, 65, 97, 257, 520)  # boundaries of tiles, of pairs of tiles and of blocks


def random(generator, *shape, dtype=torch.float32):
    return torch.randn(*shape, generator=generator).to(dtype)


def bits(tensor):
    return tensor.view(torch.int16 if tensor.dtype == torch.bfloat16 else torch.int32)


def apart(kernels, x, packed, activation="silu"):
    return kernels.gate(kernels.linear(x, packed), activation)


@pytest.mark.sweep(64)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("stored", FORMATS)
@pytest.mark.parametrize(
    ("depth", "size"), [(64, 96), (90, 77), (931, 64), (931, 40)]
)  # whole and partial tiles and panels
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "clamped_silu"])
def test_gated_linear_has_bits_of_linear_and_gate(kernels, generator, activation, depth, size, stored, dtype, has_bias):
    weight = random(generator, 2 * size, depth) / depth**0.5
    packed = kernels.pack_linear(FORMATS[stored](weight), random(generator, 2 * size) if has_bias else None)
    x = random(generator, max(ROWS), depth, dtype=dtype) * 4
    for rows in ROWS:
        result = kernels.gated_linear(x[:rows], packed, activation)
        assert result.shape == (rows, size)
        assert result.dtype == dtype
        assert torch.equal(result, apart(kernels, x[:rows], packed, activation)), rows
    other = "silu" if activation == "gelu_tanh" else "gelu_tanh"
    assert not torch.equal(result, kernels.gated_linear(x, packed, other))


@pytest.mark.sweep(36)
@pytest.mark.parametrize("stored", FORMATS)
@pytest.mark.parametrize("depth", [896, 1000, 4864])  # whole tiles, a partial last tile, long panels
def test_gated_linear_bits_are_equal_for_many_panels_and_threads(fastest, single_threaded, generator, depth, stored):
    size = 1056  # 33 panels of gates: the last task has fewer than the other tasks
    weight = FORMATS[stored](random(generator, 2 * size, depth) / depth**0.5)
    bias, three = random(generator, 2 * size), compiled_kernels(num_threads=3)
    x = random(generator, 520, depth + 8, dtype=torch.bfloat16)[:, :depth]  # no row begins at a cache line
    sides = [(kernels, kernels.pack_linear(weight, bias)) for kernels in (single_threaded, fastest, three)]
    of_both = fastest.pack_linear(weight, bias)
    for rows in ROWS:
        expected = apart(fastest, x[:rows], of_both)
        for kernels, packed in sides:
            for some in (x[:rows], x[:rows].contiguous()):
                assert torch.equal(kernels.gated_linear(some, packed), expected), (rows, kernels.num_threads)


@pytest.mark.sweep(12)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("stored", [*FORMATS, "float32"])
def test_gated_linear_bits_are_independent_of_threads(compiled, generator, stored, dtype):
    weight = random(generator, 2 * 1056, 96) / 10
    rounded = FORMATS[stored](weight) if stored in FORMATS else weight
    sides = [(k, k.pack_linear(rounded)) for k in (compiled, compiled_kernels(compiled.isa, num_threads=1))]
    assert [k.num_threads for k, _ in sides] == [2, 1]
    for rows in (1, 5, 40, 300):
        x = random(generator, rows, 96, dtype=dtype)
        assert torch.equal(*(k.gated_linear(x, packed) for k, packed in sides)), rows


@pytest.mark.parametrize("stored", FORMATS)
@pytest.mark.parametrize("size", [1024, 1056])
def test_fused_result_rows_are_padded_against_cache_set_conflicts(fastest, generator, size, stored):
    packed = fastest.pack_linear(FORMATS[stored](random(generator, 2 * size, 96) / 10))
    behind = fastest.pack_linear(random(generator, 40, size, dtype=torch.bfloat16))
    is_fused = fastest.kernel_set.fuses_gate(1, packed.storage.dtype_number, 2 * size)
    for rows in (1, 2, 3, 40, 300):
        x = random(generator, rows, 96, dtype=torch.bfloat16)
        expected, result = apart(fastest, x, packed), fastest.gated_linear(x, packed)
        assert result.stride() == (1056 if is_fused else size, 1)
        assert torch.equal(result, expected)
        assert torch.equal(fastest.linear(result, behind), fastest.linear(expected, behind))


@pytest.mark.sweep(8)
@pytest.mark.parametrize("stored", FORMATS)
def test_gated_linear_is_equal_for_more_rows_than_one_pack(fastest, generator, stored):
    depth = 40000
    packed = fastest.pack_linear(FORMATS[stored](random(generator, 128, depth) / depth**0.5))
    x = random(generator, 300, depth + 8).bfloat16()[:, :depth]
    whole = fastest.gated_linear(x, packed)
    assert torch.equal(whole, apart(fastest, x, packed))
    for row in (0, 255, 256, 299):
        assert torch.equal(fastest.gated_linear(x[row : row + 1], packed), whole[row : row + 1])


@pytest.mark.parametrize("stored", FORMATS)
def test_gated_linear_handles_extreme_and_non_finite_values(compiled, generator, stored):
    weight = random(generator, 64, 64) / 8
    packed = compiled.pack_linear(FORMATS[stored](weight))
    x = random(generator, 40, 64) * torch.logspace(-42, 38, 40).unsqueeze(1)
    x[3, 5], x[20, 1], x[21, 1] = float("nan"), float("inf"), -float("inf")
    x = x.bfloat16()
    for rows in (2, 16, 40):
        assert torch.equal(bits(compiled.gated_linear(x[-rows:], packed)), bits(apart(compiled, x[-rows:], packed)))


@pytest.mark.parametrize(("isa", "stored"), [(isa, stored) for isa, fused in FUSED.items() for stored in sorted(fused)])
@pytest.mark.parametrize("rows", [1, 5, 33])
def test_gated_linear_writes_no_memory_beyond_result(generator, rows, isa, stored):
    compiled = compiled_kernels(isa)
    packed = compiled.pack_linear(FORMATS[stored](random(generator, 192, 100)))
    x = random(generator, rows, 100, dtype=torch.bfloat16)
    memory = torch.full((rows + 40, 96), 7.0, dtype=torch.bfloat16)
    compiled._multiply(x, packed.storage, memory[:rows], "silu")
    assert torch.equal(memory[:rows], apart(compiled, x, packed))
    assert (memory[rows:] == 7).all()


def test_unfused_gated_product_is_refused(compiled, generator):
    packed = compiled.pack_linear(quantize_int4(random(generator, 64, 64)))
    out = torch.zeros(2, 32)
    with pytest.raises(ValueError, match="not gated"):
        compiled._multiply(random(generator, 2, 64), packed.storage, out, "silu")
    assert not out.any()


@pytest.mark.parametrize("isa", FUSED)
def test_gate_is_fused_only_for_supported_types_and_whole_panels(isa):
    fuses = compiled_kernels(isa).kernel_set.fuses_gate
    float32, bfloat16 = 0, 1
    numbers = {"float32": 0, "bfloat16": 1, "float16": 2, "int8": 3, "int4": 4}  # as in csrc/types.h
    assert {name for name, weight in numbers.items() if fuses(bfloat16, weight, 64)} == FUSED[isa]
    for weight in numbers.values():
        assert not fuses(float32, weight, 64)
        assert not fuses(bfloat16, weight, 96)
        assert not fuses(bfloat16, weight, 80)
