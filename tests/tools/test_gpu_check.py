"""tools/gpu_check.py works before it meets a GPU: all of it at tiny sizes, and what it leaves for the next call."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

TOOLS = Path(__file__).parents[2] / "tools"
sys.path.insert(0, str(TOOLS))
import gpu_check  # noqa: E402
import gpu_stages  # noqa: E402
from triton_interpreter import interpreted_kernels  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")


def checked(tmp_path, *stages, seconds=1000.0):
    with interpreted_kernels():
        return gpu_check.check(tmp_path / "state.json", tmp_path, seconds, is_dry=True, stages=stages)


def test_stages_are_those_that_are_measured():
    assert tuple(gpu_stages.STAGES) == gpu_check.STAGES


def test_kernels_dry(tmp_path):
    report = checked(tmp_path, "peaks", "exactness", "shares")
    assert not report["failures"]
    assert not report["errors"]
    assert all(report["results"]["exactness"].values())
    assert all(each["us"] > 0 for each in report["results"]["shares"].values())


@pytest.mark.slow
def test_all_of_it_dry(tmp_path):
    report = checked(tmp_path, *gpu_check.STAGES)
    assert (report["failures"], report["errors"], report["not_run"]) == ([], {}, [])
    assert report["results"]["tokens"] == {"is_equal": True, "num_requests": 2}
    assert json.loads((tmp_path / "state.json").read_text()) == report["results"]


def test_it_goes_on_where_it_ended(tmp_path, monkeypatch):
    ran = []

    def run_stage(name, folder, seconds, *, is_dry):
        ran.append(name)
        return {"error": "out of memory"} if name == "tokens" and ran.count(name) == 1 else {"is_equal": True}

    monkeypatch.setattr(gpu_check, "run_stage", run_stage)
    report = checked(tmp_path, "peaks", "tokens")
    assert report["errors"] == {"tokens": "out of memory"}
    report = checked(tmp_path, "peaks", "tokens")
    assert report["errors"] == {}
    assert ran == ["peaks", "tokens", "tokens"]
    assert checked(tmp_path, "peaks", "shares", seconds=1.0)["not_run"] == ["shares"]


def test_what_is_wrong_is_named():
    results = {
        "correctness": {"linear": {"units_off": 9.0}, "gate": {"units_off": 1.0}, "sample": {"is_equal": False}},
        "exactness": {"rms_norm": True, "paged_attention": False},
        "tokens": {"is_equal": False},
    }
    assert gpu_stages.failures(results) == [
        "correctness: linear",
        "correctness: sample",
        "exactness: paged_attention",
        "tokens: a request has others in a crowd",
    ]


def test_a_stage_is_a_process_whose_end_is_told(tmp_path, monkeypatch):
    def ended(command, **options):
        return subprocess.CompletedProcess(command, 1, "", "CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(subprocess, "run", ended)
    found = gpu_check.run_stage("shares", tmp_path, 10.0, is_dry=False)
    assert "illegal memory access" in found["error"]
