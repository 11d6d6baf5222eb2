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
    """Make MKL, which computes torch's cosines, choose its code for this processor now.

    MKL chooses at its first call, without a lock. A thread that reads an unfinished choice runs a wrong kernel, on
    AVX-512 one with errors up to 1.5e-4.
    """
    with _LOCK:
        torch.ones(1).cos()  # one element, so computed on this thread


@contextmanager
def one_thread() -> Iterator[None]:
    """Make torch use the calling thread alone."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
