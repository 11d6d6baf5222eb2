"""Idle threads use no processor time."""

import os
import sys
import threading
from pathlib import Path

import pytest
import torch
from kernel_backends import compiled_kernels

IDLE_SECONDS = 1.0
MOST_OF_IT = 0.05  # a spinning thread would use all of it; an idle interpreter uses less than a thousandth


def seconds_of_kernel_threads():
    """Return the processor time of all threads of this process except Python's own, which may have work."""
    pythons = {str(thread.native_id) for thread in threading.enumerate()}
    tasks = [task for task in Path("/proc/self/task").iterdir() if task.name not in pythons]
    fields = [(task / "stat").read_text().rpartition(")")[2].split() for task in tasks]
    return len(tasks), sum(int(each[11]) + int(each[12]) for each in fields) / os.sysconf("SC_CLK_TCK")


@pytest.mark.turn(12)
@pytest.mark.skipif(sys.platform != "linux", reason="the system does not say which thread took how much")
def test_idle_kernel_threads_use_no_cpu(generator):
    kernels = compiled_kernels(num_threads=2)
    packed = kernels.pack_linear(torch.randn(4096, 512, generator=generator).bfloat16())
    for rows in (1, 64):
        kernels.linear(torch.randn(rows, 512, generator=generator).bfloat16(), packed)
    # The wait never succeeds: its processor time is measured.
    num_threads, before = seconds_of_kernel_threads()
    assert num_threads
    assert not threading.Event().wait(IDLE_SECONDS)
    assert seconds_of_kernel_threads()[1] - before < MOST_OF_IT * IDLE_SECONDS
