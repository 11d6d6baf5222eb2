"""How exact a result must be: compared with measured errors of plain torch."""

import torch

LEAN = 0.25  # of an error's usual size: truncation has a bias of 1.7 of it, rounding to nearest has none
NOISE = 4.0  # standard deviations of a sum of unbiased errors


def assert_as_exact_as_torch(actual, plain, exact):
    """Check that the errors of `actual` are at most twice those of plain torch in the same dtype.

    exact: float64; the last dimension is a row. Three sizes are compared:
    - the norm of all errors;
    - the norm of the worst row's errors relative to its results, so that small rows count as much as large ones;
    - the sum of errors away from zero. Errors of truncation have only twice the norm of those of rounding to nearest,
      but all have the same direction.

    If plain torch happens to be exact for a few numbers, one unit in the last place of the largest is allowed.
    """
    _check(actual.dtype == plain.dtype, f"dtypes {actual.dtype} and {plain.dtype}")
    _check(actual.shape == plain.shape == exact.shape, f"shapes {actual.shape}, {plain.shape} and {exact.shape}")
    _check(torch.equal(actual.isnan(), exact.isnan()), "other results are no numbers")
    unit = torch.finfo(plain.dtype).eps
    actual, plain, exact = (each.double().reshape(-1, exact.shape[-1]).nan_to_num() for each in (actual, plain, exact))
    ours, theirs = actual - exact, plain - exact
    most = 2 * theirs.norm() + unit * exact.abs().max()
    _check(ours.norm() <= most, f"errors of norm {ours.norm():.3g}, plain torch {theirs.norm():.3g}")
    size = exact.norm(dim=1).clamp(min=torch.finfo(torch.float64).tiny)
    worst, usual = (each.norm(dim=1) / size for each in (ours, theirs))
    row = int(worst.argmax())
    off = f"row {row} is off by {worst[row]:.3g}, plain torch {usual.max():.3g}"
    _check(worst[row] <= 2 * usual.max() + unit, off)
    lean, their_lean = ((each * exact.sign()).sum().abs() for each in (ours, theirs))
    allowed = 2 * their_lean + theirs.norm() * (LEAN * exact.numel() ** 0.5 + NOISE) + unit * exact.abs().max()
    _check(lean <= allowed, f"errors lean by {lean:.3g}, those of plain torch by {their_lean:.3g}")


def _check(holds, what):
    """Raise AssertionError unless a condition holds; `assert` in this file would be removed by `python -O`."""
    if not holds:
        raise AssertionError(what)
