"""Kernels with a mistake in them, to see that tests find it."""

import importlib.util
from pathlib import Path


def broken(tmp_path, module, old, new):
    """Return a copy of one of octavo.kernels.triton's modules in which `old`, which stands there once, is `new`."""
    source = importlib.util.find_spec(f"octavo.kernels.triton.{module}").origin
    text = Path(source).read_text(encoding="utf-8")
    if text.count(old) != 1:
        raise AssertionError(f"{text.count(old)} times in {module}: {old}")
    path = tmp_path / f"broken_{module}.py"  # a file: Triton reads the source of its kernels
    path.write_text(text.replace(old, new), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made
