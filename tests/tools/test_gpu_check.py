"""tools/gpu_check.py works without a GPU: all stages at tiny sizes, and the results kept for the next call."""

import contextlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

TOOLS = Path(__file__).parents[2] / "tools"
sys.path.insert(0, str(TOOLS))
import gpu_check  # noqa: E402
import gpu_device  # noqa: E402
import gpu_engine  # noqa: E402
import gpu_exactness  # noqa: E402
import gpu_stages  # noqa: E402
import triton_interpreter  # noqa: E402
from running import wait_until  # noqa: E402
from triton.runtime import interpreter  # noqa: E402
from triton_interpreter import interpreted_kernels  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")


def checked(tmp_path, *stages, seconds=1000.0):
    with interpreted_kernels():
        return gpu_check.check(tmp_path / "state.json", tmp_path, seconds, is_dry=True, stages=stages, soak_s=1.0)


def test_stage_list_equals_stages_that_can_be_measured():
    assert tuple(gpu_stages.STAGES) == gpu_check.STAGES


@pytest.mark.slow
def test_kernel_stages_pass_in_dry_run(tmp_path):
    report = checked(tmp_path, "peaks", "correctness", "exactness", "shares")
    assert (report["failures"], report["errors"], report["not_run"]) == ([], {}, [])
    results = report["results"]
    assert all(each["is_equal"] for each in results["exactness"].values())
    assert all(each["us"] > 0 for each in results["shares"].values())
    operations = {name.split()[0] for name in results["correctness"]}
    assert operations >= {"paged_attention", "rope_and_write_kv", "embedding", "take_rows", "rejection_sample"}


@pytest.mark.slow
def test_all_stages_pass_in_dry_run(tmp_path):
    report = checked(tmp_path, *gpu_check.STAGES)
    assert (report["failures"], report["errors"], report["not_run"]) == ([], {}, [])
    assert report["results"]["tokens"]["built-in model"] == {"is_equal": True, "num_requests": 2}
    assert report["results"]["swap"]["swapped"]["num_swapped"] > 0
    assert report["results"]["restart"]["killed"]["num_lost"] == 1
    assert report["results"]["soak"]["soak"]["num_requests"] > 1
    kept = json.loads((tmp_path / "state.json").read_text())
    assert kept == {"identity": report["identity"], "results": report["results"]}


def test_dry_run_uses_matmul_with_fixed_order(tmp_path, monkeypatch):
    """As on a device. numpy's library would sum in orders of its own, so rows would have different bits."""
    seen = []

    def check(_state, _folder, _seconds, **options):
        seen.append((interpreter.interpreter_builder.create_dot, options["soak_s"]))
        return {"failures": [], "errors": {}, "not_run": []}

    monkeypatch.setattr(gpu_check, "check", check)
    # A fixture of another file may have patched the interpreter in this process. The dry run must be the first to patch
    # it.
    monkeypatch.setattr(interpreter.interpreter_builder, "create_dot", None)
    monkeypatch.setattr(triton_interpreter, "_entered", [])
    monkeypatch.setattr(triton_interpreter, "_undone_at_last", contextlib.ExitStack())
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--dry-run", "--state", str(tmp_path / "state.json")])
    assert gpu_check.main() == 0
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--soak-seconds", "7"])
    assert gpu_check.main() == 0
    assert seen == [(triton_interpreter.dot, 2.0), (triton_interpreter.dot, 7.0)]
    assert interpreter.interpreter_builder.create_dot is None


@pytest.fixture
def stages(monkeypatch):
    """Fake stages. Return the list of those that ran, and the dictionary of their results."""
    ran, find = [], {"identity": {"identity": {"code": "1"}}}

    def run_stage(name, folder, seconds, *, is_dry, soak_s=None, skip=()):
        ran.extend([name] * (name != "identity"))
        return find.get(name, {"linear": {"is_equal": True}})

    monkeypatch.setattr(gpu_check, "run_stage", run_stage)
    return ran, find


@pytest.mark.parametrize("failed", [{"error": "out of memory"}, {"a": {"is_equal": False}}, {"a": {"error": "none"}}])
def test_failed_stages_are_repeated_and_passed_ones_kept(tmp_path, stages, failed):
    ran, find = stages
    find["tokens"] = failed
    report = checked(tmp_path, "peaks", "tokens")
    assert report["errors"] or report["failures"] == ["tokens: a"]
    del find["tokens"]
    report = checked(tmp_path, "peaks", "tokens")
    assert (report["errors"], report["failures"]) == ({}, [])
    assert ran == ["peaks", "tokens", "tokens"]
    assert checked(tmp_path, "peaks", "shares", seconds=1.0)["not_run"] == ["shares"]


def test_results_of_different_code_are_dropped(tmp_path, stages):
    ran, find = stages
    checked(tmp_path, "peaks", "tokens")
    find["identity"] = {"identity": {"code": "2"}}
    assert checked(tmp_path, "peaks")["results"] == {"peaks": {"linear": {"is_equal": True}}}
    assert ran == ["peaks", "tokens", "peaks"]


def test_result_identity_includes_kernel_code(tmp_path, monkeypatch):
    with interpreted_kernels():
        before = gpu_check.measured("identity", tmp_path, is_dry=True)
        assert gpu_check.measured("identity", tmp_path, is_dry=True) == before
        (tmp_path / "attention.py").write_text("TILE = 32")
        monkeypatch.setattr(gpu_stages.kernels_in_triton, "__path__", [str(tmp_path)])
        after = gpu_check.measured("identity", tmp_path, is_dry=True)
    assert before["identity"].pop("code") != after["identity"].pop("code")
    assert before == after


def test_failures_lists_failed_entries():
    stage = {
        "linear": {"units_off": 9.0},
        "gate": {"units_off": 1.0},
        "sample": {"is_equal": False},
        "swapped": {"is_equal": True, "is_right": False},
        "embedding": {"is_equal": True, "is_right": True},
        "rms_norm": {"error": "CompilationError"},
        "decode": {"us": 3.0},
        "error": "not done after 3 s",  # of the whole stage
    }
    assert gpu_stages.failures(stage) == ["linear", "sample", "swapped", "rms_norm"]


def test_failed_operation_does_not_stop_next_operations(monkeypatch):
    reported = []
    entries = gpu_device.Entries(torch.device("cpu"), reported.append)
    entries.add("first", lambda: {"us": 1.0})
    entries.add("second", lambda: {"us": 1 / 0})
    entries.add("third", lambda: {"us": 3.0})
    assert reported == [
        {"first": gpu_device.BEGUN}, {"first": {"us": 1.0}},
        {"second": gpu_device.BEGUN}, {"second": {"error": "ZeroDivisionError: division by zero"}},
        {"third": gpu_device.BEGUN}, {"third": {"us": 3.0}},
    ]  # fmt: skip

    def lost(device):
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(gpu_device, "wait", lost)
    entries.add("fourth", lambda: {"us": 4.0})
    entries.add("fifth", lambda: {"us": 5.0})
    assert list(entries.found) == ["first", "second", "third", "fourth", "device"]
    assert "nothing more was measured" in entries.found["device"]["error"]


@pytest.mark.turn(12)
def test_exactness_stage_detects_chunk_dependent_attention(tmp_path, monkeypatch):
    """If tiles of keys depend on the number of rows, a prompt in one chunk has other bits than the prompt in parts."""
    with interpreted_kernels():
        check = replace(gpu_device.open_check(tmp_path, is_dry=True), sizes=replace(gpu_device.DRY, prompt=5))
        attend = check.kernels.paged_attention

        def by_rows(q, *arguments):
            return attend(q, *arguments) * (1.0 if len(q) > 1 else 1.0 + 1e-6)

        monkeypatch.setattr(check.kernels, "paged_attention", by_rows)
        entry = gpu_exactness._attention(check, torch.float32, gpu_device.AttentionCase(1, 64))
    assert not entry["is_equal"]
    assert [0, 1, "a decode alone"] in entry["differ"]


STAGE = """if True:
    import sys, gpu_check
    def measured(name, folder, *, is_dry, soak_s, skip, part, report):
        print("a library says something")
        for number in range(5):
            if f"linear {number}" in skip:
                continue
            report({f"linear {number}": {"error": "begun"}})
            if number in (1, 3):
                sys.stdout.write("gpu_check: {'cut")
                sys.exit(f"CUDA error in {number}: an illegal memory access was encountered")
            report({f"linear {number}": {"us": float(number)}})
    gpu_check.measured = measured
    sys.argv = ["gpu_check", *sys.argv[1:]]
    sys.exit(gpu_check.main())
    """


@pytest.fixture
def stage_processes(monkeypatch):
    """Let processes of stages run the script above, or another one that is returned by the fixture's list."""
    popen, script = subprocess.Popen, [STAGE]

    def start(command, **options):
        return popen([command[0], "-c", script[0], *command[2:]], cwd=TOOLS, **options)

    monkeypatch.setattr(gpu_check.subprocess, "Popen", start)
    return script


def test_entries_of_a_process_that_crashed_are_kept(tmp_path, stage_processes):
    found = gpu_check.run_stage("shares", tmp_path, 100.0, is_dry=False)
    assert found.pop("error").strip() == "CUDA error in 1: an illegal memory access was encountered"
    assert found == {"linear 0": {"us": 0.0}, "linear 1": {"error": "begun"}}


@pytest.mark.turn(12)
def test_stage_continues_after_each_operation_that_crashes(tmp_path, stage_processes):
    """A later call of the command measures only the operations that failed."""
    end = gpu_check.time.monotonic() + 100.0
    found = gpu_check.run_past_crashes("shares", tmp_path, end, {}, is_dry=False, soak_s=1.0)
    assert found.pop("error").strip() == "CUDA error in 3: an illegal memory access was encountered"
    broken = {"error": "begun"}
    assert found == {"linear 0": {"us": 0.0}, "linear 1": broken, "linear 2": {"us": 2.0}, "linear 3": broken,
                     "linear 4": {"us": 4.0}}  # fmt: skip
    stage_processes[0] = STAGE.replace("(1, 3)", "()").replace("float(number)", "10.0")
    again = gpu_check.run_past_crashes("shares", tmp_path, end, found | {"error": "x"}, is_dry=False, soak_s=1.0)
    assert again == {"linear 0": {"us": 0.0}, "linear 1": {"us": 10.0}, "linear 2": {"us": 2.0},
                     "linear 3": {"us": 10.0}, "linear 4": {"us": 4.0}}  # fmt: skip


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.turn(12)
def test_time_out_keeps_entries_and_ends_the_processes_of_the_stage(tmp_path, stage_processes):
    child = tmp_path / "child"
    stage_processes[0] = f"""if True:
        import os, pathlib, subprocess, time
        child = subprocess.Popen(["sleep", "100"])
        print('gpu_check: {{"linear": {{"us": 1.0}}}}', flush=True)
        pathlib.Path({str(child)!r}).write_text(str(child.pid))
        time.sleep(100)
        """
    found = gpu_check.run_stage("shares", tmp_path, 3.0, is_dry=False)
    assert found == {"linear": {"us": 1.0}, "error": "not done after 3 s"}
    wait_until(lambda: not is_running(int(child.read_text())), "the child has ended")


def test_processes_divide_a_stage(tmp_path):
    found = []
    for index in range(3):
        entries = gpu_device.Entries(torch.device("cpu"), lambda _entry: None, part=(index, 3))
        for number in range(7):
            entries.add(str(number), lambda: {"us": 1.0})
        found += entries.found
    assert sorted(found) == list("0123456")


def test_nano_vllm_error_keeps_octavo_results(tmp_path, monkeypatch):
    def fails(*_arguments):
        raise OSError("no tokenizer")

    monkeypatch.setattr(gpu_engine.importlib.util, "find_spec", lambda name: object() if name == "nanovllm" else None)
    monkeypatch.setattr(gpu_engine, "_octavo", lambda *_arguments: {"output_tok_per_s": 5.0})
    monkeypatch.setattr(gpu_engine, "_peer", fails)
    check = gpu_device.Check(torch.device("cpu"), gpu_device.DRY, tmp_path, None)
    entries = gpu_device.Entries(check.device, lambda _entry: None)
    gpu_engine.peers(check, entries)
    assert list(entries.found) == ["octavo 1", "nano-vllm 1", "octavo 2", "nano-vllm 2", "vllm"]
    assert entries.found["nano-vllm 1"] == {"error": "OSError: no tokenizer"}
    assert entries.found["octavo 2"] == {"output_tok_per_s": 5.0}
