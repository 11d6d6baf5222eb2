"""Triton's interpreter for tests: what it does again and again without need is done once."""

import contextlib
import warnings
from dataclasses import replace

import torch


def kernels_device():
    """Return where kernels in Triton run: on the CPU in the interpreter, else on the GPU."""
    from octavo.kernels.triton.backend import is_interpreted

    return torch.device("cpu" if is_interpreted() else "cuda")


@contextlib.contextmanager
def interpreted_kernels():
    """Yield the kernels in Triton, interpreted in half the time on the CPU; what is compiled is left as it is."""
    from triton.runtime import interpreter
    from triton.runtime.interpreter import InterpretedFunction

    from octavo.kernels.triton.backend import TritonKernels

    patched = set()

    def call(self, *args, **kwargs):
        """Call a device function: the kernel that calls it has patched `triton.language`, but for other names of it."""
        if self.fn.__module__ not in patched:
            interpreter._patch_lang(self.fn)
            patched.add(self.fn.__module__)
        return self.rewrite()(*args, **kwargs)

    before, options = InterpretedFunction.__call__, interpreter.interpreter_builder.options
    InterpretedFunction.__call__ = call
    interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)  # of each sum, in 64 bits
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # of operations that plain torch computes
            kernels = TritonKernels()
        yield kernels
    finally:
        InterpretedFunction.__call__ = before
        interpreter.interpreter_builder.options = options
