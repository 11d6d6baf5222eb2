"""Products: as exact as plain torch, with the CPU's bits if sums are integers, and independent of neighbouring rows."""

from types import SimpleNamespace

import pytest
import torch
from broken_kernels import NothingRuns, broken
from kernel_accuracy import assert_as_exact_as_torch
from triton_interpreter import partition

from octavo.kernels.quantization import Fp8Weight, quantize_fp8, quantize_int4, quantize_int8, quantize_rows
from octavo.kernels.reference import ReferenceKernels
from octavo.kernels.rotation import rotate
from octavo.kernels.triton import backend
from octavo.kernels.triton import matmul as matmul_module
from octavo.kernels.triton import target as target_module
from octavo.kernels.triton.matmul import BLOCK_M, matmul

# The interpreter uses numpy, which warns of intended values: infinities and NaN.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")

PARTITION = partition()
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 1), (16, 130), (PARTITION + 5, 33), (2 * PARTITION, 40)]  # in_features, out_features
INTEGERS = {
    "int8": quantize_int8,
    "int4": lambda weight: quantize_int4(weight, 32),
    "int4 with minima": lambda weight: quantize_int4(weight, 64, minima=True),
    "int4 in one group": lambda weight: quantize_int4(weight, weight.shape[1]),
}


def random(generator, *shape, dtype=torch.float32):
    return torch.randn(*shape, generator=generator).to(dtype)


@pytest.mark.sweep(96)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("weight_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("float32_out", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_triton_linear_is_as_exact_as_torch(kernels, generator, shape, float32_out, has_bias, weight_dtype, dtype):
    depth, size = shape
    weight = random(generator, size, depth, dtype=weight_dtype)
    bias = random(generator, size, dtype=weight_dtype) if has_bias else None
    x = random(generator, 5, depth, dtype=dtype)
    packed = kernels.pack_linear(weight, bias)
    result = kernels.linear(x, packed, float32_out=float32_out)
    exact = x.double() @ weight.double().T + (0.0 if bias is None else bias.double())
    plain = torch.nn.functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
    assert_as_exact_as_torch(result, plain.to(result.dtype), exact)
    out = torch.empty_like(result)
    assert kernels.linear(x, packed, float32_out=float32_out, out=out) is out
    assert torch.equal(out, result)


def rows_differ(kernels, x, packed, parts):
    """Return True if the bits of a row depend on the rows that are computed with it."""
    together = kernels.linear(x, packed)
    return any(not torch.equal(kernels.linear(x[part], packed), together[part]) for part in parts)


PARTS = [slice(0, 1), slice(66, 67), slice(5, 12), slice(0, BLOCK_M), slice(1, BLOCK_M + 2)]


def round_to_fp8(weight, group_size):
    """Round a weight to fp8 with a scale for each group of columns, all different."""
    values = quantize_fp8(weight).values
    num_groups = -(-weight.shape[1] // group_size)
    return Fp8Weight(values, torch.rand(weight.shape[0], num_groups, device=weight.device) * 0.01, group_size)


@pytest.mark.sweep(16)
@pytest.mark.parametrize(("dtype", "is_fp8"), [*((dtype, False) for dtype in FLOATS), (torch.bfloat16, True)], ids=str)
def test_triton_linear_row_is_independent_of_batch_rows(kernels, generator, dtype, is_fp8):
    """With one program a tile, or with programs of partitions, depending on the number of rows."""
    weight = random(generator, 130, 2 * PARTITION + 70, dtype=dtype)
    weight = round_to_fp8(weight, 128) if is_fp8 else weight
    packed = kernels.pack_linear(weight, random(generator, 130, dtype=dtype))
    x = random(generator, BLOCK_M + 4, 2 * PARTITION + 70, dtype=dtype)
    assert not rows_differ(kernels, x, packed, PARTS)


TILINGS = {"split": (10**6, 10**7), "small": (0, 10**7), "large": (0, 1)}  # as row_limits


def computed(monkeypatch, tiling, x, packed, kernels):
    """Return a product with given tiles, for each number of rows around the sizes of tiles."""
    with monkeypatch.context() as patch:
        patch.setitem(backend.matmul.__globals__, "row_limits", lambda *_arguments: TILINGS[tiling])
        return [kernels.linear(x[:count], packed, float32_out=True) for count in (1, 63, 64, 65, 127, 128, 129, 300)]


@pytest.mark.sweep(6)
@pytest.mark.parametrize("kind", ["bfloat16", "float16", "int8", "float32", "fp8"])
def test_row_has_equal_bits_in_all_tiles(kernels, generator, monkeypatch, kind):
    """Tiles for float32 and fp8 are never large."""
    depth, dtype = 2 * PARTITION + 70, getattr(torch, kind, torch.bfloat16)
    dtype = dtype if dtype.is_floating_point else torch.bfloat16
    weight = random(generator, 130, depth, dtype=dtype)
    weight = {"fp8": lambda: round_to_fp8(weight, 128), "int8": lambda: quantize_int8(weight.float())}.get(
        kind, lambda: weight
    )()
    packed, x = kernels.pack_linear(weight), random(generator, 300, depth, dtype=dtype)
    *others, expected = computed(monkeypatch, "large", x, packed, kernels)
    results = [*others, *computed(monkeypatch, "split", x, packed, kernels)]
    results += computed(monkeypatch, "small", x, packed, kernels)
    assert not expected.isnan().any()
    assert all(torch.equal(each, expected[: len(each)]) for each in results)


@pytest.mark.parametrize("processors", [4, 108, 132])
@pytest.mark.parametrize("num_partitions", [1, 2, 28])
@pytest.mark.parametrize("num_columns", [1, 128, 576, 1024, 4096, 151936])
def test_rows_of_tilings_launch_every_kernel_of_a_product(num_columns, num_partitions, processors, monkeypatch):
    """So the warm-up compiles them."""
    width, device = num_partitions * matmul_module.PARTITION, torch.device("cpu")
    monkeypatch.setattr(matmul_module, "num_processors", lambda _device: processors)
    most_split, least_large = matmul_module.row_limits(num_partitions, num_columns, processors)
    found = {(rows <= most_split, rows >= least_large) for rows in range(1, 20000)}
    warm = {1, *matmul_module.rows_of_tilings(num_columns, width, device)}
    assert {(rows <= most_split, rows >= least_large) for rows in warm if rows < 20000} == found
    assert (True, True) not in found
    assert (most_split >= 1) == (num_partitions > 1 and -(-num_columns // 128) < processors)


@pytest.mark.parametrize(
    ("target", "rows"),
    [(("cuda", 80), 128), (("cuda", 90), 128), (("cuda", 100), 64), (("cuda", 120), 128), (("hip", "gfx942"), 128)],
    ids=str,
)
def test_tiles_are_large_if_the_instruction_stays(monkeypatch, target, rows):
    """With tensor memory the instruction depends on the rows of a tile. float32 and fp8 have small tiles everywhere."""
    compile_for(monkeypatch, *target)
    same, mixed = (matmul_module.tile_options(torch.bfloat16, kind) for kind in (torch.bfloat16, torch.float32))
    options = [same | {"FP8_GROUP": 0}, same | {"FP8_GROUP": 128}, mixed | {"FP8_GROUP": 0}]
    assert [(each | matmul_module.large_tile_options(each))["BLOCK_M"] for each in options] == [rows, 64, 64]


def test_split_and_unsplit_products_have_equal_bits(generator, tmp_path, monkeypatch):
    weight, x = random(generator, 9, 2 * PARTITION + 3), random(generator, 2, 2 * PARTITION + 3)
    in_parts = matmul(x, weight, torch.empty(2, 9))
    order = """    total = tl.load(partials_ptr + place, mask=is_there, other=0)
    for _ in range(1, NUM_PARTITIONS):
        partials_ptr += num_rows"""
    backwards = order.replace("    total", "    partials_ptr += 2 * num_rows.to(tl.int64) * num_columns\n    total")
    wrong = broken(tmp_path, "matmul", order, backwards.replace("ptr += num", "ptr -= num"))
    assert not torch.equal(wrong.matmul(x, weight, torch.empty(2, 9)), in_parts)
    monkeypatch.setattr(matmul_module, "num_processors", lambda device: 1)  # one program a tile uses all of them
    assert torch.equal(matmul(x, weight, torch.empty(2, 9)), in_parts)


@pytest.mark.parametrize(("processors", "rows"), [(4, BLOCK_M), (132, 200)])
def test_scratch_bytes_cover_largest_partial_sums(kernels, generator, monkeypatch, processors, rows):
    """The largest partial sums of all packed weights, for as many rows as are split; weights that are never split do
    not count.
    """
    monkeypatch.setattr(matmul_module, "num_processors", lambda _device: processors)
    taken, make = [], torch.empty

    def watch(*shape, **options):
        made = make(*shape, **options)
        taken.extend([made.nbytes] * (len(shape) == 3))
        return made

    sizes = {"num_heads": 1, "num_kv_heads": 1, "head_dim": 16, "vocab_size": 9, "max_seq_len": 1}
    made = type(kernels)()
    before = made.scratch_bytes(**sizes, max_tokens=200)
    packed = [made.pack_linear(quantize_int8(random(generator, 300, 4 * PARTITION + 1)))]
    packed += [made.pack_linear(random(generator, *shape)) for shape in [(400, 2 * PARTITION), (9000, PARTITION)]]
    monkeypatch.setattr(matmul_module.torch, "empty", watch)
    for kernel in ("_matmul", "_multiply_partition", "_add_partitions"):
        monkeypatch.setattr(matmul_module, kernel, NothingRuns())
    for each in packed:
        made.linear(random(generator, rows, each.in_features), each)
    assert before < max(taken) == made.scratch_bytes(**sizes, max_tokens=200)
    assert made.scratch_bytes(**sizes, max_tokens=3) == max(before, 3 * max(taken) // rows)


def compile_for(monkeypatch, backend, arch):
    target = SimpleNamespace(backend=backend, arch=arch)
    driver = SimpleNamespace(get_current_device=lambda: f"{backend} {arch}", get_current_target=lambda: target)
    monkeypatch.setattr(target_module, "INTERPRETED", False)
    monkeypatch.setattr(target_module, "driver", SimpleNamespace(active=driver))


@pytest.mark.parametrize(("backend", "num_stages"), [("cuda", 3), ("hip", 2)])
def test_num_stages_depends_on_compile_target(monkeypatch, backend, num_stages):
    """It is decided by the target that is compiled for, not by the build of torch: kernels for AMD may be compiled
    without ROCm.
    """
    compile_for(monkeypatch, backend, 90)
    assert matmul_module.tile_options(torch.bfloat16, torch.bfloat16)["num_stages"] == num_stages


def test_partitions_that_depend_on_row_count_are_detected(kernels, generator, monkeypatch):
    packed = kernels.pack_linear(random(generator, 40, 2 * PARTITION))
    x = random(generator, 2, 2 * PARTITION)
    options, two = matmul_module.tile_options, kernels.linear(x, packed)
    monkeypatch.setattr(matmul_module, "PARTITION", PARTITION // 2)
    monkeypatch.setattr(matmul_module, "tile_options", lambda *dtypes: options(*dtypes) | {"PARTITION": PARTITION // 2})
    assert not torch.equal(kernels.linear(x[:1], packed), two[:1])


def test_off_by_one_mask_in_matmul_is_detected(generator, tmp_path):
    weight, x = random(generator, 3, 37), random(generator, 4, 38)[:, :37]  # each row is followed by other values
    expected = matmul(x, weight, torch.empty(4, 3))
    one_too_many = broken(tmp_path, "matmul", "is_there = k < WIDTH\n", "is_there = k <= WIDTH\n")
    assert not torch.allclose(one_too_many.matmul(x, weight, torch.empty(4, 3)), expected)


@pytest.mark.sweep(36)
@pytest.mark.parametrize("group_size", [64, 128, 10**6])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", [(64, 40), (96, 7), (PARTITION + 3, 66)], ids=str)
def test_fp8_product_has_bits_of_dequantized_product(kernels, generator, shape, dtype, group_size):
    depth, size = shape
    weight, bias = round_to_fp8(random(generator, size, depth), group_size), random(generator, size)
    x = random(generator, 5, depth, dtype=dtype)
    expanded = weight.dequantize().to(dtype)
    result = kernels.linear(x, kernels.pack_linear(weight, bias))
    assert torch.equal(result, kernels.linear(x, kernels.pack_linear(expanded, bias)))
    plain = ReferenceKernels().linear(x, ReferenceKernels().pack_linear(weight, bias))
    assert_as_exact_as_torch(result, plain, x.double() @ expanded.double().T + bias.double())


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("to_float32(weight) * scale[None, :]", "to_float32(weight)"),
        ("WIDTH - 1) // FP8_GROUP", "WIDTH - 1) // (2 * FP8_GROUP)"),
    ],
    ids=["no scales", "those of another group"],
)
def test_wrong_fp8_scales_are_detected(generator, tmp_path, old, new):
    weight, x = round_to_fp8(random(generator, 3, 130), 64), random(generator, 2, 130)
    arguments = x, weight.values.view(torch.uint8), torch.empty(2, 3)
    expected = matmul(*arguments, groups=(weight.scales, 64)).clone()
    wrong = broken(tmp_path, "matmul", old, new).matmul(*arguments, groups=(weight.scales, 64))
    assert not torch.allclose(wrong, expected)


@pytest.mark.sweep(48)
@pytest.mark.parametrize("stored", INTEGERS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", [(64, 40), (96, 7), (PARTITION + 3, 66)], ids=str)
def test_integer_products_have_bits_of_reference(kernels, generator, shape, dtype, stored):
    depth, size = shape
    weight = INTEGERS[stored](random(generator, size, depth) / depth**0.5)
    bias = random(generator, size)
    x = (
        random(generator, 8 if stored == "int8" else 18, depth, dtype=dtype) * 4
    )  # more than the smaller tile of int4 has
    x[1] = 0.0
    x[2, 0] = torch.nan
    x[3, 0] = torch.inf
    x[4] *= 1e-33  # rounded to zeros
    for packed, plain in (
        (kernels.pack_linear(weight, each), ReferenceKernels().pack_linear(weight, each)) for each in (bias, None)
    ):
        result, expected = kernels.linear(x, packed), ReferenceKernels().linear(x, plain)
        assert torch.equal(result.isnan(), expected.isnan())
        assert torch.equal(result.nan_to_num(), expected.nan_to_num())
    assert torch.equal(kernels.linear(x[:1], packed), result[:1])
    token_ids = torch.tensor([size - 1, 0, 0])
    for scale in (1.0, 3.7):
        rows = kernels.embedding(token_ids, packed, dtype, scale)
        assert torch.equal(rows, ReferenceKernels().embedding(token_ids, plain, dtype, scale))


@pytest.mark.parametrize("rotated", [False, True])
def test_rows_wider_than_one_block_are_quantized_as_reference(kernels, generator, rotated):
    x = random(generator, 2, 1100)[:, :1030]  # each row is followed by other values
    x[0, -1] = 9.0
    values, scales = backend.quantize_rows(x, 1088, rotated=rotated)
    expected, expected_scales = quantize_rows(rotate(x) if rotated else x)
    assert torch.equal(values.float(), torch.nn.functional.pad(expected, (0, 58)))
    assert torch.equal(scales, expected_scales)


def test_int4_column_order_gives_bits_of_reference(kernels, generator):
    weight = quantize_int4(random(generator, 6, 64), 32)
    weight = type(weight)(weight.values, weight.scales, weight.zeros, 32, torch.randperm(64, generator=generator).int())
    x = random(generator, 3, 64)
    expected = ReferenceKernels().linear(x, ReferenceKernels().pack_linear(weight))
    assert torch.equal(kernels.linear(x, kernels.pack_linear(weight)), expected)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "clamped_silu"])
def test_gated_linear_equals_gate_of_linear(kernels, generator, activation):
    packed = kernels.pack_linear(random(generator, 22, 50, dtype=torch.bfloat16))
    x = random(generator, 3, 50, dtype=torch.bfloat16)
    apart = kernels.gate(kernels.linear(x, packed), activation)
    assert torch.equal(kernels.gated_linear(x, packed, activation), apart)
    assert kernels.gated_linear(x[:0], packed).shape == (0, 11)
