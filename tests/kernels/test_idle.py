"""Threads that have nothing to do take no time from others."""

import threading
import time

import torch
from kernel_backends import compiled_kernels

IDLE_SECONDS = 1.0
MOST_OF_IT = 0.05  # a thread that spun would take all of it; an interpreter at rest takes less than a thousandth


def test_threads_sleep_once_their_work_is_done(generator):
    kernels = compiled_kernels(num_threads=2)
    packed = kernels.pack_linear(torch.randn(4096, 512, generator=generator).bfloat16())
    for rows in (1, 64):
        kernels.linear(torch.randn(rows, 512, generator=generator).bfloat16(), packed)
    # What is waited for never comes: the waiting is what is measured, in the time of all threads of this process.
    before = time.process_time()
    assert not threading.Event().wait(IDLE_SECONDS)
    assert time.process_time() - before < MOST_OF_IT * IDLE_SECONDS
