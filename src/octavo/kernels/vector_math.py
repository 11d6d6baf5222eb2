"""Start torch's vector math library on one thread, and compute tables on one thread."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

_LOCK = threading.Lock()


def start_vector_math() -> None:
    """Let MKL, which torch calls for cosines and other functions, choose its code for this processor.

    MKL makes the choice at its first call, without a lock: `mkl_vml_serv_cpu_detect` stores the number of the
    processor and then replaces it with an index into its table of kernels. A second thread that reads the number
    between the two stores takes another kernel, on AVX-512 one for AVX2 that has half of the bits (errors up to
    1.5e-4). If torch makes that first call from several threads, a part of a rotary table can be wrong, in about one
    process of several thousand, until the process ends. After this call the choice is fixed.
    """
    with _LOCK:
        torch.ones(1).cos()  # one element: torch computes it on the calling thread


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute on the calling thread alone until the block ends."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
