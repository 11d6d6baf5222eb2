"""Torch's vector math library."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

_LOCK = threading.Lock()


def start_vector_math() -> None:
    """Make MKL, which torch calls for cosines and other functions, choose its code for this processor now.

    MKL chooses at its first call, without a lock. A thread that reads an unfinished choice runs another kernel, on
    AVX-512 one with half of the bits (errors up to 1.5e-4).
    """
    with _LOCK:
        torch.ones(1).cos()  # one element: computed on the calling thread


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute on the calling thread alone."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
