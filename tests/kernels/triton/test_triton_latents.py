"""rope_and_write_latents in Triton has the bits of plain torch with Triton's norm, alone and among other rows."""

import pytest
import torch
from test_latents import empty_cache, make_rows, write

from octavo.kernels.operations import rope_and_write_latents as operation
from octavo.kernels.quantization import kv_scales
from octavo.kernels.reference import ReferenceKernels

# The interpreter uses numpy, which warns of intended values: infinities and NaN.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")

LATENTS = [(3, 24, 8), (5, 40, 24), (2, 512, 64)]  # heads, rank, rotary_dim
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
STORED = [None, torch.int8, torch.float8_e4m3fn]


@pytest.fixture(autouse=True)
def _several_programs_a_token(kernels, monkeypatch):
    from octavo.kernels.triton import rope_and_write_latents

    monkeypatch.setattr(rope_and_write_latents, "_HEADS", 2)


def make(generator, heads, dtype, *, is_interleaved=True):
    """Return arguments up to the cache. Some latents and keys are not finite, tiny or zero."""
    args = make_rows(generator, heads, dtype)
    rank, args[5] = heads[1], is_interleaved
    args[1][0, 3] = torch.nan
    args[1][1, 1] = torch.inf
    args[1][2, rank] = torch.nan
    args[1][3, rank + 1] = -torch.inf
    args[1][4] = 0
    args[1][5] = 1e-35
    return args


def outcome(kernels, args, stored):
    """Return the rotated queries, and the cache with its scales."""
    heads = args[0].shape[1], len(args[2]), args[0].shape[2]
    cache = empty_cache(heads, stored or args[0].dtype)
    queries = write(kernels, args, cache)
    if stored is None:
        return [queries, cache]
    return [queries, cache.view(torch.uint8), kv_scales(cache)]


def assert_same_as_torch(kernels, args, stored=None):
    with pytest.MonkeyPatch.context() as context:
        context.setattr(operation, "rms_norm", lambda x, *others: kernels.rms_norm(x.contiguous(), *others))
        expected = outcome(ReferenceKernels(), args, stored)
    for one, other in zip(expected, outcome(kernels, args, stored), strict=True):
        assert torch.equal(one.isnan(), other.isnan())
        assert torch.equal(one.nan_to_num(), other.nan_to_num())


@pytest.mark.sweep(9)
@pytest.mark.parametrize("stored", STORED, ids=str)
@pytest.mark.parametrize("is_interleaved", [True, False])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("heads", LATENTS, ids=str)
def test_latents_have_bits_of_torch(kernels, generator, heads, dtype, is_interleaved, stored):
    assert_same_as_torch(kernels, make(generator, heads, dtype, is_interleaved=is_interleaved), stored)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("stored", STORED, ids=str)
def test_latent_alone_has_bits_of_latent_among_other_rows(kernels, generator, stored):
    args = make_rows(generator, LATENTS[1], torch.bfloat16)
    cache, again = (empty_cache(LATENTS[1], stored or torch.bfloat16) for _ in range(2))
    queries = write(kernels, args, cache)
    for row in range(len(queries)):
        alone = [x[row : row + 1] if i in {0, 1, 6, 7} else x for i, x in enumerate(args)]
        assert torch.equal(write(kernels, alone, again), queries[row : row + 1])
    assert torch.equal(again.view(torch.uint8), cache.view(torch.uint8))


@pytest.mark.sweep(2)
@pytest.mark.parametrize("stored", STORED, ids=str)
def test_padding_row_writes_no_latent(kernels, generator, stored):
    args = make_rows(generator, LATENTS[0], torch.float32)
    args[7][:] = -1
    cache = empty_cache(LATENTS[0], stored or torch.float32)
    write(kernels, args, cache[1:])  # a mistake would write a row before these blocks
    assert not cache.view(torch.uint8).any()
    assert stored is None or not kv_scales(cache).any()
