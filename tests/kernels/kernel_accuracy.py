"""How exact a result must be: measured, not guessed."""

import torch


def assert_as_exact_as_torch(actual, plain, expected, scale=None):
    """Hold `actual` to twice the error that plain torch makes in the same dtype, or one unit in the last place.

    expected: float64. scale: the size of what was summed, where that is larger than the result (cancellation).
    """
    assert actual.dtype == plain.dtype
    assert actual.shape == plain.shape
    assert torch.equal(actual.isnan(), expected.isnan())
    allowed = 2 * (plain.double() - expected).abs().max()
    unit = torch.finfo(actual.dtype).eps * (expected.abs() if scale is None else scale)
    error = (actual.double() - expected).abs()
    assert (error <= allowed + unit).all(), f"error {error.max():.3g}, plain torch {allowed / 2:.3g}"
