"""A device that makes its copies late, for tests on a CPU: they are enqueued, and made when somebody waits for them."""

from __future__ import annotations

from functools import partial

import torch


class OverwrittenError(Exception):
    """What a copy was to read was changed before the device read it."""


class Place:
    """A mark: behind the first `number` copies."""

    def __init__(self, queue, number):
        self.queue, self.number = queue, number

    def synchronize(self):
        """Let the device go on to this place."""
        self.queue.run_to(self.number)


class LateQueue:
    """A `DeviceQueue`. What is computed of device tensors is computed at once, so these are filled at once, too.

    But what a copy to the device reads has to be the same when the device comes to it, and what it copies to the host
    is there only then. num_waits: how often somebody waited for copies that were not made yet. num_to_device: copies to
    the device so far.
    """

    def __init__(self):
        self.num_waits = self.num_to_device = 0
        self.copies = []
        self.num_made = 0
        self.memory = {}  # by address; it is kept, so that none is another's later

    def host_memory(self, num_bytes):
        memory = torch.full((num_bytes,), 0xA5, dtype=torch.uint8)
        self.memory[memory.data_ptr()] = memory
        return memory

    def copy(self, target, source):
        if not source.numel():
            return
        if self.is_host(target) == self.is_host(source):
            raise ValueError("one of the two has to be host memory of this queue")
        content = source.clone()
        if self.is_host(target):
            self.copies.append(partial(target.copy_, content))
        else:
            target.copy_(source)
            self.num_to_device += 1
            self.copies.append(partial(self.read, source, content))

    def is_host(self, tensor):
        return tensor.untyped_storage().data_ptr() in self.memory

    @staticmethod
    def read(source, content):
        if not torch.equal(source, content):
            raise OverwrittenError(f"{content.tolist()} became {source.tolist()}")

    def mark(self):
        return Place(self, len(self.copies))

    def run_to(self, number):
        self.num_waits += number > self.num_made
        while self.num_made < number:
            self.copies[self.num_made]()
            self.copies[self.num_made] = None
            self.num_made += 1
