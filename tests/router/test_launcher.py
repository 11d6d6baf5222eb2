"""Child processes of a router: a silent one is restarted."""

from __future__ import annotations

import psutil
import pytest
from running import wait_until

from octavo.router.launcher import LocalReplicas

URL = "http://127.0.0.1:1"


@pytest.mark.turn(12)
def test_frozen_replica_is_killed_and_restarted(tmp_path, caplog):
    pids = tmp_path / "pids"
    pids.touch()
    with LocalReplicas({URL: ["sh", "-c", f"echo $$ >> {pids}; exec sleep 60"]}, {"PATH": "/bin:/usr/bin"}) as replicas:
        wait_until(lambda: pids.read_text().endswith("\n"), "it runs")
        first = psutil.Process(int(pids.read_text()))
        first.suspend()
        replicas.silent(URL, 7)  # too early: it may be slow
        replicas.silent("http://127.0.0.1:2", 100)  # not an address of a child
        assert "killing it" not in caplog.text
        replicas.silent(URL, 8)
        assert "killing it" in caplog.text
        wait_until(lambda: pids.read_text().count("\n") == 2, "another one runs")
        assert not first.is_running()
        assert not replicas.has_failed
