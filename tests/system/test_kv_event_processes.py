"""`octavo serve` publishes KV events: of one engine before and after its restart, and of two replicas."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from kv_event_subscriber import AllBlocksCleared, BlockStored, Contents, Subscriber
from system.serving_process import serve

pytestmark = pytest.mark.slow
PROMPT = list(range(3, 100))  # six blocks of 16 tokens, and one token


def options_for(folder):
    """Return the option of the server, and its endpoints."""
    ends = f"ipc://{folder}/events", f"ipc://{folder}/replays"
    config = {"enable_kv_cache_events": True, "endpoint": ends[0], "replay_endpoint": ends[1]}
    return ["--kv-events-config", json.dumps(config)], ends


def complete(server, prompt):
    """Compute one token, which is in no block."""
    body = {"prompt": prompt, "max_tokens": 1, "ignore_eos": True}
    server.http.post("/v1/completions", json=body).raise_for_status()


def contents_after(server, subscriber, num_blocks):
    """Return the blocks once there are `num_blocks`, and the batches."""

    def read():
        contents, batches = Contents(), [batch for _, batch in subscriber.replay(0)]
        for batch in batches:
            contents.take(batch)
        return (contents, batches) if len(contents.blocks) >= num_blocks else None

    return server.wait_for(read)


def tokens_of(contents):
    """Return the tokens of all blocks in the order in which they were stored."""
    return [token for _, tokens in contents.blocks.values() for token in tokens]


def test_events_before_and_after_a_restart(tmp_path):
    option, ends = options_for(tmp_path)
    with serve(*option) as server, Subscriber(*ends) as subscriber:
        complete(server, PROMPT)
        contents, batches = contents_after(server, subscriber, 6)
        assert tokens_of(contents) == PROMPT[:96]
        assert batches[0].events == [AllBlocksCleared()]
        assert {batch.data_parallel_rank for batch in batches} == {0}
        (event,) = [event for batch in batches for event in batch.events if isinstance(event, BlockStored)]
        assert len(event.block_hashes) == 6
        server.wait_for(lambda: re.search(r"octavo:kv_events_total{.*} 2\.0", server.http.get("/metrics").text))
        assert re.search(r"octavo:kv_event_batches_dropped_total{.*} 0\.0", server.http.get("/metrics").text)
        engine = server.engine
        engine.kill()
        server.wait_for_engine(engine)
        server.wait_for(server.is_ready)
        complete(server, PROMPT[:33])
        contents, batches = contents_after(server, subscriber, 2)
        assert batches[0].events == [AllBlocksCleared()]
        assert tokens_of(contents) == PROMPT[:32]


def test_replicas_publish_at_their_own_endpoints(tmp_path):
    option, ends = options_for(tmp_path)
    with serve("--replicas", "2", *option) as server:
        prompts = [[number + 3, *PROMPT] for number in range(24)]
        with ThreadPoolExecutor(8) as threads:  # the router divides concurrent requests among the replicas
            list(threads.map(partial(complete, server), prompts))
        for rank, suffix in enumerate(["", "_dp1"]):
            with Subscriber(*(end + suffix for end in ends)) as subscriber:
                contents, batches = contents_after(server, subscriber, 6)
                assert {batch.data_parallel_rank for batch in batches} == {rank}
                assert len(contents.blocks) % 6 == 0


def test_used_port_ends_the_start_with_one_error():
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]
        config = json.dumps({"enable_kv_cache_events": True, "endpoint": f"tcp://*:{port}"})
        command = [sys.executable, "-m", "octavo", "serve", "--port", "0", "--kv-events-config", config]
        ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=90)
    assert ended.returncode != 0
    assert ended.stderr.count("cannot be used") == 1
    assert f"tcp://*:{port}: Address already in use; choose another port" in re.sub(r"\s+", " ", ended.stderr)
    assert "Traceback" not in ended.stderr
