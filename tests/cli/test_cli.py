"""The command line: output, exit codes, and a start without torch."""

from __future__ import annotations

import dataclasses
import gc
import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import tokenizers
from fakes import TEXT, FakeExecutor, answer_text, make_engine
from typer.testing import CliRunner

from octavo import __version__
from octavo.cli import Octavo, app
from octavo.cli.chat import _read_line
from octavo.cli.command import LazyCommand
from octavo.cli.config_options import parse_size
from octavo.cli.engine_options import EngineOptions, parse_kv_events, parse_speculative
from octavo.cli.listen_options import PACKAGES
from octavo.cli.workloads import make_workloads, read_workloads
from octavo.config import (
    CacheConfig,
    DeviceConfig,
    KVEventsConfig,
    ModelConfig,
    SchedulerConfig,
    SchedulingPolicy,
    ServerConfig,
    SpeculativeConfig,
)
from octavo.engine.input_processor import InputProcessor
from octavo.errors import ConfigError
from octavo.http.listening import bind
from octavo.http.tenants import Tenant, add_key
from octavo.journal.format import VERSION
from octavo.models.random_weights import tiny_config, write_checkpoint
from octavo.sampling_params import SamplingParams

runner = CliRunner()
COMMANDS = (
    ["generate"],
    ["chat"],
    ["serve"],
    ["models"],
    ["bench"],
    ["bench", "throughput"],
    ["bench", "latency"],
    ["bench", "serve"],
)
MODEL_COMMANDS = tuple(command for command in COMMANDS if command not in (["models"], ["bench"], ["bench", "serve"]))


def run(*arguments: str, stdin: str | bytes | None = None) -> Any:
    return runner.invoke(app, list(arguments), input=stdin, prog_name="octavo")


@pytest.fixture
def fake_model(monkeypatch: pytest.MonkeyPatch) -> FakeExecutor:
    """Build a fake engine for every requested model."""
    executor = FakeExecutor()

    def build(options: EngineOptions, **others: bool) -> Any:
        options.config(**others)
        return make_engine(executor, max_num_seqs=8)

    monkeypatch.setattr(EngineOptions, "build", build)
    return executor


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60).stdout


@pytest.mark.parametrize(
    "code",
    [
        "import octavo",
        "import octavo.cli",
        "from octavo.cli import app; app(['--help'], standalone_mode=False)",
        "from octavo.cli import app; app(['serve', '--help'], standalone_mode=False)",
        "from octavo.cli import app; app(['models'], standalone_mode=False)",
        "import octavo.http.listening",
    ],
)
def test_light_commands_import_no_heavy_packages(code: str) -> None:
    heavy = {"torch", "numpy", "transformers", "tokenizers", "safetensors", "starlette", "uvicorn", "jinja2"}
    out = python(f"{code}\nimport sys; print('LOADED', sorted({heavy!r} & set(sys.modules)))")
    assert out.splitlines()[-1] == "LOADED []"


@pytest.mark.turn(12)
def test_generate_runs_without_server_extra_packages() -> None:
    extra = [need for need in importlib.metadata.requires("octavo") or [] if 'extra == "server"' in need]
    names = {re.split(r"[^\w.-]", need)[0].lower().replace("_", "-") for need in extra}
    modules = {
        module
        for module, owners in importlib.metadata.packages_distributions().items()
        if names & {owner.lower().replace("_", "-") for owner in owners}
    }
    assert {"starlette", "msgspec", "zmq"} <= modules
    assert {*PACKAGES} <= modules
    can_do_without = {"uvloop", "llguidance", "tomlkit"}  # the last: only `octavo keys` writes files of keys
    assert len(PACKAGES) == len(names - can_do_without), "serve looks for each of the others"
    code = f"import sys; sys.modules.update(dict.fromkeys({modules!r}))  # to import them fails\n"
    code += "from octavo.cli import app; app(['generate', '--prompt', 'What is 12 + 30?'], standalone_mode=False)"
    assert "42" in python(code)


@pytest.mark.sweep(12)
@pytest.mark.parametrize("module", PACKAGES)
def test_serve_names_missing_package_before_engine_starts(module: str) -> None:
    code = (
        f"import sys; sys.modules[{module!r}] = None\nfrom octavo.cli.engine_options import EngineOptions\n"
        "EngineOptions.launch = lambda *_, **__: print('launched')\n"
        "from octavo.cli import app; app(['serve', '--port', '0'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert f"octavo serve needs {module}: pip install 'octavo[server]'" in done.stderr
    assert not done.stdout


@pytest.mark.turn(8)
def test_serve_imports_application_while_engine_loads() -> None:
    code = """
import sys
from octavo.cli import app
from octavo.cli.engine_options import EngineOptions
from octavo.errors import ConfigError
def launch(options, meanwhile):
    print("before", *{"uvicorn", "starlette"} & set(sys.modules))
    meanwhile()
    print("then", "octavo.server.serving" in sys.modules)
    raise ConfigError("no model here")
EngineOptions.launch = launch
app(["serve", "--port", "0"])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.splitlines() == ["before", "then True"], done.stderr


def test_help_imports_no_rich() -> None:
    """rich takes longer to import than all other modules together."""
    code = (
        "from octavo.cli import app; app(['--help'], standalone_mode=False); import sys; print('rich' in sys.modules)"
    )
    assert python(code).splitlines()[-1] == "False"


def test_help_imports_no_command() -> None:
    code = (
        "from octavo.cli import Octavo, app; app(['--help'], standalone_mode=False); import sys; "
        "print('LOADED', sorted({command.module for command in Octavo.lazy_commands} & set(sys.modules)))"
    )
    assert python(code).splitlines()[-1] == "LOADED []"


@pytest.mark.parametrize("command", Octavo.lazy_commands, ids=lambda command: command.name)
def test_top_level_help_matches_summary_of_each_command(command: LazyCommand) -> None:
    """The help lists summaries of commands that it does not import."""
    own = command.load()
    assert (own.name, own.help.partition("\n\n")[0].replace("\n", " ")) == (command.name, command.summary)
    assert f"  {command.name} " in run("--help").output


def test_mistyped_command_suggests_nearest_command() -> None:
    result = run("generat")
    assert result.exit_code == 2
    assert "No such command 'generat'" in result.output
    assert "Did you mean 'generate'" in result.output


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_command_help_shows_usage_and_examples(command: list[str]) -> None:
    result = run(*command, "--help")
    assert result.exit_code == 0
    assert "Usage: octavo" in result.output
    if command != ["bench"]:
        assert "Examples:" in result.output
        assert "octavo " + " ".join(command) in result.output.partition("Examples:")[2]


def test_every_model_command_has_same_engine_options() -> None:
    names = {
        "--model",
        "--tokenizer",
        "--chat-template",
        "--generation-config",
        "--load-format",
        "--dtype",
        "--max-model-len",
        "--seed",
        "--max-num-seqs",
        "--max-num-batched-tokens",
        "--enable-chunked-prefill",
        "--no-enable-chunked-prefill",
        "--long-prefill-token-threshold",
        "--mixed-step-ms",
        "--max-num-mixed-prefill-tokens",
        "--attention-cost-tokens",
        "--scheduling-policy",
        "--kv-cache-dtype",
        "--block-size",
        "--enable-prefix-caching",
        "--no-enable-prefix-caching",
        "--kv-cache-memory-bytes",
        "--num-gpu-blocks-override",
        "--device",
        "--kernels",
        "--num-threads",
        "--debug",
    }
    for command in MODEL_COMMANDS:
        text = run(*command, "--help").output
        shown = set(re.findall(r"--[a-z][a-z0-9-]*", text))
        assert names <= shown, command
    serve = set(re.findall(r"--[a-z][a-z0-9-]*", run("serve", "--help").output))
    assert {"--host", "--port", "--served-model-name", "--api-key", "--insecure"} <= serve


def test_help_shows_default_of_every_option() -> None:
    for command in MODEL_COMMANDS:
        text = run(*command, "--help").output.partition("Examples:")[0]
        for entry in re.split(r"\n  (?=-)", text)[1:]:
            flag = re.search(r"<|[A-Z]{3}|\|", entry.partition("  ")[0]) is None  # an option without a value
            body = " ".join(entry.split())
            assert flag or "efault:" in body, f"{command}: {body}"


def test_version_option_prints_version() -> None:
    assert re.fullmatch(r"octavo \d+\.\d+\.\d+\n", run("--version").output)


def test_engine_options_set_config_fields() -> None:
    options = EngineOptions(
        model_argument="some/model",
        max_num_seqs=1000,
        scheduling_policy=SchedulingPolicy.PRIORITY,
        num_gpu_blocks_override=7,
        kv_cache_memory_bytes=5,
        enable_prefix_caching=False,
        speculative_config=parse_speculative('{"method": "ngram", "num_speculative_tokens": 3}'),
        kv_events_config=parse_kv_events('{"topic": "kv"}'),
    )
    config = options.config()
    assert config.speculative == SpeculativeConfig(method="ngram", num_speculative_tokens=3)
    assert config.kv_events == KVEventsConfig(topic="kv")
    assert config.model.model == config.model.served_model_name == "some/model"
    assert config.scheduler.resolved().max_num_batched_tokens == 1000
    assert config.scheduler.policy is SchedulingPolicy.PRIORITY
    assert (config.cache.num_gpu_blocks, config.cache.kv_cache_memory_bytes) == (7, 5)
    assert not config.cache.enable_prefix_caching
    assert EngineOptions().config().model.model is None
    assert EngineOptions().config().speculative == SpeculativeConfig(method="auto")
    plain = EngineOptions(speculative_method="ngram", num_speculative_tokens=3)
    assert plain.config().speculative == config.speculative


def test_local_directory_is_served_under_its_base_name(tmp_path: Path) -> None:
    directory = tmp_path / "my-model"
    directory.mkdir()
    assert EngineOptions(model=str(directory)).served_name == "my-model"
    assert EngineOptions(model="owner/name").served_name == "owner/name"


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("123", 123),
        ("4G", 4 * 1024**3),
        ("512M", 512 * 1024**2),
        ("1.5K", 1536),
        ("2GiB", 2 * 1024**3),
        ("2gb", 2 * 1000**3),
        ("1T", 1024**4),
        ("3k", 3000),
    ],
)
def test_parse_size_accepts_decimal_and_binary_units(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "--kv-cache-memory-bytes", "4X", "--prompt", "a"],
        ["generate", "--max-num-seqs", "many", "--prompt", "a"],
        ["generate", "--scheduling-policy", "lottery", "--prompt", "a"],
        ["generate", "--speculative-config", "ngram", "--prompt", "a"],
        ["generate", "--speculative-config", '{"method": "ngram", "num_speculative_tokens": 0}', "--prompt", "a"],
        ["generate", "--speculative-config", '{"method": "ngram"}', "--num-speculative-tokens", "3", "--prompt", "a"],
        ["generate", "--kv-events-config", "zmq", "--prompt", "a"],
        ["generate", "--kv-events-config", '{"port": 5557}', "--prompt", "a"],
        ["generate", "--prompts-file", "/there/is/no/such/file"],
        ["generate", "one", "--model", "two", "--prompt", "a"],
        ["generate"],
        ["serve", "--port", "99999"],
        ["bench", "latency", "--only", "Z"],
        ["bench", "throughput", "--repeat", "0"],
        ["chat", "--nonsense"],
        ["nonsense"],
    ],
)
def test_wrong_usage_exits_with_code_2(arguments: list[str], fake_model: FakeExecutor) -> None:
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize("arguments", [["models", "{}"], ["serve", "--kv-disk-dir", "{}"], ["generate", "--prompt={}"]])
def test_undecodable_argument_is_refused_with_locale_hint(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python reads a UTF-8 name this way if the locale is ASCII."""
    monkeypatch.setattr(sys, "getfilesystemencoding", lambda: "ascii")
    name = "/models/Mödell".encode().decode("ascii", "surrogateescape")
    result = runner.invoke(app, [each.format(name) for each in arguments])
    assert result.exit_code == 2
    told = " ".join(result.output.split())
    assert "not text in ascii, the encoding of this locale; set LC_ALL=C.UTF-8 or PYTHONUTF8=1" in told
    assert "Traceback" not in result.output


@pytest.mark.sweep(12)
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--block-size", "0"], "block_size must be an integer of 1 or more, got 0"),
        (["--max-num-seqs", "64", "--max-num-batched-tokens", "8"], "max_num_batched_tokens (8) must be at least"),
        (["--dtype", "int3"], "dtype must be one of"),
        (["--kernels", "magic"], "kernels must be one of"),
        (["--long-prefill-token-threshold", "5", "--no-enable-chunked-prefill"], "long_prefill_token_threshold"),
        (["--kv-cache-dtype", "fp4"], "kv_cache_dtype must be one of auto, int8, fp8, fp8_e4m3"),
        (["--temperature", "-1"], "temperature must be a number"),
        (["--max-tokens", "0"], "max_tokens must be an integer"),
        (["--prompt", "x" * 3000], "prompt is too long"),
        (["--prompt", ""], "the prompt is empty"),
    ],
)
def test_invalid_values_print_one_line_and_exit_with_code_1(
    arguments: list[str], text: str, fake_model: FakeExecutor
) -> None:
    prompt = [] if "--prompt" in arguments else ["--prompt", "a"]
    result = run("generate", "--raw", *prompt, *arguments)
    assert result.exit_code == 1, result.output
    assert result.stderr.startswith("error: ")
    assert text in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_debug_option_raises_original_exception(fake_model: FakeExecutor) -> None:
    result = run("generate", "--prompt", "a", "--temperature", "-1", "--debug")
    assert result.exit_code == 1
    assert type(result.exception).__name__ == "RequestError"


@pytest.mark.parametrize(
    ("name", "make", "text"),
    [
        ("missing", lambda path: None, "does not exist"),
        ("file", lambda path: path.write_text("x"), "not a GGUF file"),
        ("empty", lambda path: path.mkdir(), "config.json"),
        ("broken", lambda path: (path.mkdir(), (path / "config.json").write_text("{")), "not valid JSON"),
        (
            "unknown",
            lambda path: (path.mkdir(), (path / "config.json").write_text('{"architectures": ["GPT9"]}')),
            "LlamaForCausalLM",
        ),
    ],
)
def test_unusable_model_path_is_refused_with_reason(tmp_path: Path, name: str, make: Any, text: str) -> None:
    make(tmp_path / name)
    result = run("generate", str(tmp_path / name), "--prompt", "a")
    assert result.exit_code == 1, result.output
    assert result.stderr.startswith("error: ")
    assert text in result.stderr


def test_truncated_weight_file_is_refused(tmp_path: Path) -> None:
    from octavo.models.random_weights import tiny_config, write_checkpoint

    directory = write_checkpoint(tmp_path / "tiny", tiny_config("LlamaForCausalLM"))
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    tokenizer.save(str(directory / "tokenizer.json"))
    result = run("generate", str(directory), "--raw", "--prompt", "a", "--max-tokens", "2", "--num-threads", "1")
    assert result.exit_code == 0, result.output
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    result = run("generate", str(directory), "--prompt", "a")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert "model.safetensors" in result.stderr


@pytest.mark.turn(8)
def test_prompt_with_invalid_unicode_is_refused(tmp_path: Path) -> None:
    """Python reads `--prompt $'caf\\xe9'` this way."""
    from octavo.models.random_weights import tiny_config, write_checkpoint

    directory = write_checkpoint(tmp_path / "tiny", tiny_config("LlamaForCausalLM"))
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    for arguments in (
        ["--raw", "--prompt", "caf\udce9"],
        ["--prompt", "caf\udce9"],
        ["--prompt", "a", "--system", "\udce9"],
    ):
        result = run("generate", str(directory), "--num-threads", "1", *arguments)
        assert result.exit_code == 1, result.output
        assert result.stderr.startswith("error: the prompt is not valid Unicode")
        assert result.stderr.count("\n") == 1


def test_input_that_is_not_utf8_is_refused(fake_model: FakeExecutor, tmp_path: Path) -> None:
    (tmp_path / "prompts").write_bytes(b"\xff\xfe\n")
    for arguments in (["generate", "--prompts-file", str(tmp_path / "prompts")], ["generate"], ["chat"]):
        result = run(*arguments, stdin=b"\xff\xfe\n")
        assert result.exit_code == 1, result.output
        assert "not UTF-8" in result.stderr


def test_generate_prints_answer_to_one_prompt(fake_model: FakeExecutor) -> None:
    result = run("generate", "--raw", "--prompt", "hello")
    assert result.exit_code == 0, result.output
    assert result.stdout == answer_text(5) + "\n"
    chat = run("generate", "--prompt", "hello", "--max-tokens", "12", "--system", "S")
    assert chat.stdout == answer_text(len("<system>S\n<user>hello\n<assistant>"), 0, 12) + "\n"


def test_generate_reads_standard_input(fake_model: FakeExecutor) -> None:
    assert run("generate", "--raw", stdin="hello\nthere\n").stdout == answer_text(11) + "\n"


def test_generate_cuts_output_at_stop_string(fake_model: FakeExecutor) -> None:
    stop = answer_text(5)[20:24]
    result = run("generate", "--raw", "--prompt", "hello", "--stop", stop, "--stop", "never")
    assert result.stdout == answer_text(5)[:20] + "\n"


def test_generate_answers_every_prompt_of_file(fake_model: FakeExecutor, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("bb\n\nccc\n")
    result = run("generate", "--raw", "--prompt", "a", "--prompts-file", str(file), "--json", "--max-tokens", "9")
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [line["prompt"] for line in lines] == ["a", "bb", "ccc"]
    assert [line["outputs"][0]["text"] for line in lines] == [answer_text(length, 0, 9) for length in (1, 2, 3)]
    assert all(line["outputs"][0]["finish_reason"] == "length" for line in lines)
    shown = run("generate", "--raw", "--prompt", "a", "--n", "2", "--max-tokens", "9").stdout
    assert shown == f"> a\n{answer_text(1, 0, 9)}\n{answer_text(1, 1, 9)}\n\n"


def test_generate_exits_with_error_after_failed_step(fake_model: FakeExecutor) -> None:
    fake_model.fail_next = True
    result = run("generate", "--prompt", "a")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")


def test_chat_keeps_history_until_reset(fake_model: FakeExecutor) -> None:
    result = run("chat", "--max-tokens", "5", stdin="hi\nmore\n/reset\nhi\n\n/exit\nnever said\n")
    assert result.exit_code == 0, result.output
    first = "<user>hi\n<assistant>"
    answer = answer_text(len(first), 0, 5)
    second = f"<user>hi\n<assistant>{answer}\n<user>more\n<assistant>"
    expected = [answer, answer_text(len(second.encode()), 0, 5), answer]
    assert result.stdout == "".join(f"{text}\n" for text in expected)


@pytest.mark.parametrize(("model", "is_told"), [([], True), (["./other"], False)])
def test_interactive_chat_with_built_in_model_prints_model_hint(
    fake_model: FakeExecutor, monkeypatch: pytest.MonkeyPatch, model: list[str], *, is_told: bool
) -> None:
    """The hint is printed once, and only if a person uses the built-in model. A pipe gets answers only."""
    assert run("chat", *model, stdin="/exit\n").stdout == ""
    monkeypatch.setattr("octavo.cli.chat.sys", SimpleNamespace(stdin=SimpleNamespace(isatty=lambda: True)))
    monkeypatch.setattr("octavo.cli.chat._read_line", lambda *, interactive: "/exit" if interactive else None)
    told = run("chat", *model).stdout
    assert ("octavo chat ./model.gguf" in told, "/help shows" in told) == (is_told, True)


@pytest.mark.parametrize(
    ("arguments", "named", "told"),
    [
        ([], {}, (0.8, 40, 0.95, 0.05)),
        (["--temperature", "0", "--top-k", "0"], {}, (0.0, 0, 0.95, 0.05)),
        ([], {"top_p": 0.5}, (1.0, 0, 0.5, 0.0)),
        ([], {"repetition_penalty": 1.1}, (0.8, 40, 0.95, 0.05)),
        (["--generation-config", "vllm"], {}, (1.0, 0, 1.0, 0.0)),
    ],
)
def test_chat_lowers_sampling_defaults_if_checkpoint_sets_none(
    fake_model: FakeExecutor, monkeypatch: pytest.MonkeyPatch, arguments: list[str], named: dict[str, Any], told: Any
) -> None:
    """Only `octavo chat` has lower sampling defaults. Interfaces for programs have vLLM's defaults."""
    seen = []
    engine = make_engine(fake_model, generation_defaults=named)
    monkeypatch.setattr(EngineOptions, "build", lambda _options: engine)

    def answer(_engine: Any, _prompt: Any, params: SamplingParams, _write: Any) -> tuple[str, str]:
        seen.append(params)
        return "", "stop"

    monkeypatch.setattr("octavo.cli.streaming.stream_answer", answer)
    assert run("chat", *arguments, stdin="hi\n").exit_code == 0
    ((temperature, top_k, top_p, min_p),) = [(each.temperature, each.top_k, each.top_p, each.min_p) for each in seen]
    assert (temperature, top_k, top_p, min_p) == told


def test_chat_without_template_is_refused(fake_model: FakeExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InputProcessor, "has_chat_template", False)
    result = run("chat", stdin="hi\n")
    assert result.exit_code == 1
    assert "--chat-template" in result.stderr


def test_chat_continues_after_invalid_input(fake_model: FakeExecutor) -> None:
    result = run("chat", "--max-tokens", "5", stdin=f"{'x' * 3000}\n/help\n/nonsense\nhi\n")
    assert result.exit_code == 0, result.output
    assert result.stdout == answer_text(len("<user>hi\n<assistant>"), 0, 5) + "\n"
    assert "error: prompt is too long" in result.stderr
    assert "/reset" in result.stderr
    assert "unknown command /nonsense" in result.stderr


def test_chat_starts_new_conversation_after_failed_step(fake_model: FakeExecutor) -> None:
    fake_model.fail_next = True
    result = run("chat", "--max-tokens", "5", stdin="lost\nhi\n")
    assert result.exit_code == 0, result.output
    assert result.stdout == "\n" + answer_text(len("<user>hi\n<assistant>"), 0, 5) + "\n"  # a new conversation
    assert result.stderr.startswith("error: ")


def test_interactive_chat_rereads_line_that_is_not_utf8(capsys: pytest.CaptureFixture[str]) -> None:
    lines = iter([b"caf\xe9", b"caf\xc3\xa9"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("builtins.input", lambda _prompt: next(lines).decode())
        assert _read_line(interactive=True) == "café"
    assert "not UTF-8" in capsys.readouterr().err


def test_max_tokens_defaults_to_generation_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineOptions, "build", lambda _: make_engine(generation_defaults={"max_tokens": 7}))
    num_prompt_tokens = len("<user>hi\n<assistant>")
    assert run("chat", stdin="hi\n").stdout == answer_text(num_prompt_tokens, 0, 7) + "\n"
    assert run("generate", "--prompt", "hi").stdout == answer_text(num_prompt_tokens, 0, 7) + "\n"
    longer = run("generate", "--prompt", "hi", "--max-tokens", "9")
    assert longer.stdout == answer_text(num_prompt_tokens, 0, 9) + "\n"


def test_ctrl_c_stops_answer_but_not_chat(fake_model: FakeExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    collect = fake_model.collect

    def press_in_the_tenth_step() -> Any:
        if fake_model.num_steps == 10:
            os.kill(os.getpid(), signal.SIGINT)
        return collect()

    monkeypatch.setattr(fake_model, "collect", press_in_the_tenth_step)
    result = run("chat", "--ignore-eos", "--max-tokens", "50", stdin="hi\nhi\n")
    assert result.exit_code == 0, result.output
    first, second = result.stdout.splitlines()
    assert first == answer_text(len("<user>hi\n<assistant>"), 0, 10)
    assert len(second.encode()) >= 50
    assert "(stopped)" in result.stderr


def test_bench_reports_selected_workloads(fake_model: FakeExecutor, tmp_path: Path) -> None:
    result = run("bench", "throughput", "--repeat", "2", "--json", "--only", "B", "--only", "D")
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["results"]
    assert [row["workload"] for row in rows] == [
        "B 16 together",
        "D shared prefix, cache off",
        "D shared prefix, cache on",
    ]
    assert all(row["wall_s"] > 0 and row["output_tok_per_s"] > 0 for row in rows)
    assert rows[2]["steps"] < rows[1]["steps"]
    file = tmp_path / "workloads.json"
    file.write_text(json.dumps({"A": [{"prompt": [1, 2, 3], "out": 4}], "C": [{"prompt": [5] * 600, "out": 1}]}))
    result = run("bench", "latency", "--workload", str(file), "--repeat", "1", "--json")
    rows = json.loads(result.stdout)["results"]
    assert [row["steps"] for row in rows] == [4, 2]
    assert rows[0]["decode_tok_per_s"] > 0
    assert rows[1]["prefill_tok_per_s"] > 0
    shown = run("bench", "latency", "--workload", str(file), "--repeat", "1").stdout
    assert "prefill tok/s" in shown
    result = run(
        "bench", "throughput", "--workload", str(file), "--repeat", "1", "--json", "--only", "A", "--only", "D"
    )
    assert [row["workload"] for row in json.loads(result.stdout)["results"]] == ["A one stream"]
    assert result.stderr == "the workload file has no requests under D\n"


def test_bench_disables_mixed_step_limit_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """No user reads the output while it is generated, as with `LLM`. An explicit option is still used."""
    built: list[float | None] = []

    def build(options: EngineOptions, *, is_offline: bool) -> Any:
        assert is_offline
        built.append(options.mixed_step_ms)
        return make_engine(FakeExecutor(), max_num_seqs=8)

    monkeypatch.setattr(EngineOptions, "build", build)
    for asked in ([], ["--mixed-step-ms", "50"]):
        assert run("bench", "throughput", "--repeat", "1", "--only", "B", *asked).exit_code == 0
    assert built == [0, 50]


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"A": [{"prompt": [1]}]}', '{"A": [{"prompt": "x", "out": 1}]}', '{"B": []}']
)
def test_invalid_workload_file_is_refused(fake_model: FakeExecutor, tmp_path: Path, text: str) -> None:
    file = tmp_path / "workloads.json"
    file.write_text(text)
    result = run("bench", "throughput", "--workload", str(file))
    assert result.exit_code == 1, result.output
    assert result.stderr.startswith("error: ")


@pytest.mark.parametrize("max_model_len", [16, 200, 4096])
def test_generated_workloads_fit_max_model_len(max_model_len: int, tmp_path: Path) -> None:
    made = make_workloads(100, max_model_len)
    items = [*made.a, *made.b, *made.c, *(item for each in made.d for item in each)]
    assert all(len(item.prompt_token_ids) + item.num_output_tokens <= max_model_len for item in items)
    assert all(0 <= token_id < 100 for item in items for token_id in item.prompt_token_ids)
    file = tmp_path / "same.json"
    spell = [[{"prompt": item.prompt_token_ids, "out": item.num_output_tokens} for item in each] for each in made.d]
    file.write_text(json.dumps({"D": spell, "E_gaps": [0.5]}))
    assert read_workloads(file).d == made.d


@pytest.mark.turn(8)
def test_models_command_lists_checkpoints_of_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.cli.models._in_hub_cache", list)
    for name, architecture in (("good", "Qwen3ForCausalLM"), ("deep/er", "LlamaForCausalLM"), ("odd", "GPT9")):
        directory = tmp_path / name
        directory.mkdir(parents=True)
        (directory / "config.json").write_text(json.dumps({"architectures": [architecture]}))
        (directory / "model.safetensors").write_bytes(b"x" * 2048)
    result = run("models", str(tmp_path), "--json")
    data = json.loads(result.stdout)
    assert "Qwen3ForCausalLM" in data["architectures"]
    found = {each["name"]: each for each in data["checkpoints"]}
    assert found["good"]["is_known"]
    assert found["er"]["architecture"] == "LlamaForCausalLM"
    assert not found["odd"]["is_known"]
    assert found["good"]["size_bytes"] == 2048
    shown = run("models", str(tmp_path)).stdout
    assert "2.0 KiB" in shown
    assert "GPT9  (refused)" in shown


def test_models_command_explains_refusal_of_known_architecture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.cli.models._in_hub_cache", list)
    write_checkpoint(tmp_path / "good", tiny_config("LlamaForCausalLM"))
    write_checkpoint(tmp_path / "odd", config := tiny_config("LlamaForCausalLM"))
    config["quantization_config"] = {"quant_method": "bitsandbytes"}
    (tmp_path / "odd" / "config.json").write_text(json.dumps(config))
    found = {each["name"]: each for each in json.loads(run("models", str(tmp_path), "--json").stdout)["checkpoints"]}
    assert [found[name]["problem"] for name in ("octavo-demo (built in)", "good")] == ["", ""]
    assert found["odd"]["is_known"]
    problem = found["odd"]["problem"]
    assert problem.startswith("quantization_config.quant_method = 'bitsandbytes': octavo does not read")
    assert [found[name]["verdict"] for name in ("odd", "good")] == ["refused", "runs"]
    lines = [line.strip() for line in run("models", str(tmp_path)).stdout.splitlines()]
    of_odd = next(number for number, line in enumerate(lines) if line.startswith("odd "))
    assert "LlamaForCausalLM  (refused)" in lines[of_odd]
    assert lines[of_odd + 1] == problem
    assert not any("refused" in line for line in lines if line.startswith("good "))


def test_serve_refuses_public_host_without_api_key(fake_model: FakeExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OCTAVO_API_KEY", raising=False)
    result = run("serve", "--host", "0.0.0.0", "--port", "0")
    assert result.exit_code == 1
    assert "--insecure" in result.stderr


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the handlers of SIGHUP at each attempt to load a model. Loading always fails."""
    seen: list[Any] = []

    def launch(_options: EngineOptions, **_others: Any) -> Any:
        seen.append(signal.getsignal(signal.SIGHUP))
        raise ConfigError("no model here")

    monkeypatch.setattr(EngineOptions, "launch", launch)
    return seen


@pytest.mark.turn(12)
def test_sigterm_ends_server_that_loads_its_model() -> None:
    """SIGTERM ends a server that is loading its model.

    As process 1 of a container it would ignore SIGTERM without a handler. It does not wait for threads either, such as
    those of a download, which run until the download is complete.
    """
    code = """
import threading, time
from octavo.cli import app
from octavo.cli.engine_options import EngineOptions
from octavo.http import listening
listening._LEAVE_S = 0.2
def launch(options, meanwhile):
    threading.Thread(target=time.sleep, args=[60]).start()
    print("loading", flush=True)
    time.sleep(60)
EngineOptions.launch = launch
app(["serve", "--port", "0"])
"""
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "loading\n"
        process.terminate()
        assert process.wait(30) == 0


@pytest.mark.turn(8)
def test_serve_exits_with_error_if_engine_is_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = FakeExecutor()
    executor.die = True
    monkeypatch.setattr(EngineOptions, "launch", lambda *_, **__: make_engine(executor))
    with bind("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]

    def ask() -> None:
        transport = httpx.HTTPTransport(retries=5)  # retry until it listens, after 0.5 s, 1 s, 2 s ...
        with httpx.Client(transport=transport, timeout=60) as http:
            http.post(f"http://127.0.0.1:{port}/v1/completions", json={"prompt": "a"})

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    before = signal.getsignal(signal.SIGTERM)
    result = run("serve", "--port", str(port))
    asking.join(30)
    assert result.exit_code == 1
    assert "error: the engine failed and cannot restart" in result.output
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.turn(8)
def test_server_takes_limits_of_its_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the engine knows its device, whose defaults these are."""
    executor = FakeExecutor()
    executor.die = True
    limits = {"max_num_seqs": 256, "max_num_batched_tokens": 8192, "async_scheduling": True}
    monkeypatch.setattr(EngineOptions, "launch", lambda *_, **__: make_engine(executor, **limits))
    with bind("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
    answers: list[Any] = []

    def ask() -> None:
        transport = httpx.HTTPTransport(retries=5)  # retry until it listens, after 0.5 s, 1 s, 2 s ...
        with httpx.Client(transport=transport, timeout=60, base_url=f"http://127.0.0.1:{port}") as http:
            answers.extend(http.get(route).json() for route in ("/server_info", "/info"))
            http.post("/v1/completions", json={"prompt": "a"})  # ends the server

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    run("serve", "--port", str(port), "--max-num-waiting", "10")
    asking.join(30)
    server_info, info = answers
    assert server_info["max_running_requests"] == 256
    assert {name: server_info["settings"]["scheduler"][name] for name in limits} == limits
    assert server_info["settings"]["server"]["max_open_requests"] == info["max_concurrent_requests"] == 266


@pytest.mark.turn(8)
def test_kubernetes_service_variable_is_not_used_as_port() -> None:
    """Kubernetes sets this variable in every container of a namespace with a Service named octavo-serve."""
    environment = {**os.environ, "OCTAVO_SERVE_PORT": "tcp://10.0.0.1:8000", "OCTAVO_API_KEY": ""}
    command = [sys.executable, "-m", "octavo", "serve", "--host", "0.0.0.0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
    assert done.returncode == 1
    assert "OCTAVO_SERVE_PORT=tcp://10.0.0.1:8000 is ignored: Kubernetes set it for a Service" in done.stderr
    assert "no API key is set" in done.stderr


def test_serve_reads_option_files_before_model(loads: list[Any], tmp_path: Path) -> None:
    broken, missing = tmp_path / "broken", str(tmp_path / "missing")
    broken.write_text("no certificate, and no TOML")
    for options, told in (
        (("--ssl-certfile", missing, "--ssl-keyfile", missing), "certificate for TLS and its key cannot be used"),
        (("--ssl-certfile", str(broken), "--ssl-keyfile", str(broken)), "certificate for TLS and its key cannot be"),
        (("--api-keys", missing), "cannot be read"),
        (("--api-keys", str(broken)), "not valid TOML"),
        (("--audit-log", str(tmp_path / "no" / "folder")), "audit log"),
    ):
        result = run("serve", "--port", "0", *options)
        assert result.exit_code == 1, options
        assert told in result.stderr
    assert not loads


def test_serve_refuses_negative_max_num_waiting(loads: list[Any]) -> None:
    """A server counts waiting requests itself. A negative value once reduced the places of --max-num-seqs."""
    result = run("serve", "--port", "0", "--max-num-waiting=-60")
    assert result.exit_code == 1
    assert "max_num_waiting" in result.stderr
    assert not loads


def test_sighup_is_ignored_while_model_loads(loads: list[Any], tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    add_key(keys, Tenant(name="alice"))
    assert run("serve", "--port", "0", "--api-keys", str(keys)).exit_code == 1
    assert run("serve", "--port", "0").exit_code == 1
    assert loads == [signal.SIG_IGN, signal.SIG_IGN]


def test_fake_text_has_multibyte_characters() -> None:
    assert len(TEXT) < len(TEXT.encode())


def test_scheduling_options_reach_engine_config() -> None:
    config = EngineOptions(
        scheduling_policy=SchedulingPolicy.FAIR,
        swap_space_bytes=parse_size("2G"),
        max_num_waiting=7,
        admission="reservation",
        max_batch_total_tokens=100,
        record=Path("run.journal"),
    ).config()
    assert (config.scheduler.policy, config.scheduler.max_num_waiting) == ("fair", 7)
    assert (config.cache.swap_space_bytes, config.scheduler.max_batch_total_tokens) == (2 << 30, 100)
    assert config.record == Path("run.journal")


@pytest.mark.parametrize("command", [["replay"], ["explain"], ["trace"]])
def test_file_that_is_no_journal_is_refused_without_traceback(command: list[str], tmp_path: Path) -> None:
    path = tmp_path / "file.journal"
    path.write_text("nothing\n")
    result = run(*command, str(path))
    assert result.exit_code == 1
    assert "journal" in result.output
    assert "Traceback" not in result.output


def test_recorded_journal_can_be_replayed_explained_and_traced(tmp_path: Path) -> None:
    journal, drawing = tmp_path / "run.journal.gz", tmp_path / "trace.json"
    prompts = ["--prompt", "What is 12 + 30?", "--prompt", "What is 1 + 2?", "--temperature", "0"]
    assert run("generate", "--record", str(journal), *prompts).exit_code == 0
    gc.collect()  # the journal is closed with its engine; a real process ends instead
    assert "2 requests" in run("replay", str(journal)).output
    assert "the slowest" in run("explain", str(journal)).output
    assert "generating" in run("explain", str(journal), "1").output
    assert "no request" in run("explain", str(journal), "nobody").output
    assert run("trace", str(journal), "-o", str(drawing)).exit_code == 0
    assert json.loads(drawing.read_text())["traceEvents"]
    result = run("generate", "--record", str(tmp_path / "no" / "such" / "folder"), *prompts)
    assert (result.exit_code, "cannot be written" in result.output) == (1, True)


def test_replay_of_converted_journal_reports_uncompared_steps(tmp_path: Path) -> None:
    header = {
        "journal": VERSION,
        "start": 0,
        "converted_from": 2,
        "scheduler": {},
        "num_host_blocks": 0,
        "connector": "",
        "block_size": 4,
        "enable_prefix_caching": True,
        "cache_decoded_blocks": True,
        "max_model_len": 100,
        "kv_groups": [{"kind": "full_attention", "num_blocks": 9}],
    }
    journal = tmp_path / "run.journal"
    journal.write_text("".join(json.dumps(line) + "\n" for line in [header, ["s", 5, None], ["s", 5, None]]))
    result = run("replay", str(journal))
    assert (result.exit_code, "2 steps were not compared" in result.output) == (0, True)


def test_replay_of_older_journal_names_converter(tmp_path: Path) -> None:
    journal = tmp_path / "run.journal"
    journal.write_text('{"journal": 2}\n')
    result = run("replay", str(journal))
    assert result.exit_code == 1
    assert "tools/convert_journal.py" in result.output.replace("\n", "")


def serve_with(tmp_path: Path, text: str, *arguments: str, **environment: str) -> Any:
    """Run `octavo serve` with an options file. It exits before serving, because its address requires an API key."""
    path = tmp_path / "octavo.toml"
    path.write_text(text, encoding="utf-8")
    arguments = ("serve", "--config", str(path), "--host", "0.0.0.0", *arguments)
    return runner.invoke(app, list(arguments), env={"OCTAVO_API_KEY": "", **environment}, prog_name="octavo")


def test_command_line_overrides_environment_and_file_options(tmp_path: Path) -> None:
    text = 'max-num-seqs = 8\nport = 1\nmax_body_bytes = "1M"\nserved-model-name = ["a", "b"]\nidle-timeout = 5\n'
    result = serve_with(tmp_path, text, "--port", "3", OCTAVO_SERVE_PORT="2", OCTAVO_SERVE_IDLE_TIMEOUT="7")
    assert result.exit_code == 1, result.output
    assert "no API key is set" in result.output
    for line in (
        "max_num_seqs = 8  (file)",
        "port = 3  (command line)",
        "max_body_bytes = 1048576  (file)",
        "served_model_name = ['a', 'b']  (file)",
        "idle_timeout = 7.0  (environment)",
        "host = 0.0.0.0  (command line)",
    ):
        assert line in result.output


def test_command_line_model_overrides_file_and_environment(tmp_path: Path) -> None:
    positional, option = str(tmp_path / "positional"), str(tmp_path / "option")
    for named in ([positional], ["--model", positional]):
        for text, environment in (
            (f'model = "{option}"', {}),
            ("", {"OCTAVO_SERVE_MODEL": option}),
        ):
            result = serve_with(tmp_path, text, *named, **environment)
            assert result.exit_code == 1, result.output
            assert f"octavo {__version__}: {positional} (" in result.output
            assert option not in result.output
    for text, environment in ((f'model = "{option}"', {}), ("", {"OCTAVO_SERVE_MODEL": option})):
        assert f"octavo {__version__}: {option} (" in serve_with(tmp_path, text, **environment).output
    result = serve_with(tmp_path, "", positional, "--model", option)
    assert (result.exit_code, "two models are given" in result.output) == (2, True)


def test_debug_log_shows_every_resolved_option(tmp_path: Path) -> None:
    """This includes defaults, and values derived from other options: a server's limits, and its policy with keys."""
    keys = tmp_path / "keys.toml"
    add_key(keys, Tenant(name="alice"))
    names = ("--allowed-origin", "http://a", "--allowed-origin", "http://b", "--log-level", "debug")
    text = f'max-num-seqs = 8\napi-keys = "{keys}"\nssl-certfile = "none.pem"\nssl-keyfile = "none.pem"\n'
    lines = serve_with(tmp_path, text, *names).output.splitlines()
    shown = {part: line for line in lines for part, _, rest in [line.partition(": ")] if "=" in rest}
    for part, config in (
        ("server", ServerConfig),
        ("model", ModelConfig),
        ("cache", CacheConfig),
        ("scheduler", SchedulerConfig),
        ("device", DeviceConfig),
    ):
        values = [value.partition("=")[0] for value in shown[part].partition(": ")[2].split(", ")]
        assert values == [field.name for field in dataclasses.fields(config)]
    for value in (
        "max_open_requests=1032",  # 8 running requests, and the default number of waiting ones
        "max_num_waiting_tokens=1048576",
        "request_timeout_s=1800.0",
        "allowed_origins=[http://a http://b]",
        "api_key=None",
    ):
        assert f" {value}," in shown["server"]
    for value in ("max_num_seqs=8", "policy=fair", "preemption=auto"):
        assert f" {value}," in shown["scheduler"]


def test_startup_log_hides_api_key(tmp_path: Path) -> None:
    result = serve_with(
        tmp_path, 'api-key = "hush"\nlog-level = "debug"', "--ssl-certfile", "none.pem", "--ssl-keyfile", "none.pem"
    )
    assert result.exit_code == 1
    assert "api_key = ...  (file)" in result.output
    assert " api_key=...," in result.output
    assert "hush" not in result.output


def test_startup_log_is_short_and_shows_changed_options(tmp_path: Path) -> None:
    text = 'max-num-seqs = 8\nkv-cache-memory-bytes = "1GiB"\nssl-certfile = "none.pem"\nssl-keyfile = "none.pem"\n'
    lines = serve_with(tmp_path, text).output.splitlines()
    assert "octavo-demo (dtype auto, quantization none); KV cache: 1 GiB" in lines[0]
    assert "max_num_seqs = 8  (file)" in lines
    assert len(lines) < 12
    assert max(map(len, lines[:-1])) < 160  # the last line is the error about the missing certificate


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot = 1", "'prot' is not an option"),
        ("port = ", "not valid TOML"),
        ("[port]\na = 1", "port must be a value"),
        ('port = "x"', "--port"),
        ("port = 70000", "--port"),
        ('model_argument = "x"', "is not an option"),
        ('config = "x"', "is not an option"),
    ],
)
def test_invalid_options_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    result = serve_with(tmp_path, text)
    assert result.exit_code == 2
    assert message in result.output
    assert "Traceback" not in result.output


def test_keys_command_adds_and_lists_keys(tmp_path: Path) -> None:
    path = str(tmp_path / "keys.toml")
    made = run("keys", "add", path, "alice", "--weight", "2", "--requests-per-minute", "60")
    assert made.exit_code == 0, made.output
    assert made.output.startswith("octavo-")
    assert made.output.strip() not in (tmp_path / "keys.toml").read_text()
    assert run("keys", "list", path).output == "alice: weight 2, 60 requests/min\n"
    again = run("keys", "add", path, "alice")
    assert again.exit_code == 1
    assert "already" in again.output


def test_keys_command_rotates_retires_and_removes_keys(tmp_path: Path) -> None:
    path = str(tmp_path / "keys.toml")
    run("keys", "add", path, "alice")
    run("keys", "add", path, "bob")
    assert run("keys", "rotate", path, "alice").output.startswith("octavo-")
    assert run("keys", "retire", path, "alice").exit_code == 0
    assert run("keys", "retire", path, "alice").exit_code == 1
    assert run("keys", "remove", path, "alice").exit_code == 0
    assert run("keys", "list", path).output == "bob: weight 1\n"
    assert run("keys", "remove", path, "bob").exit_code == 1
