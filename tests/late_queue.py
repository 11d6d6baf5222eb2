"""Devices with late copies, for tests on a CPU: copies are enqueued, and made when a thread waits for them."""

from __future__ import annotations

from functools import partial

import torch


class OverwrittenError(Exception):
    """The source of a copy was changed before the device read it."""


class Place:
    """A mark after the first `number` copies."""

    def __init__(self, queue, number):
        self.queue, self.number = queue, number

    def synchronize(self):
        """Run the device up to this mark."""
        self.queue.run_to(self.number)


class LateQueue:
    """A `DeviceQueue` that computes and fills device tensors immediately.

    The source of a copy to the device must not change before the device runs the copy, and copies to the host are done
    only then. num_waits: number of waits for copies that were not made yet. num_to_device: copies to the device so far.
    """

    def __init__(self):
        self.num_waits = self.num_to_device = 0
        self.copies = []
        self.num_made = 0
        self.memory = {}  # by address; kept, so that no address is reused

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


class LateStream(LateQueue):
    """A `CopyStream` that does all of its work late.

    log: the kinds of enqueued work, in order. on_wait: called by a thread that waits for work.
    """

    def __init__(self):
        super().__init__()
        self.log = []
        self.on_wait = lambda: None

    def enqueue(self, kind, work):
        self.log.append(kind)
        self.copies.append(work)

    def wait(self, mark):
        self.enqueue("wait", mark.synchronize)

    def copy(self, target, source):
        if self.is_host(target) == self.is_host(source):
            raise ValueError("one of the two has to be host memory of this stream")
        if self.is_host(source):
            self.copies.append(partial(self.read, source, source.clone()))
        self.enqueue("to host" if self.is_host(target) else "to device", partial(target.copy_, source))

    def gather(self, target, source, rows):
        self.enqueue("gather", lambda: torch.index_select(source, 0, rows, out=target))

    def scatter(self, target, rows, source):
        self.enqueue("scatter", lambda: target.index_copy_(0, rows, source))

    def mark(self):
        self.log.append("mark")
        return super().mark()

    def run_to(self, number):
        if number > self.num_made:
            self.on_wait()
        super().run_to(number)
