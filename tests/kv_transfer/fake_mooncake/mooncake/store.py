"""A fake of Mooncake. Its pool is the folder OCTAVO_FAKE_POOL; further files in it control its behaviour.

preferred.segment: the segment that the last call preferred. CALL.codes: codes that a call returns instead of its own.
CALL.hangs: the call waits until the file is removed.
"""

import ctypes
import json
import os
import time
from pathlib import Path


class ReplicateConfig:
    preferred_segment = ""


class MooncakeDistributedStore:
    def __init__(self):
        self.pool = Path(os.environ["OCTAVO_FAKE_POOL"])

    def _told(self, call, codes):
        while (self.pool / f"{call}.hangs").exists():
            time.sleep(0.005)
        told = self.pool / f"{call}.codes"
        return json.loads(told.read_text()) if told.exists() else codes

    def setup(self, *_):
        return self._told("setup", 0)

    def register_buffer(self, *_):
        return self._told("register", 0)

    def get_hostname(self):
        return "here:1"

    def batch_put_from(self, keys, addresses, sizes, config):
        (self.pool / "preferred.segment").write_text(config.preferred_segment)
        codes = self._told("put", [0] * len(keys))
        for key, address, size, code in zip(keys, addresses, sizes, codes, strict=False):
            if not code and not (self.pool / key).exists():
                (self.pool / key).write_bytes(ctypes.string_at(address, size))
        return codes

    def batch_get_into(self, keys, addresses, sizes):
        codes = []
        for key, address, size in zip(keys, addresses, sizes, strict=True):
            if not (self.pool / key).exists():
                codes.append(-704)
                continue
            value = (self.pool / key).read_bytes()
            if len(value) <= size:
                ctypes.memmove(address, value, len(value))
            codes.append(len(value) if len(value) <= size else -600)
        return self._told("get", codes)

    def batch_is_exist(self, keys):
        return self._told("has", [int((self.pool / key).exists()) for key in keys])

    def batch_remove(self, keys, force):
        if not force:
            raise AssertionError
        for key in keys:
            (self.pool / key).unlink(missing_ok=True)
        return self._told("remove", [0] * len(keys))

    def close(self):
        return self._told("close", 0)
