"""Triton's interpreter for tests: repeated work is done only once, and products are exact."""

import contextlib
import functools
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

SHORT_PARTITION = 128  # of K: two tiles, four of float32. The interpreter also multiplies the padding of a row

sys.path.append(str(Path(__file__).parents[1] / "tools"))  # of `interpreted_graphs`


def kernels_device():
    """Return the device of the Triton kernels: the CPU in the interpreter, otherwise the GPU."""
    from octavo.kernels.triton.backend import is_interpreted

    return torch.device("cpu" if is_interpreted() else "cuda")


def partition():
    """Return the length of a product's partitions in tests; on a GPU it is the one in use."""
    from octavo.kernels.triton import matmul
    from octavo.kernels.triton.backend import is_interpreted

    return SHORT_PARTITION if is_interpreted() else matmul.PARTITION


def dot(a, b, d, _input_precision, _max_num_imprecise_acc):
    """Return the product of two tiles plus a third one, with each sum in the order of k for every row.

    A GPU does the same. The interpreter's own version uses numpy, whose library sums rows in other orders, for example
    on Zen 3. Zeros that pad a tile add nothing to finite numbers, and are omitted.
    """
    from triton.runtime.interpreter import TensorHandle

    left, right = a.data.astype(d.data.dtype), b.data.astype(d.data.dtype)
    total = np.zeros_like(d.data)
    if left.ndim > 2 or not np.isfinite(right).all():
        total += ordered_product(left, right)
    else:
        rows, counted = left.any(axis=1), left.any(axis=0)
        total[rows] = ordered_product(left[rows][:, counted], right[counted])
    return TensorHandle(total + d.data, d.dtype.scalar)


def ordered_product(left, right):
    total = np.zeros((*left.shape[:-1], right.shape[-1]), left.dtype)
    for k in range(left.shape[-1]):
        total += left[..., :, k : k + 1] * right[..., k : k + 1, :]
    return total


def faster_conversion(convert):
    """Return the interpreter's conversion of floats, with bfloat16 as the upper half of float32."""

    def converted(values, given, wanted, rounding):
        if (given.name, wanted.name, rounding) == ("bf16", "fp32", None):
            return values.view(np.uint16).astype(np.uint32) << 16
        if (given.name, wanted.name, rounding) == ("fp32", "bf16", None):
            return (values.view(np.uint32) >> 16).astype(np.uint16)
        return convert(values, given, wanted, rounding)

    return converted


@functools.cache
def remember_types():
    """Make the types of tiles, and the shapes of tensors, only once and not at each operation.

    Only for the interpreter: a compiler in this process would get them too.
    """
    from triton.language import core
    from triton.runtime import interpreter

    made, shapes, dtypes = {}, {}, {}
    make_type, make_tensor, numpy_dtype = core.block_type.__init__, core.tensor.__init__, interpreter._get_np_dtype

    def new_type(cls, element_ty, shape):
        key = (cls, element_ty.name, *(getattr(size, "value", size) for size in shape))
        if key not in made:
            new = object.__new__(cls)
            make_type(new, element_ty, shape)  # raises for an invalid shape
            made[key] = new
        return made[key]

    def new_tensor(self, handle, type):  # noqa: A002  its name there
        key = type.name if type.is_block() else None
        if key not in shapes:
            make_tensor(self, handle, type)
            shapes[key] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shapes[key]

    def new_numpy_dtype(type):  # noqa: A002  its name there
        if type.name not in dtypes:
            dtypes[type.name] = numpy_dtype(type)
        return dtypes[type.name]

    core.block_type.__new__, core.block_type.__init__ = new_type, lambda *_: None
    core.tensor.__init__ = new_tensor
    interpreter._get_np_dtype = new_numpy_dtype


_entered: list[None] = []
_undone_at_last = contextlib.ExitStack()


@contextlib.contextmanager
def interpreted_kernels():
    """Yield the interpreted Triton kernels, on the CPU in a fraction of the time; compiled kernels are unchanged.

    The interpreter also has graphs, and short partitions of products. The last user to exit restores everything:
    fixtures of a session and of a module do not end in the order in which they began.
    """
    from octavo.kernels.triton.backend import TritonKernels

    if not _entered:
        _undone_at_last.enter_context(_patched_interpreter())
    _entered.append(None)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # of operations that plain torch computes
            kernels = TritonKernels()
        yield kernels
    finally:
        _entered.pop()
        if not _entered:
            _undone_at_last.close()


@contextlib.contextmanager
def _patched_interpreter():
    from interpreted_graphs import InterpretedGraphPool
    from triton.runtime import interpreter
    from triton.runtime.interpreter import InterpretedFunction

    from octavo.kernels.triton import matmul
    from octavo.kernels.triton.backend import TritonKernels, is_interpreted

    if is_interpreted():
        remember_types()
    patched = set()

    def call(self, *args, **kwargs):
        """Call a device function. The calling kernel has patched `triton.language`, except for other names of it."""
        if self.fn.__module__ not in patched:
            interpreter._patch_lang(self.fn)
            patched.add(self.fn.__module__)
        return self.rewrite()(*args, **kwargs)

    builder = interpreter.interpreter_builder
    before, options, own_dot = InterpretedFunction.__call__, builder.options, builder.create_dot
    own_conversion = interpreter._convert_float
    interpreter._convert_float = faster_conversion(own_conversion)
    InterpretedFunction.__call__ = call
    builder.options = replace(options, sanitize_overflow=False)  # of each sum, in 64 bits
    builder.create_dot = dot
    graph_pool, own_partition = TritonKernels.graph_pool, matmul.PARTITION
    matmul.PARTITION = partition()
    if is_interpreted():
        TritonKernels.graph_pool = lambda _device: InterpretedGraphPool()
    try:
        yield
    finally:
        InterpretedFunction.__call__ = before
        builder.options = options
        builder.create_dot = own_dot
        interpreter._convert_float = own_conversion
        TritonKernels.graph_pool, matmul.PARTITION = graph_pool, own_partition
