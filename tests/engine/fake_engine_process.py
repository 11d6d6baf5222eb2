"""An engine process around a fake executor: python fake_engine_process.py '{"step_s": 0.01, "max_num_seqs": 2}'.

"fail": building raises ConfigError; "crash": it ends with status 3 instead; "hang": it never gets ready.
"""

import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from fakes import FakeExecutor, make_engine

from octavo.engine.core_process import run_core_process
from octavo.errors import ConfigError


def build(_config, progress):
    options = json.loads(sys.argv[1])
    progress(1, 2)
    if options.pop("fail", False):
        raise ConfigError("nothing of this fits")
    if options.pop("crash", False):
        os._exit(3)
    if options.pop("hang", False):
        time.sleep(60)
    return make_engine(FakeExecutor(step_s=options.pop("step_s", 0.0)), **options).core


run_core_process(build)
