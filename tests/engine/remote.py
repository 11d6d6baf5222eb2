"""Engines with a fake executor in a child process. This file imports little, because child processes import it."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from fakes import make_engine

from octavo.config import EngineConfig
from octavo.engine.health import Patience
from octavo.engine.llm_engine import Engine
from octavo.engine.remote_core import RemoteCore

SCRIPT = Path(__file__).with_name("fake_engine_process.py")
QUICK = Patience(frozen=1.5, dead=3.0, restarts=(0.05, 0.1))


def make_remote(patience=QUICK, **options):
    return RemoteCore([sys.executable, str(SCRIPT), json.dumps(options)], EngineConfig(), patience)


def start_engine(core, progress=None):
    """Start the process of a core; return an engine with a fake tokenizer on top of it."""
    engine = make_engine()  # for its text side
    core.start(lambda: None, progress)
    return Engine(core, engine.input_processor, engine.output_processor, time.monotonic)
