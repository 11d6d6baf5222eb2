"""Options of commands are fields of configurations: each can be set, is described, and reaches its configuration."""

from __future__ import annotations

import re
from dataclasses import fields
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from octavo.cli import app
from octavo.cli.command import command, make_app
from octavo.cli.engine_options import EngineOptions
from octavo.cli.listen_options import ListenOptions
from octavo.cli.serve import ServerOptions
from octavo.config import (
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    ServerConfig,
    options_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

# Fields without an option, with the reason.
INTERNAL: dict[type, set[str]] = {
    EngineConfig: {"model", "cache", "scheduler", "device", "speculative", "kv_transfer", "kv_events"},  # its parts
    ModelConfig: {
        "model",  # from MODEL or --model, with a precedence
        "served_model_name",  # derived from the model
        "skip_tokenizer_init",  # for Python only: a command reads and writes text
    },
    CacheConfig: set(),
    SchedulerConfig: {"is_offline"},  # of the command
    DeviceConfig: set(),
    KVTransferConfig: set(),
    # The first two are derived from the scheduler's options. Only replicas get the last one, from the environment.
    ServerConfig: {"max_open_requests", "max_num_waiting_tokens", "operator_key"},
}
NEEDED = {  # other options that an option requires
    "disk_bytes": ["--kv-disk-dir", "kv"],
    "mooncake_segment_bytes": ["--kv-mooncake", "127.0.0.1:50051"],
    "mooncake_protocol": ["--kv-mooncake", "127.0.0.1:50051"],
    "role": ["--kv-disk-dir", "kv"],
    "direct": ["--role", "decode"],
    "direct_bytes": ["--role", "prefill", "--kv-direct"],
    "group_size": ["--quantization", "int4"],
    "max_batch_total_tokens": ["--admission", "reservation"],
    "waiting_served_ratio": ["--admission", "reservation"],
    "max_waiting_tokens": ["--admission", "reservation"],
    "max_num_seqs": ["--max-num-batched-tokens", "1000"],
    "ssl_certfile": ["--ssl-keyfile", "key.pem"],
    "ssl_keyfile": ["--ssl-certfile", "cert.pem"],
}
# Text options without a list of choices that still reject arbitrary text.
FREE = {"dtype": "float32", "forwarded_allow_ips": ("10.0.0.1",), "mooncake": "127.0.0.1:50051"}


@pytest.mark.parametrize("part", INTERNAL)
def test_every_config_field_is_documented_option_or_internal(part: type) -> None:
    offered = options_of(part)
    assert {each.name for each in fields(part)} - offered.keys() == INTERNAL[part]
    shown = "".join(CliRunner().invoke(app, ["serve", "--help"]).output.split())  # line breaks are ignored
    for name, option in offered.items():
        flag = "--" + (option.name or name).replace("_", "-")
        assert re.search(flag + r"[^.]{0,400}?" + re.escape("".join(option.help.split())), shown), flag


def other_values(part: type) -> Iterator[tuple[str, str, Any]]:
    """Yield flag and field of each option, with a value that differs from the field's default."""
    kinds, defaults = ({each.name: getattr(each, of) for each in fields(part)} for of in ("type", "default"))
    for name, option in options_of(part).items():
        kind, default = str(kinds[name]), defaults[name]
        value: Any = FREE.get(name, "some text")
        if kind.startswith("bool"):
            value = not default
        elif option.choices or isinstance(default, StrEnum):
            value = next(each for each in option.choices or type(default) if each != default)
        elif "Path" in kind:
            value = Path("some.file")
        elif kind.startswith(("int", "float")):
            value = 32 + (default or 0)
        elif kind.startswith("tuple"):
            value = FREE.get(name, ("a", "b"))
        yield "--" + (option.name or name).replace("_", "-"), name, value


@pytest.mark.sweep(12)
@pytest.mark.parametrize("part", INTERNAL)
def test_every_option_sets_its_config_field(part: type) -> None:
    made: list[tuple[EngineConfig, ServerConfig]] = []

    @command()
    def look(engine: EngineOptions, server: ServerOptions) -> None:
        made.append((engine.config(), server.server_config(ListenOptions(), 64, 1000)))

    look_app = look.add_to(make_app())
    for flag, name, value in other_values(part):
        if isinstance(value, bool):
            words = [flag if value else f"--no-{flag[2:]}"]
        else:
            words = [word for each in (value if isinstance(value, tuple) else [value]) for word in (flag, str(each))]
        result = CliRunner().invoke(look_app, [*NEEDED.get(name, []), *words])
        assert result.exit_code == 0, (words, result.output)
        engine, server = made.pop()
        parts = (engine, engine.model, engine.cache, engine.scheduler, engine.device, engine.kv_transfer, server)
        found = getattr(next(each for each in parts if type(each) is part), name)
        assert (found[: len(value)] if isinstance(value, tuple) else found) == value, words
