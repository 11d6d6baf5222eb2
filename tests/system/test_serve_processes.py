"""`octavo serve` as a user starts it, on the built-in model: both of its processes are killed, frozen and told to end.

Figure 4 of the house's promises: every request terminal within 10 s, not ready within 5 s, no orphans, right tokens.
"""

from __future__ import annotations

import json
import signal
import socket

import psutil
import pytest
from serving_process import Stream, serve


@pytest.fixture
def served():
    with serve() as server:
        yield server


@pytest.fixture(scope="module")
def restarted():
    """A server that outlives its engines, on all addresses and with a key."""
    with serve("--host", "0.0.0.0", key="a-key", OCTAVO_API_KEY="a-key") as server:
        yield server


@pytest.mark.sweep(2)
@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGSTOP], ids=str)
def test_figure_4_an_engine_that_dies_or_freezes(restarted, kind):
    served = restarted
    assert served.answer() == "12 + 30 = 42"
    streams, engine = [Stream(served) for _ in range(3)], served.engine
    engine.send_signal(kind)
    served.wait_until(lambda: not served.is_ready(), 5)
    for stream in streams:
        stream.ended_within(10)
        assert stream.events[-1] == "[DONE]"
        error = json.loads(stream.events[-2])["error"]
        assert (error["type"], error["code"]) == ("server_error", "engine_restarting")
    assert served.http.get("/health").status_code == 200
    served._wait(served.is_ready)
    assert served.engine.pid != engine.pid
    assert served.answer() == "12 + 30 = 42"
    assert not psutil.pid_exists(engine.pid)


def test_s2_both_processes_listen_on_the_api_port_alone(restarted):
    restarted.answer()
    processes = [psutil.Process(restarted.process.pid), restarted.engine]
    listening = [
        (each.laddr.ip, each.laddr.port)
        for process in processes
        for each in process.net_connections(kind="inet")
        if each.status == psutil.CONN_LISTEN or each.type == socket.SOCK_DGRAM
    ]
    assert listening == [("0.0.0.0", restarted.http.base_url.port)]


def test_f25_a_killed_server_leaves_no_engine_behind(served):
    stream, engine = Stream(served), served.engine
    served.process.kill()
    stream.ended_within(10)
    engine.wait(5)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGINT], ids=lambda kind: kind.name)
def test_f26_a_server_that_is_told_to_end_ends_its_streams_and_its_engine(served, kind):
    stream, engine = Stream(served), served.engine
    served.process.send_signal(kind)
    stream.ended_within(15)
    assert stream.events[-1] == "[DONE]"
    assert json.loads(stream.events[-2])["error"]["code"] == "server_closing"
    assert served.process.wait(10) == 0
    assert not engine.is_running()
    assert "Traceback" not in "".join(served.log)
