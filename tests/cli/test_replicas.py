"""`octavo serve --replicas`: the options that the replicas get, and those that their router gets."""

from __future__ import annotations

import importlib.util
import json
import sys

import pytest
from typer.testing import CliRunner

from octavo.cli import app, replicas, route
from octavo.errors import ConfigError


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


@pytest.fixture
def launched(monkeypatch):
    """Return a function that runs a command line and returns the router's configuration and the launcher."""
    for module in (replicas, route):
        monkeypatch.setattr(
            module, "run_router", lambda config, _listen, _say, launcher=None: seen.append((config, launcher))
        )
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True if name == "ray" else find_spec(name))
    for name in ("RAY_ADDRESS", "OCTAVO_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    seen = []

    def launch(*words):
        monkeypatch.setattr(sys, "argv", ["octavo", *words])
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, result.output
        return seen.pop()

    return launch


RAY = ("serve", "--launcher", "ray")


def test_engines_on_ray_get_options_limits_and_a_key(launched, monkeypatch):
    monkeypatch.setenv("OCTAVO_KV_SECRET", "secret")
    monkeypatch.setenv("OCTAVO_SERVE_SEED", "3")
    config, launcher = launched(
        *RAY,
        "--replicas",
        "2",
        "--max-replicas",
        "3",
        "--num-threads",
        "5",
        "--seed",
        "7",
        "--host",
        "::1",
        "--port",
        "1",
    )
    settings = launcher._first
    assert settings.words == ("--seed", "7", "--shutdown-timeout", str(config.request_timeout_s - 30))
    assert settings.start_s == 3600.0
    assert settings.drain_s == config.request_timeout_s - 30
    assert (settings.num_replicas, settings.min_replicas, settings.max_replicas) == (2, 2, 3)
    assert (settings.num_threads, settings.num_ranks, settings.uses_gpu, settings.address) == (5, 1, None, None)
    assert len(config.client_key) > 40
    assert config.client_key == config.engine_api_key == settings.operator_key
    key = {"OCTAVO_API_KEY": config.client_key, "OCTAVO_OPERATOR_KEY": "", "OCTAVO_KV_SECRET": "secret"}
    assert key.items() <= settings.environment.items()
    assert {name[:7] for name in settings.environment} == {"OCTAVO_"}
    assert not [name for name in settings.environment if name.startswith("OCTAVO_SERVE_")]
    assert config.health_interval_s == 0.5


def test_clients_key_is_the_engines_key(launched):
    config, launcher = launched(*RAY, "--api-key", "k", "--device", "cpu")
    assert (config.client_key, config.engine_api_key, config.api_key) == (None, "k", "k")
    settings = launcher._first
    assert (settings.environment["OCTAVO_API_KEY"], settings.operator_key, settings.uses_gpu) == ("k", "k", False)
    assert "k" not in settings.words


def test_keys_of_a_file_need_a_key_for_metrics(launched, tmp_path):
    keys = tmp_path / "keys.toml"
    keys.touch()
    config, launcher = launched(*RAY, "--api-keys", str(keys))
    settings = launcher._first
    assert config.client_key is None
    assert config.engine_api_key == settings.operator_key == settings.environment["OCTAVO_OPERATOR_KEY"] != ""
    assert ("--api-keys", str(keys)) == settings.words[:2]


def test_paths_for_nodes_are_absolute(launched, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "template.jinja").touch()
    (tmp_path / "model").mkdir()
    assert launched(*RAY, "model")[1]._first.words[0] == str(tmp_path / "model")
    assert launched(*RAY, "owner/name")[1]._first.words[0] == "owner/name"
    _, launcher = launched(*RAY, "--chat-template", "template.jinja", "--served-model-name", "template.jinja")
    words = launcher._first.words
    assert words[words.index("--chat-template") + 1] == str(tmp_path / "template.jinja")
    assert words[words.index("--served-model-name") + 1] == "template.jinja"


@pytest.mark.parametrize(
    ("words", "variable", "expected"),
    [
        ((), "10.0.0.1:1", "10.0.0.1:1"),
        (("--ray-address", "auto"), "10.0.0.1:1", "auto"),
        ((), "", None),
    ],
)
def test_address_of_the_cluster(words, variable, expected, launched, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", variable)
    config, launcher = launched(*RAY, *words)
    assert (launcher._first.address, config.engines_ray) == (expected, expected or "local")


def test_configuration_file_is_read_again(launched, tmp_path):
    settings = tmp_path / "settings.toml"
    settings.write_text("seed = 1\n", encoding="utf-8")
    _, launcher = launched(*RAY, "--config", str(settings))
    assert launcher._first.words[:2] == ("--seed", "1")
    settings.write_text("seed = 2\n", encoding="utf-8")
    assert launcher._again()[:2] == ("--seed", "2")
    settings.write_text("sed = 2\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="'sed' is not an option of serve"):
        launcher._again()


def test_other_router_searches_the_cluster(launched):
    config, launcher = launched("route", "--engines-ray", "10.0.0.1:6379")
    assert config.engines_ray == launcher._first.address == "10.0.0.1:6379"
    _, launcher = launched("route", "--engine", "http://10.0.0.1:8000")
    assert launcher is None


@pytest.mark.parametrize(
    "words",
    [
        ("--max-replicas", "2"),
        ("--ray-address", "auto"),
        ("--launcher", "ray", "--replicas", "3", "--max-replicas", "2"),
        ("--launcher", "ray", "--replicas", "1", "--min-replicas", "2"),
        ("--launcher", "ray", "--ray-timeout", "inf"),
        ("--launcher", "ray", "--ray-start-timeout", "inf"),
        ("--launcher", "k8s"),
    ],
)
def test_wrong_numbers_and_launchers_are_refused(words):
    result = CliRunner().invoke(app, ["serve", *words])
    assert result.exit_code == 1
    assert "error: " in result.output
