"""`octavo doctor --tensor-parallel-size N`: what each rank gets, measured figures, and clear errors."""

from __future__ import annotations

import json
import os

import pytest
from alone_and_crowd import needs_kernels
from rank_threads import RankThread
from typer.testing import CliRunner

from octavo.cli import app
from octavo.kernels.machine import cores_of_rank, numa_node, usable_cores
from octavo.models.random_weights import tiny_config, write_checkpoint
from octavo.ranks import leader, measured_rank, messages, ranks_report

pytestmark = needs_kernels
needs_two_cores = pytest.mark.skipif(len(usable_cores()) < 2, reason="each rank needs a core")


def doctor(*arguments):
    """Run the command. Return exit status, standard output and standard error."""
    result = CliRunner().invoke(app, ["doctor", *arguments], prog_name="octavo")
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def little(monkeypatch):
    """Read little memory and exchange few rows."""
    monkeypatch.setattr(ranks_report, "_READ_BYTES", 8 << 20)
    monkeypatch.setattr(ranks_report, "_EXCHANGES", [(1, 2), (3, 1)])


@pytest.fixture
def in_threads(monkeypatch, little):
    """Run ranks in threads of the test's process."""
    monkeypatch.setattr(ranks_report, "start_process", RankThread)


@pytest.fixture
def two_nodes(monkeypatch):
    """A machine of six cores, 0 to 3 on node 0 and the others on node 1, on which nothing is measured."""
    measured = [
        messages.Measured(1000, [0.5, 0.25, 0.5], [[2e-6, 1e-6, 9e-6], [1e-3] * 3]),
        messages.Measured(2000, [0.5, 1.0, 0.25], [[9.0] * 3, [9.0] * 3]),
    ]
    monkeypatch.setattr(ranks_report, "usable_cores", lambda: [0, 1, 2, 3, 4, 5])
    monkeypatch.setattr(
        ranks_report, "cores_of_rank", lambda rank, count: [*range(6)][6 * rank // count :][: 6 // count]
    )
    monkeypatch.setattr(ranks_report, "numa_node", lambda cpu: int(cpu > 3))
    monkeypatch.setattr(ranks_report, "node_bytes", lambda node: None if node else (8 << 30, 3 << 30))
    monkeypatch.setattr(ranks_report, "huge_pages_of_shared_memory", lambda: "advise")
    monkeypatch.setattr(ranks_report, "_measure", lambda count, *_: (measured * 2)[:count])


@needs_two_cores
@pytest.mark.turn(4)
def test_report_has_cores_and_figures_of_real_ranks(little, monkeypatch):
    started, start = [], leader.start_process
    monkeypatch.setattr(ranks_report, "start_process", lambda *each: started.append(start(*each)) or started[-1])
    status, text, error = doctor("-tp", "2", "--json", "--num-threads", "2")
    assert status == 0, error
    assert len(started) == 3  # one alone, and two together
    assert all(process.poll() is not None for process in started)
    report = json.loads(text)
    assert (report["num_cores"], report["one_process_threads"]) == (len(usable_cores()), 2)
    for rank, each in enumerate(report["ranks"]):
        cores = cores_of_rank(rank, 2)
        assert (each["rank"], each["cores"], each["num_threads"]) == (rank, cores, 1)
        assert each["nodes"] == sorted({numa_node(cpu) for cpu in cores})
    assert 0 < report["read_bytes_per_s"] <= sum(each["read_bytes_per_s"] for each in report["ranks"])
    assert report["one_process_bytes_per_s"] > 0
    assert [(each["rows"], each["num_bytes"]) for each in report["exchanges"]] == [(1, 8192), (3, 3 * 8192)]
    for each in report["exchanges"]:
        assert each["seconds"] >= each["best_s"] > 0
        assert each["bytes_per_s"] == pytest.approx(each["num_bytes"] / each["seconds"])


@needs_two_cores
def test_each_rank_but_rank_0_measures_on_its_own_cores(in_threads, monkeypatch):
    seen, read = {}, measured_rank._read

    def watch(kernels, order):
        seen[order.count, order.rank] = (os.sched_getaffinity(0), kernels.num_threads, order.read_bytes)
        return read(kernels, order)

    monkeypatch.setattr(measured_rank, "_read", watch)
    status, _, error = doctor("-tp", "2", "--num-threads", "2")
    assert status == 0, error
    everywhere = os.sched_getaffinity(0)
    assert seen == {
        (1, 0): (everywhere, 2, 8 << 20),
        (2, 0): (everywhere, 1, 4 << 20),
        (2, 1): (set(cores_of_rank(1, 2)), 1, 4 << 20),
    }


def test_memory_is_written_on_each_core(monkeypatch):
    import torch

    cores, data, before, pinned = usable_cores(), torch.zeros(1000, dtype=torch.uint8), os.sched_getaffinity(0), []
    pin = os.sched_setaffinity
    monkeypatch.setattr(os, "sched_setaffinity", lambda *each: pinned.append(each[1]) or pin(*each))
    measured_rank._write(data, cores)
    assert data.min() == 1
    assert sorted(pinned) == [[core] for core in cores]
    assert os.sched_getaffinity(0) == before


@needs_two_cores
def test_ranks_exchange_rows_of_the_model(in_threads, tmp_path):
    path = write_checkpoint(tmp_path / "model", tiny_config("Qwen3ForCausalLM", hidden_size=96))
    status, text, error = doctor("-tp", "2", "--json", str(path))
    assert status == 0, error
    assert [each["num_bytes"] for each in json.loads(text)["exchanges"]] == [192, 576]


def test_model_that_ranks_cannot_divide_is_refused(two_nodes, tmp_path):
    path = write_checkpoint(tmp_path / "model", tiny_config("Qwen3ForCausalLM"))
    status, _, error = doctor("-tp", "3", str(path))
    assert (status, "3 does not suit a model with 4 query heads and 2 heads" in error) == (1, True)


def test_figures_are_of_the_round_with_the_fastest_slowest_rank(two_nodes):
    status, text, error = doctor("-tp", "2", "--json", "--isa", "portable")
    assert status == 0, error
    report = json.loads(text)
    assert report["isa"] == "portable"
    assert report["read_bytes_per_s"] == 3000 / 0.5
    assert [each["read_bytes_per_s"] for each in report["ranks"]] == [1000 / 0.5, 2000 / 0.5]
    assert report["one_process_bytes_per_s"] == 1000 / 0.25
    (small, large) = report["exchanges"]
    assert (small["rows"], small["num_bytes"], small["seconds"], small["best_s"]) == (1, 8192, 2e-6, 1e-6)
    assert (large["rows"], large["bytes_per_s"]) == (512, pytest.approx(512 * 8192 / 1e-3))


def test_report_names_nodes_and_ranks_that_span_them(two_nodes):
    status, text, error = doctor("-tp", "2", "--num-threads", "6")
    assert status == 0, error
    lines = text.splitlines()
    assert lines[4].split() == ["0", "3", "0", "0.0", "GB/s", "0-2"]
    assert lines[5].split() == ["1", "3", "0,", "1", "0.0", "GB/s", "3-5"]
    assert "node 0     8.0 GiB of memory, 3.0 GiB unused, ranks 0, 1" in lines
    assert "node 1     unknown memory, rank 1" in lines
    assert any(line.startswith("SLOW       rank 1 has cores of NUMA nodes 0 and 1") for line in lines)
    assert "exchange   1 row, 8 KiB: 2.0 us (at best 1.0), 4.10 GB/s" in lines
    assert "32 MiB of memory for exchanges, huge pages: advise" in text
    assert "one process with all cores is usually faster" not in text
    _, text, _ = doctor("-tp", "3")
    assert "SLOW" not in text


def test_ranks_of_one_node_get_a_note(two_nodes, monkeypatch):
    monkeypatch.setattr(ranks_report, "numa_node", lambda _cpu: 0)
    _, text, _ = doctor("-tp", "2")
    assert "one process with all cores is usually faster" in text
    assert "SLOW" not in text


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["-tp", "0"], 1, "tensor_parallel_size must be an integer from 1 to 64, got 0"),
        (["-tp", "65"], 1, "tensor_parallel_size must be an integer from 1 to 64, got 65"),
        (["-tp", "7"], 1, "tensor_parallel_size 7 is more than the 6 usable cores"),
        (["-tp", "2", "--isa", "avx9"], 1, "isa must be one of auto, amx"),
        (["-tp", "2", "--precision", "int8"], 2, "ranks are measured without weights"),
        (["-tp", "2", "/nowhere"], 1, "/nowhere does not exist"),
    ],
)
def test_invalid_arguments_are_refused_before_a_process_starts(two_nodes, monkeypatch, arguments, status, message):
    monkeypatch.setattr(ranks_report, "_measure", lambda *_: pytest.fail("a process was started"))
    found, _, error = doctor(*arguments)
    assert (found, message in error) == (status, True), error


@needs_two_cores
def test_rank_that_ends_while_it_measures_is_named_and_all_processes_end(little, monkeypatch):
    started, start = [], leader.start_process

    def start_and_kill(end, memory):
        started.append(start(end, memory))
        if len(started) == 3:
            started[-1].kill()
        return started[-1]

    monkeypatch.setattr(ranks_report, "start_process", start_and_kill)
    status, _, error = doctor("-tp", "2")
    assert (status, "the process of rank 1 ended while it measured" in error) == (1, True), error
    assert all(process.poll() is not None for process in started)


@needs_two_cores
def test_failed_measurement_of_a_rank_is_reported(in_threads, monkeypatch):
    exchange = measured_rank._exchange

    def fail(kernels, *arguments):
        if kernels.group.rank == 1:
            raise RuntimeError("no exchange")
        return exchange(kernels, *arguments)

    monkeypatch.setattr(measured_rank, "_TIMEOUT_S", 0.2)
    monkeypatch.setattr(measured_rank, "_exchange", fail)
    status, _, error = doctor("-tp", "2")
    assert (status, "rank 1 cannot measure: no exchange" in error) == (1, True), error
