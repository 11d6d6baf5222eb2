"""What weights are rounded to is fixed: kept weights on disk are told from older ones by a version alone."""

import hashlib

import pytest
import torch

from octavo.kernels.quantization import ROUNDING_VERSION, quantize_int4, quantize_int8

WEIGHT = ((torch.arange(96 * 70, dtype=torch.int64) * 7919 % 2003 - 1001).float() / 512).view(96, 70).bfloat16()


@pytest.mark.parametrize(
    ("rounded", "digest"),
    [(quantize_int8(WEIGHT), "a9c2b5e8e15065ff"), (quantize_int4(WEIGHT), "240049daaa033d85")],
    ids=["int8", "int4"],
)
def test_rounded_bytes_change_with_the_version_only(rounded, digest):
    scales = rounded.scales.float().numpy().tobytes()
    found = hashlib.blake2b(rounded.values.numpy().tobytes() + scales, digest_size=8).hexdigest()
    assert (ROUNDING_VERSION, found) == (1, digest), "count ROUNDING_VERSION up, then put the new digest here"
