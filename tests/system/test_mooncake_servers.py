"""Servers that share a Mooncake pool, started as in docs/production.md."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import httpx
import psutil
import pytest
from mooncake_master import Master, needs_mooncake
from serving_process import serve

pytestmark = needs_mooncake
RECIPE = (Path(__file__).parents[2] / "docs" / "production.md").read_text(encoding="utf-8")
NUM_BLOCKS = 20  # minimum number of blocks of the prompt
ASKED = {
    "prompt": "To be, or not to be, that is the question. " * 20,
    "max_tokens": 24,
    "temperature": 0.8,
    "seed": 5,
    "logprobs": 2,
}


@pytest.fixture
def master():
    master = Master()
    yield master
    master.kill()


def servers_of_recipe(master):
    """Return the options of the recipe's two servers, with the address of this master."""
    lines = re.findall(r"^octavo serve --port \d+ (--kv-mooncake [^&\n]+)", RECIPE, re.MULTILINE)
    return [shlex.split(line.replace("127.0.0.1:50051", master.address)) for line in lines]


def answer(server):
    choice = server.http.post("/v1/completions", json=ASKED).json()["choices"][0]
    return choice["text"], choice["logprobs"]


def master_counts(master, name):
    text = httpx.get(f"http://127.0.0.1:{master.metrics_port}/metrics", trust_env=False).text
    return sum(float(value) for value in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE))


def clients_of(server):
    return [each for each in psutil.Process(server.process.pid).children(recursive=True) if is_client(each)]


def is_client(process):
    return any("mooncake_process" in word for word in process.cmdline())


@pytest.mark.slow
def test_servers_of_mooncake_recipe_share_blocks_and_answer_equally(master):
    first, second = servers_of_recipe(master)
    assert "--kv-mooncake" in first
    with serve() as alone:
        expected = answer(alone)
    with serve(*first) as one, serve(*second) as other:
        one.wait_until(lambda: clients_of(one) and master_counts(master, "master_active_clients") == 2, 30)
        assert answer(one) == expected
        one.wait_until(lambda: master_counts(master, "master_key_count") >= NUM_BLOCKS, 30)
        assert answer(other) == expected
        assert master_counts(master, "master_batch_get_replica_list_items_total") >= NUM_BLOCKS
        clients = clients_of(one) + clients_of(other)
    assert psutil.wait_procs(clients, timeout=10)[1] == []


@pytest.mark.slow
def test_mooncake_client_exits_after_engine_is_killed(master):
    with serve("--kv-mooncake", master.address, "--kv-mooncake-segment-bytes", "16M") as server:
        server.wait_until(lambda: clients_of(server), 30)
        expected = answer(server)
        (client,) = clients_of(server)
        (engine,) = [each for each in psutil.Process(server.process.pid).children() if not is_client(each)]
        engine.kill()
        assert psutil.wait_procs([client], timeout=10)[1] == []
        server.wait_until(server.is_ready, 60)
        assert answer(server) == expected
        server.wait_until(lambda: clients_of(server), 30)
        clients = clients_of(server)
    assert psutil.wait_procs(clients, timeout=10)[1] == []
