"""`octavo serve --replicas`: the options that the replicas get, and those that their router gets."""

from __future__ import annotations

import json

from typer.testing import CliRunner

from octavo.cli import app, replicas


def test_request_timeout_of_router_exceeds_that_of_replicas(monkeypatch):
    """A router with a shorter or equal timeout would end requests that its replicas may still serve."""
    seen = []
    monkeypatch.setattr(replicas, "run_router", lambda config, _listen, _say, launcher: seen.append((config, launcher)))
    result = CliRunner().invoke(app, ["serve", "--replicas", "2", "--request-timeout", "7200"])
    assert result.exit_code == 0, result.output
    ((config, launcher),) = seen
    assert (config.request_timeout_s, config.engine_first_byte_timeout_s) == (7230.0, 7230.0)
    for replica in launcher._replicas.values():
        command = replica._command
        assert command[command.index("--request-timeout") + 1] == "7200.0"


def test_replicas_publish_kv_events_at_successive_ports(monkeypatch):
    seen = []
    monkeypatch.setattr(replicas, "run_router", lambda _config, _listen, _say, launcher: seen.append(launcher))
    config = json.dumps({"enable_kv_cache_events": True, "endpoint": "tcp://*:5557"})
    for options in (["--kv-events-config", config], []):
        result = CliRunner().invoke(app, ["serve", "--replicas", "2", *options])
        assert result.exit_code == 0, result.output
    with_events, without = ([replica._command for replica in each._replicas.values()] for each in seen)
    given = [json.loads(command[command.index("--kv-events-config") + 1]) for command in with_events]
    assert [(each["endpoint"], each["data_parallel_rank"]) for each in given] == [
        ("tcp://*:5557", 0),
        ("tcp://*:5558", 1),
    ]
    assert all("--kv-events-config" not in command for command in without)


def test_replicas_that_would_publish_at_the_same_port_are_an_error():
    config = json.dumps({"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558"})
    result = CliRunner().invoke(app, ["serve", "--replicas", "2", "--kv-events-config", config])
    assert result.exit_code != 0
    assert "must differ by at least 2 ports" in " ".join(result.output.split())
