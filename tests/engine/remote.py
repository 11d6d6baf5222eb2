"""An engine whose process has a fake executor. It imports little, for processes that start one."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from fakes import make_engine

from octavo.config import EngineConfig
from octavo.engine.health import Patience
from octavo.engine.remote_engine import RemoteEngine

SCRIPT = Path(__file__).with_name("fake_engine_process.py")
QUICK = Patience(frozen=1.5, dead=3.0, restarts=(0.05, 0.1))


def make_remote(patience=QUICK, **options):
    engine = make_engine()  # for its text side
    return RemoteEngine(
        [sys.executable, str(SCRIPT), json.dumps(options)],
        EngineConfig(),
        lambda: (engine.input_processor, engine.output_processor),
        patience=patience,
    )
