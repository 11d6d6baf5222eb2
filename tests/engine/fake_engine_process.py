"""An engine process with a fake executor: python fake_engine_process.py '{"step_s": 0.01, "max_num_seqs": 2}'.

- "fail": building raises ConfigError.
- "crash": the process exits with status 3. "crash_if": a path; the same if the file exists.
- "hang": the process never becomes ready. "hang_if": a path; the same if the file exists.
- "hang_between_steps": the main loop hangs once it has a request.
- "wedged": no request is ever scheduled.
- "goes_on": a path; each step waits for this file.
- "is_lively": the process beats, and looks up when idle, five times as often.
"""

import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from fakes import FakeExecutor, make_core

from octavo.data.scheduler_output import CachedRequestData, SchedulerOutput
from octavo.engine import core_process
from octavo.errors import ConfigError


class Gate:
    """Replaces the event that a step of the fake executor waits for: a file that another process creates."""

    def __init__(self, path):
        self._path = Path(path)

    def wait(self, timeout):
        end = time.monotonic() + timeout
        while not self._path.exists() and time.monotonic() < end:
            time.sleep(0.01)
        return self._path.exists()


def build(_config, progress):
    options = json.loads(sys.argv[1])
    if options.pop("is_lively", False):
        core_process.BEAT_S, core_process.IDLE_CHECK_MS = core_process.BEAT_S / 5, core_process.IDLE_CHECK_MS // 5
    progress(1, 2)
    if options.pop("fail", False):
        raise ConfigError("nothing of this fits")
    if options.pop("crash", False) or Path(options.pop("crash_if", "/nowhere")).exists():
        os._exit(3)
    if options.pop("hang", False) or Path(options.pop("hang_if", "/nowhere")).exists():
        time.sleep(60)
    is_wedged, hangs = options.pop("wedged", False), options.pop("hang_between_steps", False)
    executor = FakeExecutor(step_s=options.pop("step_s", 0.0))
    if (path := options.pop("goes_on", None)) is not None:
        executor.gate = Gate(path)
    core = make_core(executor, **options)
    if is_wedged:
        core.scheduler.schedule = lambda: SchedulerOutput(1, [], CachedRequestData.make_empty(), {}, 0)
    if hangs:
        core.has_work = lambda: core.scheduler.has_work() and time.sleep(60)
    return core


core_process.run_core_process(build)
