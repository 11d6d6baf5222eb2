from __future__ import annotations

import inspect
import threading
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from running import run_server

import octavo

if TYPE_CHECKING:
    from types import FrameType

SOURCE = str(Path(octavo.__file__).parent)


@pytest.mark.parametrize("prompts", ["one", ["one", "two"]], ids=["one prompt", "two prompts"])
def test_streamed_update_passes_three_async_generators(prompts: Any) -> None:
    """Between the core's client and the socket: one of the engine, one of the service, one that encodes events."""
    resumed = Counter[str]()

    def note(frame: FrameType, event: str, _arg: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_flags & inspect.CO_ASYNC_GENERATOR and code.co_filename.startswith(SOURCE):
            resumed[code.co_qualname] += 1

    threading.setprofile(note)
    try:
        with run_server() as running, running.http() as http:
            body = {"prompt": prompts, "stream": True, "max_tokens": 20}
            assert http.post("/v1/completions", json=body).text.endswith("[DONE]\n\n")
    finally:
        threading.setprofile(None)
    assert {name for name, count in resumed.items() if count >= 20} == {
        "AsyncEngine.generate",
        "Service.generate",
        "_events",
    }
