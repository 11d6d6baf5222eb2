"""`octavo doctor`: correct figures, a verdict that can be negative, and clear errors."""

from __future__ import annotations

import functools
import itertools
import json
import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from alone_and_crowd import needs_kernels
from gguf_files import write_gguf
from typer.testing import CliRunner

from octavo.cli import app
from octavo.models.random_weights import tiny_config, write_checkpoint

pytestmark = needs_kernels


@pytest.fixture
def doctor(monkeypatch):
    """Return a function that runs it on little memory. It returns (exit status, standard output)."""
    cpu = pytest.importorskip("octavo.kernels.cpu")
    module = pytest.importorskip("octavo.worker.machine_report")
    monkeypatch.setattr(module, "cold_bytes", lambda: 1 << 20)
    monkeypatch.setattr(pytest.importorskip("octavo.worker.attention_report"), "cold_bytes", lambda: 1 << 20)
    little = functools.partialmethod(cpu.CpuKernels.measure_limits, num_bytes=1 << 22, rounds=1)
    monkeypatch.setattr(cpu.CpuKernels, "measure_limits", little)

    def run(*arguments):
        result = CliRunner().invoke(app, ["doctor", *arguments], prog_name="octavo")
        return result.exit_code, result.stdout, result.stderr

    return run


@pytest.mark.turn(12)
def test_doctor_report_has_consistent_figures(doctor):
    status, text, _ = doctor("--json", "--num-threads", "2")
    report = json.loads(text)
    assert status == 0
    assert report["is_exact"]
    assert report["isa"] == report["instruction_sets"][0]
    assert report["num_threads"] == 2
    assert {check["precision"] for check in report["checks"]} == {"bfloat16", "int8"}
    assert {product["name"] for product in report["products"]} == {"qkv", "o", "gate_up", "down", "lm_head"}
    for product in report["products"]:
        work = 2 * product["rows"] * product["experts"] * product["out_features"] * product["in_features"]
        assert product["ops_per_s"] == pytest.approx(work / product["seconds"])
        peak = report["limits"]["byte_ops" if product["precision"] == "int8" else "bfloat16_flops"]
        shares = product["ops_per_s"] / peak, product["bytes_per_s"] / report["limits"]["bytes_read"]
        assert product["of_limit"] == pytest.approx(max(shares))
    assert all(0 < check["error"] < 0.02 for check in report["checks"])
    assert [(each["kv"], each["positions"], each["rows"]) for each in report["attention"]] == list(
        itertools.product(["bfloat16", "int8"], [1024, 8192], [1, 512])
    )
    for each in report["attention"]:
        seen = sum(range(each["positions"] - each["rows"] + 1, each["positions"] + 1))
        work = 4 * seen * each["num_heads"] * each["head_dim"]
        assert each["ops_per_s"] == pytest.approx(work / each["seconds"])
        row_bytes = each["head_dim"] + 4 if each["kv"] == "int8" else 2 * each["head_dim"]
        assert each["num_bytes"] == 2 * each["positions"] * each["num_kv_heads"] * row_bytes


@pytest.mark.turn(12)
def test_doctor_checks_block_formats_of_gguf_file(doctor, tmp_path):
    """Products with rows of whole blocks are examined. A file stores other tensors in other types."""
    config = tiny_config("LlamaForCausalLM", vocab_size=288, hidden_size=96, intermediate_size=256, head_dim=16)
    folder = write_checkpoint(tmp_path / "folder", config)
    path = write_gguf(folder, tmp_path / "model.gguf", kind="Q4_1", kinds={"attn_v": "F16", "ffn_up": "Q8_0"})
    status, text, _ = doctor("--json", str(path))
    checks = json.loads(text)["checks"]
    assert (status, {check["precision"] for check in checks}) == (0, {"Q4_1", "Q8_0", "int8"})
    assert all(0 < check["error"] < 0.02 for check in checks)
    _, text, _ = doctor("--json", "--precision", "Q6_K", str(path))
    assert {check["name"] for check in json.loads(text)["checks"]} == {"down"}
    status, text, _ = doctor("--isa", "portable", "--precision", "Q6_K", str(path))
    assert "activations are rounded" in text
    write_gguf(write_checkpoint(folder, config | {"intermediate_size": 128}), path)
    status, _, problem = doctor("--precision", "Q6_K", str(path))
    assert (status, "precision Q6_K: no matrix" in problem) == (1, True)


@pytest.mark.turn(12)
@pytest.mark.parametrize("slow_at", ["first", "last"])
def test_limits_are_best_of_two_measurements(doctor, monkeypatch, slow_at):
    from octavo.kernels.cpu import CpuKernels
    from octavo.kernels.limits import Limits

    slow, fast = Limits(1e9, 2e9, 3e9, 8e9), Limits(4e9, 5e9, 6e9, 7e9)
    given = [slow, fast] if slow_at == "first" else [fast, slow]
    left = given.copy()
    monkeypatch.setattr(CpuKernels, "measure_limits", lambda _self: left.pop(0))
    _, text, _ = doctor("--json", "--precision", "int8")
    report = json.loads(text)
    assert report["limits"] == report["best_limits"] == asdict(Limits(4e9, 5e9, 6e9, 8e9))
    assert report["limits_each"] == [asdict(each) for each in given]
    product = report["products"][0]
    assert product["of_limit"] == pytest.approx(max(product["ops_per_s"] / 5e9, product["bytes_per_s"] / 8e9))
    left = given.copy()
    _, text, _ = doctor("--precision", "int8")
    assert "limits     4 GFLOP/s float32, 6 bfloat16, 5 GOP/s int8, 8.0 GB/s read" in text
    assert "the machine's speed changed" in text
    assert "shares above 100 %" in text  # the assumed limits are lower than any machine's


@pytest.mark.turn(12)
def test_stable_machine_gets_no_speed_warning(doctor, monkeypatch):
    from octavo.kernels.cpu import CpuKernels
    from octavo.kernels.limits import Limits

    fast = Limits(4e9, 5e9, 6e9, 7e9)
    monkeypatch.setattr(CpuKernels, "measure_limits", lambda _self: left.pop(0))
    left = [fast, replace(fast, flops=4.9e9)]
    _, text, _ = doctor("--precision", "int8")
    assert "the machine's speed changed" not in text
    left = [Limits(1e18, 1e18, 1e18, 1e18)] * 2
    _, text, _ = doctor("--precision", "int8")
    assert "shares above 100 %" not in text


@pytest.mark.turn(12)
@pytest.mark.parametrize(("precision", "has_lm_head"), [("int4", False), ("int4_all", True)])
def test_lm_head_is_checked_only_in_precision_that_quantizes_it(doctor, precision, has_lm_head):
    status, text, _ = doctor("--json", "--precision", precision)
    report = json.loads(text)
    assert status == 0
    assert {product["precision"] for product in report["products"]} == {precision}
    for kind in ("products", "checks"):
        assert ("lm_head" in {each["name"] for each in report[kind]}) == has_lm_head
    for product in report["products"]:
        num_values = product["out_features"] * product["in_features"]
        assert 0.5 < product["bytes_per_s"] * product["seconds"] / num_values < 0.65  # with scales and units


@pytest.mark.turn(12)
def test_doctor_times_kernel_calls_of_model(doctor, monkeypatch):
    from octavo.kernels.cpu import CpuKernels

    module, widths = pytest.importorskip("octavo.worker.machine_report"), {"linear": set(), "gated_linear": set()}
    check = module.Check("gate_up", "int8", rows_are_independent=True, threads_are_equal=True, error=0.01)
    monkeypatch.setattr(module, "_check", lambda name, *_: replace(check, name=name))
    for call, seen in widths.items():
        honest = getattr(CpuKernels, call)

        def watch(self, x, packed, honest=honest, seen=seen, **options):
            seen.add(packed.out_features)
            return honest(self, x, packed, **options)

        monkeypatch.setattr(CpuKernels, call, watch)
    status, text, _ = doctor("--json", "--precision", "int8", "--isa", "portable")
    products = {each["name"]: each["out_features"] for each in json.loads(text)["products"]}
    assert status == 0
    assert widths["gated_linear"] == {products.pop("gate_up")}
    assert widths["linear"] == set(products.values())


@pytest.mark.turn(12)
def test_doctor_with_portable_isa_reports_lost_arithmetic(doctor):
    status, text, _ = doctor("--isa", "portable", "--precision", "float32")
    assert status == 0
    assert "kernels    portable" in text
    assert "arithmetic are lost" in text
    assert "float32: at most" in text
    assert "int8:" not in text


@pytest.mark.turn(12)
def test_doctor_reports_batch_dependent_kernel(doctor, monkeypatch):
    from octavo.kernels.cpu import CpuKernels

    honest = CpuKernels.linear

    def linear(self, x, packed, **options):
        return honest(self, x, packed, **options) + (1.0 if x.shape[0] == 13 else 0.0)

    monkeypatch.setattr(CpuKernels, "linear", linear)
    status, text, _ = doctor()
    assert status == 1
    assert "NOT EXACT  qkv bfloat16: a row depends on the other rows of its batch" in text
    assert "exact      every row" not in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--isa", "avx9"], "isa must be one of auto, amx"),
        (["--precision", "int3"], "precision must be one of float32"),
        (["/nowhere"], "/nowhere does not exist"),
    ],
)
def test_doctor_refuses_invalid_arguments(doctor, arguments, message):
    status, _, error = doctor(*arguments)
    assert status == 1
    assert message in error


@pytest.mark.parametrize("precision", ["bfloat16", "int8"])
@pytest.mark.parametrize("depth", [64, 256, 896, 1024, 4864])
def test_checked_rows_exceed_kernel_block_sizes(precision, depth):
    """Enough rows that panels are read again, by the products with and without tiles."""
    module = pytest.importorskip("octavo.worker.machine_report")
    rows, row_bytes = module.checked_rows(precision, depth), depth * (1 if precision == "int8" else 2)
    assert rows > constant("tile_slices.h", "kMostBlockPairs") * 32
    assert rows > constant("quantized_rows.h", "kBlockBytes") // row_bytes
    assert rows > constant("linear.h", "kBlockRows")


def constant(file, name):
    """Read a constant from csrc. A tile has 14 rows with AVX-512."""
    text = (Path(__file__).parents[2] / "csrc" / file).read_text()
    left, operation, right = re.search(rf"constexpr int64_t {name} = (\w+)(?: (\*|<<) (\w+))?;", text).groups()
    first, second = (14 if each == "kTileRows" else int(each or 0) for each in (left, right))
    return first * second if operation == "*" else first << second


@pytest.mark.turn(8)
def test_doctor_keeps_torch_thread_count(doctor):
    before = torch.get_num_threads()
    doctor("--precision", "int8")
    assert torch.get_num_threads() == before


def test_doctor_examines_experts_and_latent_attention(doctor, tmp_path):
    path = write_checkpoint(tmp_path / "model", tiny_config("DeepseekV3ForCausalLM"))
    status, text, error = doctor(str(path), "--json", "--precision", "bfloat16", "--num-threads", "2")
    assert status == 0, error
    report = json.loads(text)
    names = {"latents", "queries", "o", "gate_up", "down", "lm_head", "expert gate_up", "expert down"}
    assert {each["name"] for each in report["products"]} == {each["name"] for each in report["checks"]} == names
    assert report["is_exact"]
    for product in report["products"]:
        assert product["experts"] == (3 if product["name"].startswith("expert") else 1)


def test_doctor_reports_grouped_product_that_depends_on_other_rows(doctor, tmp_path, monkeypatch):
    cpu = pytest.importorskip("octavo.kernels.cpu")
    right = cpu.CpuKernels.grouped_linear
    monkeypatch.setattr(cpu.CpuKernels, "grouped_linear", lambda *args, **options: right(*args, **options) * 1.01)
    path = write_checkpoint(tmp_path / "model", tiny_config("Qwen3MoeForCausalLM"))
    status, text, _ = doctor(str(path), "--precision", "bfloat16")
    assert status == 1
    assert "NOT EXACT  expert gate_up bfloat16" in text
