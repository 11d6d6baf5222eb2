"""Kernels with a deliberate mistake, to show that tests detect it."""

import importlib
import importlib.util
import sys
from pathlib import Path

from triton_interpreter import partition


def broken(tmp_path, module, old, new, *users):
    """Return a copy of a module of octavo.kernels.triton in which the only occurrence of `old` is replaced by `new`.

    users: modules that call it, each calling the one before. The copy of the last one is returned; it computes with the
    mistake.
    """
    made = _copy(tmp_path, module, old, new)
    for user in users:
        calling = _copy(tmp_path, user)
        vars(calling).update(replaced(vars(calling), module, made))
        module, made = user, calling
    return made


def replaced(namespace, module, made):
    """Return the replacements for a namespace that uses a module or its functions: by name, those of the copy
    `made`.
    """
    right = importlib.import_module(f"octavo.kernels.triton.{module}")
    own = {name: each for name, each in vars(made).items() if callable(each) and vars(right)[name] is not each}
    found = {name: each for name, each in own.items() if name in namespace and namespace[name] is vars(right)[name]}
    found |= {name: made for name, value in namespace.items() if value is right}
    if not found:
        raise AssertionError(f"nothing of {module} is called")
    return found


def _copy(tmp_path, module, old="", new=""):
    source = importlib.util.find_spec(f"octavo.kernels.triton.{module}").origin
    text = Path(source).read_text(encoding="utf-8")
    if old and text.count(old) != 1:
        raise AssertionError(f"{text.count(old)} times in {module}: {old}")
    path = tmp_path / f"broken_{module}.py"  # a file, because Triton reads the source of its kernels
    path.write_text(text.replace(old, new) if old else text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    made = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = made  # dataclasses look up the types of their fields there
    try:
        spec.loader.exec_module(made)
    finally:
        del sys.modules[path.stem]
    if module == "matmul":
        made.PARTITION = partition()
    return made


class NothingRuns(dict):
    """A kernel that does nothing, on any grid."""

    def __missing__(self, grid):
        return lambda *_arguments, **_options: None
