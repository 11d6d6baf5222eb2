"""The measuring tools run on the built-in model, and judge as they say."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch

from octavo import _kernels
from octavo.assets import built_in_model_path
from octavo.kernels.cpu import CpuKernels
from octavo.kernels.quantization import kv_scales
from octavo.kernels.reference import ReferenceKernels

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import ab  # noqa: E402
import curves  # noqa: E402
import kernels as kernel_cases  # noqa: E402
import memory  # noqa: E402
import perplexity  # noqa: E402
import products  # noqa: E402
import serving  # noqa: E402
import start  # noqa: E402
import step_overhead  # noqa: E402
import step_profile  # noqa: E402

MB = 10**6


@pytest.mark.parametrize(
    ("peak", "after", "faults"),
    [(129, 100, []), (131, 100, ["peak"]), (500, 561, ["RSS"]), (800, 600, ["peak", "RSS"])],
)
def test_memory_is_judged(peak, after, faults):
    found = memory.Memory(peak * MB, 0, 0, after * MB).faults(weights=100 * MB, kv=60 * MB)
    assert [fault.split()[0] for fault in found] == faults


def test_memory_of_a_server_is_that_of_its_two_processes(tmp_path):
    workloads = tmp_path / "workloads.json"
    requests = [{"prompt": [100 + i, 200, 300], "out": 4} for i in range(2)]
    workloads.write_text(json.dumps({"A": requests, "B": requests}))
    for measure in (memory.of_llm, memory.of_server):
        *parts, (_, whole) = measure(built_in_model_path(), "bf16", 32 << 20, 1, workloads).items()
        assert 50 * MB < whole.loaded <= whole.load_peak <= whole.peak
        assert 50 * MB < whole.after <= whole.peak
        shared = sum(part.after for _, part in parts) - whole.after
        assert not parts or 5 * MB < shared < 0.6 * min(part.after for _, part in parts)  # the same libraries
    assert [name for name, _ in parts] == ["serve, HTTP process", "serve, engine process"]


@pytest.mark.parametrize("way", ["LLM", "generate", "serve"])
def test_a_start_is_timed(way, tmp_path):
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    seconds, peak = start.start(way, str(built_in_model_path()), "bf16", environment)
    assert 0.05 < seconds < serving.READY_S
    assert (peak is not None) == (way == "LLM")


def test_a_start_that_fails_is_not_timed(tmp_path):
    with pytest.raises(RuntimeError, match="does not start"):
        start.start("serve", str(tmp_path), "bf16", dict(os.environ))
    for program in ("", "print(1); raise SystemExit(1)"):
        with pytest.raises(RuntimeError, match="ended with"):
            start.first_output([sys.executable, "-c", program], dict(os.environ))


def test_a_stall_stands_beside_the_step_before_the_prompt():
    found = curves.Stall.of(before=[10.0, 20.0, 30.0], meanwhile=[80.0] * 99 + [100.0])
    lines = found.table().splitlines()
    assert lines[2] == "| median before the prompt | 20.0 | 0.25 | 1.00 |"
    assert lines[3] == "| median while it runs | 80.0 | 1.00 | 4.00 |"
    assert lines[5] == "| most while it runs | 100.0 | 1.25 | 5.00 |"


def test_a_curve_is_of_all_rounds():
    curve = curves.Curve("tokens/s", "requests", (1, 2), [[10.0, 30.0], [50.0, 20.0], [20.0, 40.0]])
    assert curve.head() == "| requests | 1 | 2 |\n|---|---|---|"
    assert curve.row(0) == "| tokens/s | 20 | 30 |\n| least to greatest | 10 to 50 | 20 to 40 |"
    alone = curves.Curve("ms", "tokens of KV", (1, 2), [[10.25, 30.0]])
    assert alone.row(1) == "| ms | 10.2 | 30.0 |"


def test_curves_need_a_round(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["curves.py", "--rounds", "0"])
    with pytest.raises(SystemExit):
        curves.main()
    assert "--rounds: at least 1" in capsys.readouterr().err


def test_curves_are_measured(monkeypatch, capsys):
    monkeypatch.setattr(curves, "REQUESTS", (1, 2))
    monkeypatch.setattr(curves, "LENGTHS", (32, 64))
    monkeypatch.setattr(curves, "LONG_PROMPT", 1024)
    monkeypatch.setattr(sys, "argv", ["curves.py", "--model", str(built_in_model_path()), "--rounds", "2"])
    curves.main()
    said = capsys.readouterr().out
    for head in ("| requests | 1 | 2 |", "| tokens of the prompt | 32 | 64 |", "| tokens of KV | 32 | 64 |"):
        assert head in said
    assert said.count("least to greatest") == 3
    assert "8 streams and a prompt of 1024" in said


def test_curves_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    curve = curves.Curve("tokens/s", "requests", (1, 2), [[10.0, 30.0], [50.0, 20.0]])
    curves.draw(tmp_path / "curves", [curve, curve])
    assert {path.name for path in tmp_path.iterdir()} == {"curves.png", "curves.svg"}


def test_steps_without_kernels_are_real_steps(monkeypatch):
    llm, kernels = step_overhead.open_engine(str(built_in_model_path()), 4, 5)
    calls = []
    monkeypatch.setattr(step_overhead, "_nothing", lambda *arguments: calls.append(len(arguments)))
    before = llm.llm_engine.core.scheduler.get_stats().num_steps
    found = step_overhead.measure(llm, kernels, step_overhead.watched(llm), 4, 5)
    assert set(found) == set(step_overhead.COLUMNS)
    assert all(ms > 0 for ms in found.values())
    assert sum(ms for name, ms in found.items() if name != "step") == pytest.approx(found["step"], rel=0.5)
    steps = llm.llm_engine.core.scheduler.get_stats().num_steps - before
    assert steps >= 6
    assert len(calls) == 2 * steps  # the recorded forward pass, and the logits
    assert not kernels.is_idle


def test_the_parts_of_a_step_are_all_of_it():
    llm = step_profile.open_engine(str(built_in_model_path()), "int8", 2, 64, 1)
    profile = step_profile.StepProfile(llm)
    products = step_profile.products_of(profile.runner.model)
    architecture = profile.runner.model.architecture
    assert {name: len(weights) for name, weights in products.items()} == {
        **dict.fromkeys(step_profile.PRODUCTS, architecture.num_layers),
        step_profile.LOGITS: 1,
    }
    decoded, prompts = profile.decode(2, 5), profile.prefill(48, 3)
    assert (len(decoded), len(prompts)) == (5, 3)
    for step in (*decoded, *prompts):
        parts = {name: seconds for name, seconds in step.items() if name != "step"}
        assert set(products) < set(parts)
        assert all(seconds > 0 for seconds in parts.values())
        assert sum(parts.values()) == pytest.approx(step["step"])
    amounts = step_profile.operations(products, 48)
    per_token = amounts["qkv"] + amounts["o"] + amounts["gate_up"] + amounts["down"]
    assert amounts["step"] == per_token + amounts[step_profile.LOGITS]
    rows = 48 * (architecture.num_layers - 1) + 1
    assert amounts["o"] == rows * 2 * architecture.hidden_size**2
    assert amounts["qkv"] > 48 * architecture.num_layers * 2 * architecture.hidden_size**2
    for steps, counted, units in (
        (decoded, step_profile.bytes_read(products), ("MB", "GB/s")),
        (prompts, amounts, ("GFLOP", "GFLOP/s")),
    ):
        rows = [line.split(" | ") for line in step_profile.report(steps, counted, 1e9, units).splitlines()]
        assert len(rows) == 2 + len(steps[0])
        assert rows[2][0] == "| step"
        assert {row[0][2:] for row in rows[2:] if row[4]} == {"step", *products}


def test_a_stopwatch_counts_what_is_within_once(monkeypatch):
    clock = iter([0.0, 1.0, 4.0, 10.0, 20.0, 22.0])
    monkeypatch.setattr(step_overhead.time, "perf_counter", lambda: next(clock))
    owner = type("Owner", (), {"inner": lambda _: None, "outer": lambda self: self.inner()})()
    watch = step_overhead.Stopwatch()
    watch.wrap(owner, "inner", "inner")
    watch.wrap(owner, "outer", "outer")
    owner.outer()
    owner.inner()
    assert watch.lap() == {"inner": 3.0 + 2.0, "outer": 7.0}
    assert watch.lap() == {}


@pytest.mark.parametrize(("precision", "error"), [("bf16", 0.01), ("fp32", 1e-5), ("int8", 0.05), ("int4", 0.2)])
def test_both_multiply_the_same_weight(precision, error):
    weight, x = torch.randn(64, 128).bfloat16(), torch.randn(5, 128)
    x = x if precision == "fp32" else x.bfloat16()
    expected = x.double() @ weight.double().T
    ours = products.octavo_products(CpuKernels(num_threads=1), weight, precision, 2)
    theirs = products.torch_products(weight, precision, 2)
    given = products.rows_for_torch(x, precision)
    for results in ([f(x) for f in ours], [f(given) for f in theirs]):
        assert len(results) == 2
        for result in results:
            assert (result.double() - expected).norm() < error * expected.norm()


def test_turns_change_and_the_first_round_does_not_count():
    calls = []
    found = products.in_turns([lambda: calls.append("a")], [lambda: calls.append("b")], 3)
    assert "".join(calls) == "baabbaab"
    assert len(found) == 3


def test_cases_of_an_int8_cache_stand_for_its_numbers():
    numbers = torch.randn(3, 2, 2, 16, 64)
    rows = kernel_cases.int8_cache(numbers)
    for side in (0, 1):
        cache = rows[:, side]
        assert torch.allclose(cache.float() * kv_scales(cache).unsqueeze(-1), numbers[:, side], atol=0.03)


def test_sequences_of_a_batch_begin_with_the_first_one_s_blocks():
    apart, blocks = kernel_cases.attention_batch([(40, 1), (48, 1), (33, 1)])
    shared, same_blocks = kernel_cases.attention_batch([(40, 1), (48, 1), (33, 1)], 32)
    assert blocks == same_blocks == 9
    assert apart.block_tables.tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert shared.block_tables.tolist() == [[0, 1, 2], [0, 1, 5], [0, 1, 8]]
    assert torch.equal(shared.slot_mapping, apart.slot_mapping)


def test_gated_products_of_every_precision_are_cases():
    names = [each.name for each in kernel_cases.gated_cases(ReferenceKernels(), " x1")]
    assert [name for name in names if name.endswith(" x1")] == ["gated_linear x1", "gated int8 x1", "gated int4 x1"]


def test_two_builds_run_in_turns(tmp_path):
    copy = tmp_path / "_kernels.so"
    copy.write_bytes(Path(_kernels.__file__).read_bytes())
    builds = [ab.Build(path, "int8 o x1", 1) for path in (str(copy), sys.executable)]
    assert [build.module for build in builds] == [str(copy), _kernels.__file__]
    found = list(ab.compare(*builds, rounds=2))
    assert [name for name, *_ in found] == ["int8 o x1", "int8 o x16", "int8 o x128"]
    assert all(len(side) == 2 and min(side) > 0 for _, *sides in found for side in sides)
    for build in builds:
        build.end()
    with pytest.raises(RuntimeError, match="ended with"):
        ab.Build(str(tmp_path / "missing.so"), "", 1)


def test_quality_and_speed_by_precision(monkeypatch, capsys):
    command = ["perplexity.py", str(built_in_model_path()), "--precision", "bf16", "--precision", "int8"]
    monkeypatch.setattr(sys, "argv", [*command, "--pieces", "1", "--rounds", "1"])
    perplexity.main()
    _, _, bf16, int8 = capsys.readouterr().out.splitlines()
    name, megabytes, _, against, *rates = (each.strip() for each in bf16.strip("|").split("|"))
    assert (name, against) == ("bf16", "+0.00%")
    assert all(float(rate) > 0 for rate in rates)
    assert 0 < float(int8.split("|")[2]) < float(megabytes)
    assert abs(float(int8.split("|")[4].strip().rstrip("%"))) < 10
