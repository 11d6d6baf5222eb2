"""The child process that uses Ray, played by a small program: its reports, failures and restarts."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time

import msgspec
import pytest
from running import wait_until

from octavo.errors import ConfigError
from octavo.ray import process
from octavo.ray.messages import Order, Report, Restart, Search, Settings
from octavo.ray.process import RayProcess, check_ray_installed
from octavo.ray.replicas import RayReplicas

FIRST = Search("10.0.0.1:6379", "info", "text")
WELL = '{"urls":["http://a"],"is_connected":true,"is_placed":true,"was_ready":true}'
CONNECTED = '{"is_connected":true}'
PLACED = '{"is_connected":true,"is_placed":true}'
SETTINGS = Settings(
    address=None,
    words=("m",),
    environment={},
    num_replicas=1,
    min_replicas=1,
    max_replicas=1,
    target_queue_time_s=1.0,
    num_threads=None,
    num_ranks=1,
    uses_gpu=None,
    operator_key=None,
    timeout_s=1.0,
    start_s=3600.0,
    stop_s=0.0,
    drain_s=0.0,
    log_level="info",
    log_format="text",
)
ECHO = "import sys\nprint('{}', flush=True)\nfor line in sys.stdin: open(sys.argv[1], 'a').write(line)".format


def playing(program, *words, made=None, **limits):
    """Return a `RayProcess` with a program in place of the module."""
    made = made or RayProcess("unused", FIRST, **limits)
    made._command = [sys.executable, "-c", program, *words]
    return made


def urls(made):
    return asyncio.run(made.urls())


def test_messages_reach_child_and_reports_its_parent(tmp_path):
    path = tmp_path / "messages"
    with playing(ECHO(WELL), str(path)) as made:
        wait_until(lambda: urls(made) == ["http://a"], "the report has arrived")
        assert not made.has_failed
        made.send(Order(silent="http://a"))
    first, second = path.read_text().splitlines()
    assert msgspec.json.decode(first, type=Search) == FIRST
    assert second == '{"silent":"http://a"}'
    assert made._child.returncode == 0
    made.send(Order(reload=True))  # does nothing
    assert len(path.read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("""print('{"failure":"there is no room"}')""", "there is no room"),
        # one engine was ready, and another one found no room
        ("""print('{"was_ready":true}')\nprint('{"failure":"there is no room"}')""", "there is no room"),
        ("print('hello', flush=True)\ninput()\ninput()", "wrote a line that is no report: b'hello"),
        (r"import os; os.write(1, b'\xff\n'); input(); input()", "wrote a line that is no report"),
        ("raise SystemExit(3)", "the process that uses Ray has exited with status 3"),
    ],
)
def test_failed_start_raises_its_reason(program, expected, caplog):
    with pytest.raises(ConfigError, match=expected), playing(program):
        pass
    assert caplog.text == ""


def test_process_that_cannot_be_started_is_a_failure():
    made = RayProcess("unused", FIRST)
    made._command = ["/no/such/program"]
    with pytest.raises(ConfigError, match=r"the process that uses Ray cannot be started: .*/no/such/program"), made:
        pass


def test_silent_child_is_killed_at_its_deadline(monkeypatch):
    monkeypatch.setattr(process, "_CONNECT_S", 0.2)
    monkeypatch.setattr(process, "_FIRST_PAUSE_S", 0.1)
    made = playing("import time\ntime.sleep(60)")
    with pytest.raises(ConfigError, match=r"the Ray cluster has not answered within 0\.2 s"), made:
        pass
    assert made._child.returncode == -signal.SIGKILL
    assert not made._thread.is_alive()


def test_child_that_finds_no_place_in_time_may_end_itself(tmp_path, monkeypatch):
    monkeypatch.setattr(process, "_FIRST_PAUSE_S", 0.1)
    monkeypatch.setattr(process, "_LATE_S", 0.1)
    path = tmp_path / "end"
    program = (
        f"import sys, time\nprint('{CONNECTED}', flush=True)\nsys.stdin.read()\ntime.sleep(0.5)\n"
        "open(sys.argv[1], 'w').close()"
    )
    made = playing(program, str(path), start_s=0.1)
    with pytest.raises(ConfigError, match=r"the process that uses Ray has not found places within 0\.2 s"), made:
        pass
    assert made._child.returncode == 0
    assert path.exists()


def test_time_for_places_begins_after_the_connection():
    limits_s = []

    class Changed(threading.Condition):
        def wait_for(self, predicate, timeout=None):
            limits_s.append(timeout)
            return super().wait_for(predicate, timeout)

    made = playing(ECHO(WELL), "/dev/null", start_s=7.0)
    made._changed = Changed()
    with made:
        assert limits_s == [60.0, 37.0]


def test_failure_after_placement_is_logged_and_final(caplog):
    program = f"""print('{PLACED}', flush=True)\nimport time\ntime.sleep(0.2)\nprint('{{"failure":"bad option"}}')"""
    with playing(program) as made:
        wait_until(lambda: made.has_failed, "the failure has arrived")
    assert "bad option" in caplog.text


def test_child_that_was_well_restarts_and_addresses_stay(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(process, "_FIRST_PAUSE_S", 0.05)
    path = tmp_path / "starts"
    program = f"import sys\nopen(sys.argv[1], 'a').write('x')\nprint('{WELL}', flush=True)\nsys.exit(7)"
    with playing(program, str(path)) as made:
        wait_until(lambda: path.exists() and len(path.read_text()) >= 3, "it has restarted twice")
        assert urls(made) == ["http://a"]
        assert not made.has_failed
    assert "has exited with status 7; the next attempt is in 0.05 s" in caplog.text
    assert "has exited with status 7; the next attempt is in 0.1 s" in caplog.text


def test_child_that_ends_before_it_has_read_a_message_restarts(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(process, "_FIRST_PAUSE_S", 0.05)
    path = tmp_path / "sent"
    program = (
        f"import os, sys, time\nos.close(0)\nprint('{WELL}', flush=True)\n"
        "while not os.path.exists(sys.argv[1]): time.sleep(0.01)\nsys.exit(7)"
    )
    with playing(program, str(path)) as made:
        wait_until(lambda: urls(made) == ["http://a"], "the report has arrived")
        made.send(Order(reload=True))
        path.touch()
        wait_until(lambda: "status 7; the next attempt is in 0.1 s" in caplog.text, "it has restarted")
        assert not made.has_failed


def test_failure_of_a_restart_keeps_the_addresses(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(process, "_FIRST_PAUSE_S", 0.05)
    path = tmp_path / "starts"
    failed = '{"failure":"no cluster"}'
    program = (
        "import os, sys\nis_first = not os.path.exists(sys.argv[1])\nopen(sys.argv[1], 'a').write('x')\n"
        f"print('{WELL}' if is_first else '{failed}', flush=True)"
    )
    with playing(program, str(path)) as made:
        wait_until(lambda: "no cluster; the next attempt" in caplog.text, "the second start has failed")
        assert urls(made) == ["http://a"]


@pytest.mark.parametrize("module", ["octavo.ray.driver", "octavo.ray.finder"])
def test_text_that_ray_prints_is_no_report(module, tmp_path):
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "__init__.py").write_text("print('hello', flush=True)\nraise SystemExit(7)\n", encoding="utf-8")
    command = [sys.executable, "-m", module]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (7, b"", b"hello\n")


def test_missing_ray_is_refused(monkeypatch):
    monkeypatch.setattr(process.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"--launcher ray needs ray: pip install 'octavo\[ray\]'"):
        check_ray_installed("--launcher ray")


def replicas(tmp_path, again):
    made = RayReplicas(SETTINGS, again)
    return playing(ECHO(WELL), str(tmp_path / "messages"), made=made)


def orders(tmp_path):
    path = tmp_path / "messages"
    lines = path.read_text().splitlines()[1:] if path.exists() else []
    return [msgspec.json.decode(line, type=Order) for line in lines]


def restart(words):
    return Restart(words=(words,), num_replicas=1, num_threads=None, uses_gpu=None)


def starts(path):
    return [msgspec.json.decode(line, type=Settings) for line in path.read_text().splitlines()]


def test_orders_for_replicas(tmp_path):
    with replicas(tmp_path, lambda: ["n", "--seed", "1"]) as made:
        made.reload()
        made.silent("http://a", 7)  # too early: it may be slow
        made.silent("http://a", 8)
        made.replace()
    words = ("n", "--seed", "1")
    assert orders(tmp_path) == [Order(reload=True), Order(silent="http://a"), Order(words=words)]
    assert made._first.words == ("m",)  # until the child reports that the change is complete


def test_restarted_driver_may_lack_room(tmp_path, monkeypatch):
    monkeypatch.setattr(process, "_FIRST_PAUSE_S", 0.05)
    path = tmp_path / "settings"
    program = f"import sys\nopen(sys.argv[1], 'a').write(input() + '\\n')\nprint('{WELL}', flush=True)"
    with playing(program, str(path), made=RayReplicas(SETTINGS, list)):
        wait_until(lambda: path.exists() and path.read_text().count("\n") >= 2, "it has restarted")
    assert [each.is_again for each in starts(path)[:2]] == [False, True]
    assert starts(path)[0] == SETTINGS


def test_restarted_driver_gets_reported_settings(tmp_path, monkeypatch):
    monkeypatch.setattr(process, "_FIRST_PAUSE_S", 0.05)
    path = tmp_path / "settings"
    kept = Restart(words=("n",), num_replicas=2, num_threads=3, uses_gpu=True)
    well = msgspec.json.encode(Report(is_connected=True, is_placed=True, was_ready=True, restart=kept)).decode()
    program = f"import sys\nopen(sys.argv[1], 'a').write(input() + '\\n')\nprint('{well}', flush=True)"
    with playing(program, str(path), made=RayReplicas(SETTINGS, list)):
        wait_until(lambda: path.exists() and path.read_text().count("\n") >= 2, "it has restarted")
    assert starts(path)[0] == SETTINGS
    changes = msgspec.structs.asdict(kept)
    assert starts(path)[1] == msgspec.structs.replace(SETTINGS, **changes, is_again=True)


@pytest.mark.parametrize("is_replacing", [True, False])
def test_replacement_that_the_end_of_the_driver_interrupts_is_logged(is_replacing, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(process, "_FIRST_PAUSE_S", 0.05)
    well = Report(is_connected=True, is_placed=True, was_ready=True, is_replacing=is_replacing, restart=restart("m"))
    program = "import sys\ninput()\nprint(sys.argv[1], flush=True)\ninput()"
    made = playing(program, msgspec.json.encode(well).decode(), made=RayReplicas(SETTINGS, lambda: ["n"]))
    with made:
        made.replace()
        wait_until(lambda: "the replicas were not replaced: " in caplog.text, "the loss is logged")
        assert made._first.words == ("m",)


def test_replacement_without_a_driver_is_logged(caplog):
    made = RayReplicas(SETTINGS, lambda: ["n"])
    made.replace()
    assert "the replicas were not replaced: the process that uses Ray has ended; send SIGUSR1 again" in caplog.text


def test_replacement_that_has_ended_is_not_logged_as_interrupted(caplog):
    made = RayReplicas(SETTINGS, lambda: ["n"])
    made.send = lambda message: True
    for words in ("n", "m"):  # complete, undone
        made.replace()
        for is_replacing in (False, True):
            made._note(Report(is_replacing=is_replacing, restart=restart("m")))
        made._note(Report(restart=restart(words)))
        assert made._replacement is None
        assert made._settings.words == (words,)
    assert caplog.text == ""


def test_invalid_configuration_replaces_nothing(tmp_path, caplog):
    def again():
        raise ConfigError("no such option")

    with replicas(tmp_path, again) as made:
        made.replace()
    assert orders(tmp_path) == []
    assert "the replicas were not replaced: no such option" in caplog.text


def test_sigusr1_replaces_engines(tmp_path):
    previous = signal.getsignal(signal.SIGUSR1)
    try:
        with replicas(tmp_path, lambda: ["n"]):
            signal.raise_signal(signal.SIGUSR1)
            wait_until(lambda: orders(tmp_path) == [Order(words=("n",))], "the order has arrived")
    finally:
        signal.signal(signal.SIGUSR1, previous)


def test_stop_of_a_child_that_ignores_it_kills_it():
    program = f"print('{WELL}', flush=True)\nimport time\ntime.sleep(60)"
    made = playing(program)
    made._stop_s = 0.2
    with made:
        start = time.monotonic()
    assert made._child.returncode == -signal.SIGKILL
    assert time.monotonic() - start < 30
