"""`octavo serve --launcher ray` on real Ray: answers, a change of the options, other routers, sizes, and bad input."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import httpx
import psutil
import pytest
from ray_nodes import RayNodes, needs_ray
from ray_service import DEADLINE_S, SMALL, BackgroundLoad, engine_processes, known, octavo, wait
from serving_process import SUM, serve

pytestmark = [needs_ray, pytest.mark.xdist_group("ray")]


@pytest.fixture(scope="module")
def cluster():
    with contextlib.closing(RayNodes(1, 4)) as nodes:
        yield nodes


def serve_words(cluster, *words):
    return ("serve", "--launcher", "ray", "--ray-address", cluster.address, *SMALL, *words)


def refusal(*words, environment, seconds=DEADLINE_S):
    """Run a command that cannot start. Return its error, and the seconds that it took."""
    start = time.monotonic()
    command = [sys.executable, "-m", "octavo", *words, "--port", "0"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds, check=False)
    assert done.returncode == 1, done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, done.stderr
    return errors[0], time.monotonic() - start


def ray_processes(folder):
    """Return octavo's processes that use a cluster of the tests."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            words = " ".join(process.cmdline())
            if (
                folder in process.environ().get("RAY_TMPDIR", "")
                and "octavo" in words
                and "octavo.cli.replica" not in words
            ):
                found.append(words)
    return found


def processes_of(folder):
    """Return all processes that have the folder in their environment."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if process.environ().get("RAY_TMPDIR") == folder and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def answer(http):
    return http.post("/v1/chat/completions", json=SUM).json()["choices"][0]["message"]["content"]


@pytest.mark.turn(4)
def test_replica_answers_like_a_server_and_is_replaced_by_new_options(cluster, tmp_path):
    settings = tmp_path / "settings.toml"
    settings.write_text('served-model-name = ["first"]\n', encoding="utf-8")
    with (
        serve(*SMALL) as server,
        octavo(*serve_words(cluster, "--config", str(settings)), environment=cluster.environment) as running,
    ):
        running.wait_ready(1)
        assert answer(running.http) == answer(server.http)
        (url,) = running.engines()
        assert httpx.post(f"{url}/v1/chat/completions", json=SUM, trust_env=False).status_code == 401
        settings.write_text('served-model-name = ["second"]\n', encoding="utf-8")
        running.process.send_signal(signal.SIGUSR1)
        wait(lambda: [each["models"] for each in running.engines().values()] == [["second"]], running.log)
        assert answer(running.http) == answer(server.http)
        settings.write_text('served-model-nam = ["third"]\n', encoding="utf-8")
        running.process.send_signal(signal.SIGUSR1)
        wait(lambda: any("the replicas were not replaced" in line for line in running.log), running.log)
    assert running.process.returncode == 0
    assert engine_processes(folder=cluster.folder) == []
    assert ray_processes(cluster.folder) == []


def test_absent_cluster_is_one_error_in_time():
    for words in (
        ("serve", "--launcher", "ray", "--ray-address", "127.0.0.1:1"),
        ("route", "--engines-ray", "127.0.0.1:1"),
    ):
        error, _ = refusal(*words, environment=None)
        assert error.startswith("error: there is no Ray cluster at 127.0.0.1:1: ")


@pytest.mark.slow
def test_missing_room_is_one_error_in_time(cluster):
    words = serve_words(cluster, "--replicas", "2", "--num-threads", "3", "--ray-timeout", "10")
    error, seconds = refusal(*words, environment=cluster.environment)
    assert "no node has room for octavo-engine-" in error
    assert "it needs 3 CPUs; " in error
    assert "(after 10 s)" in error
    assert seconds < 60
    assert engine_processes(folder=cluster.folder) == ray_processes(cluster.folder) == []


@pytest.mark.slow
def test_other_version_of_ray_is_one_error(cluster, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import ray\nray.__version__ = '2.0.0'\n", encoding="utf-8")
    environment = {**cluster.environment, "PYTHONPATH": str(tmp_path)}
    error, _ = refusal(*serve_words(cluster), environment=environment)
    assert "Version mismatch" in error
    assert "Ray: 2.0.0" in error


@pytest.mark.slow
def test_other_version_of_octavo_on_a_node_is_one_error(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import octavo\noctavo.__version__ = '0.0.1'\n", encoding="utf-8")
    with contextlib.closing(RayNodes(1, 4, PYTHONPATH=str(tmp_path))) as nodes:
        environment = {name: value for name, value in nodes.environment.items() if name != "PYTHONPATH"}
        error, _ = refusal(*serve_words(nodes), environment=environment)
    assert "has octavo 0.0.1, and this command has" in error


@pytest.mark.slow
def test_wrong_token_of_the_cluster_is_one_error():
    with contextlib.closing(RayNodes(0, 4, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="right" * 8)) as nodes:
        error, _ = refusal(*serve_words(nodes), environment={**nodes.environment, "RAY_AUTH_TOKEN": "wrong" * 8})
    assert "cannot use the Ray cluster" in error
    assert "token" in error


@pytest.mark.slow
def test_bad_option_of_engines_is_one_error(cluster):
    start = ("serve", "/no/such/model", *serve_words(cluster)[1:])
    error, _ = refusal(*start, environment=cluster.environment)
    assert error.startswith("error: the engines could not be started; see the log")


@pytest.mark.slow
def test_killed_command_leaves_no_process(cluster):
    with octavo(*serve_words(cluster, "--replicas", "2"), environment=cluster.environment) as running:
        running.wait_ready(2)
        assert len(engine_processes(folder=cluster.folder)) == 2
        running.process.kill()
        wait(lambda: not engine_processes(folder=cluster.folder), "all engines have ended", 30)
        wait(lambda: not ray_processes(cluster.folder), "the driver has ended", 30)


@pytest.mark.slow
def test_killed_driver_is_replaced_with_all_engines(cluster):
    with octavo(*serve_words(cluster, "--replicas", "2"), environment=cluster.environment) as running:
        running.wait_ready(2)
        before = engine_processes(folder=cluster.folder)
        (driver,) = (each for each in processes_of(cluster.folder) if "octavo.ray.driver" in each.cmdline())
        driver.kill()
        wait(
            lambda: not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in before), "ended", 30
        )
        wait(lambda: len(engine_processes(folder=cluster.folder)) == 2, "other engines have started")
        running.wait_ready(2)
        assert answer(running.http)
    assert engine_processes(folder=cluster.folder) == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_own_cluster_ends_with_the_command(number):
    folder = tempfile.mkdtemp(prefix="oct", dir="/tmp")
    environment = {**os.environ, "RAY_TMPDIR": folder}
    environment.pop("RAY_ADDRESS", None)
    with octavo("serve", "--launcher", "ray", *SMALL, environment=environment) as running:
        running.wait_ready(1)
        assert answer(running.http)
        running.process.send_signal(number)
        wait(lambda: not processes_of(folder), "all processes have ended", 60)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.slow
def test_other_router_finds_the_engines(cluster):
    key = "of clients"
    environment = {**cluster.environment, "OCTAVO_SERVE_API_KEY": key, "OCTAVO_ROUTE_API_KEY": key}
    headers = {"Authorization": f"Bearer {key}"}
    with (
        octavo(*serve_words(cluster, "--replicas", "2"), environment=environment) as running,
        octavo("route", "--engines-ray", cluster.address, environment=environment) as other,
    ):
        running.http.headers.update(headers)
        other.http.headers.update(headers)
        other.wait_ready(2)
        running.wait_ready(2)
        assert other.engines().keys() == running.engines().keys()
        assert answer(other.http) == answer(running.http)
        engine_processes(folder=cluster.folder)[0].kill()
        wait(lambda: other.engines().keys() == running.engines().keys() and other.num_ready() == 1, other.log)
        other.wait_ready(2)


@pytest.fixture(scope="module")
def elastic(cluster):
    words = ("--max-replicas", "4", "--target-queue-time", "0.2", "--max-num-seqs", "2")
    with octavo(*serve_words(cluster, *words), environment=cluster.environment) as running:
        running.wait_ready(1)
        yield running


@pytest.fixture(scope="module")
def right(elastic):
    return known(elastic.port)


def sizes(elastic):
    return [line for line in elastic.log if "the number of replicas changes" in line]


@pytest.mark.slow
def test_long_queue_adds_replicas(elastic, right):
    with BackgroundLoad(elastic.port, right, 24) as load:
        elastic.wait_ready(4)
    assert {outcome.kind for outcome in load.outcomes} == {"whole"}
    assert not any(outcome.is_wrong or outcome.is_double for outcome in load.outcomes)


@pytest.mark.slow
def test_short_queue_removes_replicas_without_failed_request(elastic, right):
    elastic.wait_ready(4)
    with BackgroundLoad(elastic.port, right, 1) as load:
        elastic.wait_ready(1)
    assert {outcome.kind for outcome in load.outcomes} == {"whole"}
    assert len(sizes(elastic)) >= 5
