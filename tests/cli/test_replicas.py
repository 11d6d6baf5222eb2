"""`octavo serve --replicas`: the options that the replicas get, and those that their router gets."""

from __future__ import annotations

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
