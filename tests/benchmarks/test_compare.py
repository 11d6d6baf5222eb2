"""The comparison with other engines: its protocol on a real model, its limits, its tables, and that it goes on."""

import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from octavo.models.random_weights import tiny_config, write_checkpoint
from octavo.models.registry import read_architecture

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from compare import Results, contests, jobs, main, measure_round, measure_turns  # noqa: E402
from comparison.engines import ENGINES, LlamaCpp, Octavo, Transformers, read_llama_bench  # noqa: E402
from comparison.limits import Work, best_possible  # noqa: E402
from comparison.measuring import RunError, Seat, Setting, measure  # noqa: E402
from comparison.report import (  # noqa: E402
    WORKLOADS,
    best_peers,
    draw,
    figure,
    ratios,
    save_picture,
    table,
    turns_table,
)
from comparison.turns import Contest, take_turns  # noqa: E402

LIMITS = {"flops": 5e11, "byte_ops": 4e12, "bfloat16_flops": 1e12, "bytes_read": 1e11}


def workloads():
    def requests(count, length, out, prefix=()):
        return [{"prompt": [*prefix, *range(9 + i, 9 + i + length)], "out": out} for i in range(count)]

    return {
        "A": requests(2, 8, 64),  # so many that a disturbance does not outweigh them: the rate is of a difference
        "B": requests(4, 12, 5),
        "C": requests(2, 64, 1),
        "D": [requests(3, 4, 3, prefix=range(32))],
    }


def setting(path, *, threads=1, timeout_s=120):
    return Setting(workloads=path, threads=threads, kv_bytes=1 << 24, timeout_s=timeout_s)


@pytest.fixture
def files(tmp_path):
    checkpoint = write_checkpoint(
        tmp_path / "model", tiny_config("Qwen2ForCausalLM", vocab_size=4096, max_position_embeddings=2048)
    )
    path = tmp_path / "workloads.json"
    path.write_text(json.dumps(workloads()))
    return checkpoint, path


class HereTransformers(Transformers):
    """transformers, which is installed for the tests anyway."""

    python = sys.executable


@pytest.mark.parametrize(("engine", "caching"), [(Octavo, False), (Octavo, True), (HereTransformers, False)])
def test_a_runner_runs_what_it_is_asked_for(engine, caching, files, tmp_path):
    checkpoint, path = files
    only = "D" if caching else engine.workloads
    started = time.monotonic()
    result = measure(engine(tmp_path), checkpoint, "bf16", only, caching=caching, setting=setting(path, threads=2))
    assert set(result) == {"start_s", "peak_bytes", *only}
    assert all(value > 0 for key in only for value in result[key])
    assert 0 < result["start_s"] < time.monotonic() - started
    assert 100e6 < result["peak_bytes"] < 4e9


def test_a_runner_that_fails_says_why(files, tmp_path):
    checkpoint, path = files
    (checkpoint / "config.json").write_text("{}")
    with pytest.raises(RunError, match="architectures"):
        measure(Octavo(tmp_path), checkpoint, "bf16", "A", caching=False, setting=setting(path))


def test_a_runner_that_takes_too_long_keeps_what_it_got_through(files, tmp_path):
    runner = tmp_path / "runner.py"
    runner.write_text(f"""
import sys, time; sys.path.insert(0, {str(BENCHMARKS / "runners")!r})
from protocol import run
class Slow:
    def __init__(self, job): pass
    def generate(self, requests):
        time.sleep(60 * (len(requests) == 4))
        return [request.out for request in requests]
run(Slow)
""")
    settings = {"caching": False, "setting": setting(files[1], timeout_s=3)}
    engine = type("Slow", (HereTransformers,), {"runner": str(runner)})(tmp_path)
    assert set(measure(engine, files[0], "bf16", "ABC", **settings)) == {"start_s", "A", "peak_bytes"}
    with pytest.raises(RunError, match="did not end within 3 s"):
        measure(engine, files[0], "bf16", "B", **settings)


def runner(tmp_path, body):
    """An engine whose `generate` is this."""
    path = tmp_path / "runner.py"
    path.write_text(f"""
import json, os, sys, time; sys.path.insert(0, {str(BENCHMARKS / "runners")!r})
from protocol import run
class Engine:
    def __init__(self, job): pass
    def generate(self, requests):
        time.sleep(requests[0].out / 1000)
        {body}
        return [request.out for request in requests]
run(Engine)
""")
    return type("Runner", (HereTransformers,), {"name": "runner", "runner": str(path)})(tmp_path)


@pytest.mark.parametrize("caching", [False, True])
def test_an_engine_in_its_seat_measures_what_it_is_told(caching, files, tmp_path):
    checkpoint, path = files
    with Seat(Octavo(tmp_path), checkpoint, "bf16", "AD", caching=caching, setting=setting(path)) as seat:
        assert seat.figure("A", 0) > 0
        assert seat.figure("D", 1) > 0
        before = seat.cpu_seconds()
        assert before > 0.5  # it imported torch
        time.sleep(0.5)
        assert seat.cpu_seconds() - before < 0.25  # and waits without work


def test_the_turns_of_all_engines_are_of_the_same_requests_and_no_two_of_the_same_tokens(files, tmp_path):
    seen = tmp_path / "seen"
    keep = f"open({str(seen)!r}, 'a').write(json.dumps([request.prompt for request in requests]) + chr(10))"
    asked = []
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        seen.write_text("")
        with Seat(runner(tmp_path / folder, keep), files[0], "bf16", "D", caching=True, setting=setting(files[1])) as s:
            seen.write_text("")
            for number in range(3):
                s.figure("D", number)
        asked.append(seen.read_text())
    assert asked[0] == asked[1]
    turns = [json.loads(line) for line in asked[0].splitlines()]
    assert [len(turn) for turn in turns] == [3, 3, 3]
    assert len({tuple(turn[0][:32]) for turn in turns}) == 3  # other prefixes in each turn
    assert all(prompt[:32] == turn[0][:32] for turn in turns for prompt in turn)  # shared within one


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("if len(requests) == 4: raise ValueError('no four')", "ValueError: no four"),
        ("if len(requests) == 4: print('bye', flush=True); os._exit(3)", "bye"),
        ("if len(requests) == 4: time.sleep(60)", "it took longer than 3 s"),
    ],
)
def test_an_engine_that_fails_in_its_seat_says_why_and_ends(body, said, files, tmp_path):
    seat = Seat(runner(tmp_path, body), files[0], "bf16", "AB", caching=False, setting=setting(files[1], timeout_s=3))
    with seat:
        assert seat.figure("A", 0) > 0
        with pytest.raises(RunError, match=said):
            seat.figure("B", 0)
    assert seat.cpu_seconds() == 0  # no process is left


def test_an_engine_that_does_not_start_has_no_seat(files, tmp_path):
    (files[0] / "config.json").write_text("{}")
    with pytest.raises(RunError, match="architectures"):
        Seat(Octavo(tmp_path), files[0], "bf16", "A", caching=False, setting=setting(files[1]))


class FakeSeat:
    def __init__(self, value, log, name, fails_at=None):
        self.value, self.log, self.name, self.fails_at, self.is_open = value, log, name, fails_at, True

    def figure(self, letter, number):
        self.log.append((self.name, letter, number))
        if number == self.fails_at:
            raise RunError("enough")
        return self.value + number

    def cpu_seconds(self):
        return 0.0

    def close(self):
        self.is_open = False


def test_who_begins_a_turn_changes_and_who_fails_is_out(capsys):
    log = []
    seats = {"octavo": FakeSeat(10.0, log, "octavo"), "vllm": FakeSeat(20.0, log, "vllm", fails_at=2)}
    failing = seats["vllm"]
    turns = list(take_turns(Contest(precision="int8", letter="B"), seats, range(4), lambda: LIMITS))
    assert [(name, number) for name, _, number in log] == [
        ("octavo", 0), ("vllm", 0), ("vllm", 1), ("octavo", 1), ("octavo", 2), ("vllm", 2), ("octavo", 3),
    ]  # fmt: skip
    assert [turn.figures for turn in turns] == [
        {"octavo": 10.0, "vllm": 20.0},
        {"octavo": 11.0, "vllm": 21.0},
        {"octavo": 12.0},
        {"octavo": 13.0},
    ]
    assert not failing.is_open
    assert "turn 2 vllm int8: enough" in capsys.readouterr().err
    assert list(take_turns(Contest(precision="int8", letter="B"), {}, range(4), lambda: LIMITS)) == []


def test_a_turn_begins_when_those_before_have_spun_out(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("comparison.turns.time.monotonic", lambda: now[0])
    monkeypatch.setattr("comparison.turns.time.sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))

    class Spinning:
        """Computes for a second, returns when it began, and spins for two more."""

        began = spins_until = 0.0

        def figure(self, *_):
            self.began, now[0] = now[0], now[0] + 1.0
            self.spins_until = now[0] + 2.0
            return self.began

        def cpu_seconds(self):
            return min(now[0], self.spins_until)

    seats = {"octavo": Spinning(), "vllm": Spinning()}
    contest = Contest(precision="int8", letter="B")
    (turn,) = take_turns(contest, seats, range(1), lambda: LIMITS)
    assert turn.figures["vllm"] > turn.figures["octavo"] + 3.0
    assert turn.waiting < 0.01
    seats["vllm"].cpu_seconds = lambda: now[0]  # one that never rests stops nobody
    assert len(list(take_turns(contest, seats, range(1), lambda: LIMITS))) == 1


def test_contests_are_of_those_who_can(tmp_path):
    found = list(contests([engine(tmp_path) for engine in ENGINES], ["bf16", "int4"], "AD"))
    assert [(contest.precision, contest.workload) for contest, _ in found] == [
        ("bf16", "A"), ("bf16", "D off"), ("bf16", "D on"), ("int4", "A"), ("int4", "D off"), ("int4", "D on"),
    ]  # fmt: skip
    assert [len(able) for _, able in found] == [5, 4, 4, 4, 4, 4]


def turn(number, read=1e11, versions="1", **figures):
    return {
        "kind": "turn", "precision": "bf16", "workload": "A", "setting": {"versions": versions}, "number": number,
        "figures": figures, "limits": LIMITS | {"bytes_read": read}, "waiting": 0.0,
    }  # fmt: skip


def test_turns_are_compared_one_by_one():
    turns = [turn(0, octavo=40.0, vllm=20.0), turn(1, read=5e10, octavo=22.0, vllm=20.0), turn(2, octavo=30.0)]
    lines = turns_table(turns, lambda _, limits: {"A": limits["bytes_read"] / 2e9}).splitlines()
    assert lines[2:] == [
        "| bf16 | A, tok/s | octavo (bf16) | 30.0 (22.0 to 40.0) | 80% (60% to 88%) |  |  |",
        "| bf16 | A, tok/s | vllm (bf16) | 20.0 (20.0 to 20.0) | 60% (40% to 80%) | 1.55 (1.10 to 2.00) | 2 of 2 |",
    ]
    walls = [turn(0, octavo=4.0, vllm=3.0) | {"workload": "B"}]
    assert turns_table(walls, lambda *_: {"B": 2.0}).splitlines()[2:] == [
        "| bf16 | B, s | octavo (bf16) | 4.0 | 50% |  |  |",
        "| bf16 | B, s | vllm (bf16) | 3.0 | 67% | 0.75 | 0 of 1 |",
    ]


def test_turns_go_on_where_they_were_unless_a_version_changed(files, tmp_path, monkeypatch, capsys):
    checkpoint, path = files
    monkeypatch.setattr("compare.measure_limits", lambda _: LIMITS)
    engine = runner(tmp_path, "pass")
    engine.name = "octavo"
    versions = iter("112223")
    monkeypatch.setattr(type(engine), "version", lambda _: next(versions))
    arguments = {"only": "A", "precision": ["bf16"], "threads": 1, "kv_gib": 1, "timeout": 60.0}
    monkeypatch.setattr(engine, "checkpoint", lambda source, _: source)
    results = Results(tmp_path / "results.jsonl")

    def numbers(turns, *, again=False):
        measure_turns(results, SimpleNamespace(turns=turns, again=again, **arguments), [engine], checkpoint, path)
        return [record["number"] for record in results.turns()]

    assert numbers(1) == [0]
    assert numbers(3) == [0, 1, 2]
    assert len(results.records) == 3  # the first one was not measured again
    assert numbers(2) == [0, 1]  # another version
    assert numbers(2) == [0, 1]  # all are there
    assert numbers(2, again=True) == [0, 1]
    assert numbers(1) == [0]
    assert Results(tmp_path / "results.jsonl").turns() == results.turns()
    assert "turn 1 bf16 A: {'octavo': " in capsys.readouterr().err


def test_turns_are_not_kept_beside_those_of_another_machine(files, tmp_path):
    results = Results(tmp_path / "results.jsonl")
    results.add(turn(0, octavo=40.0) | {"machine": "another"})
    with pytest.raises(SystemExit, match="figures of another machine"):
        measure_turns(results, SimpleNamespace(), [], *files)


def test_a_report_of_turns_alone(files, tmp_path, monkeypatch, capsys):
    results = Results(tmp_path / "tiny.jsonl")
    results.add(turn(0, octavo=40.0, vllm=20.0))
    monkeypatch.setattr("compare.prepare", lambda _: files)
    monkeypatch.setattr(sys, "argv", ["compare.py", "--report", "--shape", "tiny", "--home", str(tmp_path)])
    main()
    printed = capsys.readouterr().out
    assert printed.startswith("In turns, 100.0 to 100.0 GB/s read; engines that waited used at most 0.0% of a core.")
    assert "| 2.00 | 1 of 1 |" in printed


def test_an_engine_that_gives_other_lengths_is_not_believed(tmp_path):
    program = f"""
import sys; sys.path.insert(0, {str(BENCHMARKS / "runners")!r})
from protocol import run
class Lazy:
    def __init__(self, job): pass
    def generate(self, requests): return [min(request.out, 3) for request in requests]
run(Lazy)
"""
    path = tmp_path / "workloads.json"
    path.write_text(json.dumps(workloads()))
    job = {
        "checkpoint": "", "quantization": None, "workloads": str(path), "only": "A", "prefix_caching": False,
        "threads": 1, "kv_bytes": 1, "max_model_len": 64, "started_at": 0.0, "result": str(tmp_path / "result"),
    }  # fmt: skip
    result = subprocess.run(
        [sys.executable, "-c", program, json.dumps(job)], capture_output=True, text=True, check=False
    )
    assert "gave [3] tokens where [64] were asked" in result.stderr
    assert not (tmp_path / "result").exists()


def test_limits_of_arithmetic(files):
    work = Work.of(read_architecture(files[0]))
    # q, k, v, o: 64 x (64 + 2 x 32 + 64); gate, up, down: 3 x 64 x 160; two layers
    # k and v: two layers, 2 heads of 16, 2 bytes each
    assert work == Work(2 * (64 * 192 + 3 * 64 * 160), 64 * 128 + 3 * 64 * 160, 4096 * 64, 2 * 2 * 2 * 16 * 2)
    endless = LIMITS | {"bytes_read": 1e30}
    best = best_possible(work, workloads(), "bf16", endless)
    assert best["B"] == pytest.approx(2 * (work.layers * 4 * 16 - work.last * (4 * 16 - 20) + work.lm_head * 20) / 1e12)
    assert best["C"] == pytest.approx(64 / (2 * (work.layers * 64 - work.last * 63 + work.lm_head) / 1e12))
    assert best["D off"] == pytest.approx(
        2 * (work.layers * 3 * 38 - work.last * (3 * 38 - 9) + work.lm_head * 9) / 1e12
    )
    tokens = 3 * 38 - 2 * 32
    on = work.layers * tokens - work.last * (tokens - 9) + work.lm_head * 9
    assert best["D on"] == pytest.approx(2 * on / 1e12)
    assert best_possible(work, workloads(), "int8", endless)["B"] == pytest.approx(best["B"] / 4)


def test_limits_of_reading(files):
    work = Work.of(read_architecture(files[0]))
    weights, kv = 2 * (work.layers + work.lm_head), work.kv_bytes
    best = best_possible(work, workloads(), "bf16", LIMITS | {"bfloat16_flops": 1e30})
    # steps read all weights, as many steps as the longest output has tokens, and all but a request's first its KV
    assert best["A"] == pytest.approx(63 / ((63 * weights + sum(range(9, 72)) * kv) / 1e11))
    assert best["B"] == pytest.approx((5 * weights + 4 * (13 + 14 + 15 + 16) * kv) / 1e11)
    assert best["C"] == pytest.approx(64 / (weights / 1e11))
    assert best["D off"] == pytest.approx((3 * weights + 3 * (37 + 38) * kv) / 1e11)
    assert best["D on"] == pytest.approx((3 * weights + (3 * (5 + 6) + 2 * 32) * kv) / 1e11)
    int4 = best_possible(work, workloads(), "int4", LIMITS | {"byte_ops": 1e30})
    assert int4["C"] == pytest.approx(64 / ((work.layers * 4.5 / 8 + work.lm_head) / 1e11))


def test_the_limit_is_that_of_the_longer_of_the_two(files):
    work = Work.of(read_architecture(files[0]))
    for letter in ("A", "B", "C", "D off", "D on"):
        arithmetic = best_possible(work, workloads(), "bf16", LIMITS | {"bytes_read": 1e30})[letter]
        reading = best_possible(work, workloads(), "bf16", LIMITS | {"bfloat16_flops": 1e30})[letter]
        slower = min if letter in "AC" else max
        assert best_possible(work, workloads(), "bf16", LIMITS)[letter] == slower(arithmetic, reading)


def record(engine, number, caching=False, run="monday", **result):
    job = {"engine": engine, "precision": "int8", "caching": caching, "round": number, "workloads": "".join(result)}
    return job | {"version": "1", "run": run, "result": result | {"start_s": 2.0, "peak_bytes": 1e9}}


RECORDS = [
    record("octavo", 0, A=[10.0, 20.0, 30.0], B=[4.0], D=[9.0]),
    record("octavo", 1, A=[22.0, 24.0, 26.0], B=[5.0], D=[8.0]),
    record("octavo", 2, A=[1.0, 21.0, 99.0], B=[6.0], D=[7.0]),
    record("octavo", 0, caching=True, D=[2.0]),
    record("vllm", 0, A=[7.0], B=[10.0], D=[4.0]),
]


def test_figures_are_medians_of_rounds():
    found = figure(RECORDS, "octavo", "int8", "A")
    assert (found.median, found.low, found.high, found.runs) == (21.0, 20.0, 24.0, 3)
    assert figure(RECORDS, "octavo", "int8", "D off").median == 8.0
    assert figure(RECORDS, "octavo", "int8", "D on").median == 2.0
    assert figure(RECORDS, "vllm", "int8", "D on") is None
    assert figure(RECORDS, "octavo", "bf16", "A") is None


def test_tables():
    best = {"A": 42.0, "B": 2.5, "C": 1000.0, "D off": 4.0, "D on": 1.0}
    lines = table(RECORDS, "int8", best).splitlines()
    assert lines[2] == (
        "| octavo (W8A8) | 21.0 (20.0 to 24.0), 50% | 5.0 (4.0 to 6.0), 50% | - | 8.0 (7.0 to 9.0), 50% | 2.0, 50% "
        "| 1.00 GB | 2.0 s |"
    )
    assert lines[-1].startswith("| limit | 42.0 | 2.5 | 1000 | 4.0 | 1.0")
    assert ratios(RECORDS).splitlines()[2:] == ["| int8 | vllm | 2.86 | 2.50 | - | 0.44 | - |"]  # of the round of both


def test_what_an_engine_says_of_itself_stands_below_it():
    own = [{"of": "vllm", "precision": "int8", "round": n, "result": {"A": [20.0 + n, 22.0 + n]}} for n in range(2)]
    best = {"A": 42.0, "B": 2.5, "C": 1000.0, "D off": 4.0, "D on": 1.0}
    lines = table(RECORDS, "int8", best, own).splitlines()
    assert lines[4] == "| vllm, its own benchmark | 21.5 (21.0 to 22.0), 51% | - | - | - | - |  |  |"
    printed = json.dumps(
        [{"n_prompt": 1024, "n_gen": 0, "samples_ts": [5.0, 6.0]}, {"n_prompt": 0, "n_gen": 64, "samples_ts": [3.0]}]
    )
    assert read_llama_bench(printed) == {"C": [5.0, 6.0], "A": [3.0]}


def test_engines_are_compared_within_a_run():
    beside = [record(engine, n, B=[wall]) for n in range(3) for engine, wall in (("octavo", 4.0), ("vllm", 6.0 + n))]
    assert ratios(beside).splitlines()[2] == "| int8 | vllm | - | 1.75 (1.50 to 2.00) | - | - | - |"
    later = [r | {"run": "tuesday"} if (r["engine"], r["round"]) == ("octavo", 2) else r for r in beside]
    assert "| 1.62 (1.50 to 1.75) less 1 mixed |" in ratios(later)
    never = [r | {"run": r["engine"]} for r in beside]
    assert "| mixed: 1.75 (1.50 to 2.00) |" in ratios(never)


@pytest.mark.parametrize(("wall", "cell"), [(4.3, "tie, 1.07"), (3.7, "tie, 0.93"), (4.5, "1.12"), (3.6, "0.90")])
def test_less_than_a_tenth_is_a_tie(wall, cell):
    assert f"| {cell} |" in ratios([record("octavo", 0, B=[4.0]), record("vllm", 0, B=[wall])])


def test_octavo_beside_the_best_of_each_round():
    walls = {"octavo": (4.0, 4.0), "vllm": (6.0, 9.0), "openvino": (8.0, 7.0)}
    found = [record(engine, n, B=[wall]) for engine, both in walls.items() for n, wall in enumerate(both)]
    assert "| 1.62 (1.50 to 1.75) (vllm, openvino) |" in best_peers(found)
    lacking = [each for each in found if (each["engine"], each["round"]) != ("openvino", 0)]
    assert "| 1.75 (openvino) |" in best_peers(lacking)  # the other round lacks the best
    faster = [*found, record("llama.cpp", 0, run="tuesday", B=[1.0])]  # of another run: it counts where no other does
    assert best_peers(faster) == best_peers(found)
    assert "| mixed: 0.25 (llama.cpp) |" in best_peers([found[0], faster[-1]])


RESULTS = sorted((BENCHMARKS / "results").rglob("*.jsonl"))
IN_TURNS = [path for path in RESULTS if path.parent.name.endswith("-turns")]


@pytest.mark.parametrize("path", IN_TURNS, ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_results_in_turns_are_read(path):
    turns = Results(path).turns()
    rows = turns_table(turns, lambda *_: dict.fromkeys(WORKLOADS, 1.0))
    for precision in {turn["precision"] for turn in turns}:
        assert f"octavo ({ENGINES[0].precisions[precision]}) |" in rows


@pytest.mark.parametrize(
    "path", [path for path in RESULTS if path not in IN_TURNS], ids=lambda p: f"{p.parent.name}-{p.stem}"
)
def test_results_of_before_runs_were_named_are_read(path):
    results = Results(path)
    assert {r["engine"] for r in results.jobs()} > {"octavo"}
    assert results.limits().keys() == LIMITS.keys()
    assert len(ratios(results.jobs()).splitlines()) > 2
    for precision in {r["precision"] for r in results.jobs()}:
        rows = table(results.jobs(), precision, dict.fromkeys(WORKLOADS, 1.0))
        assert f"| octavo ({ENGINES[0].precisions[precision]}) |" in rows


def test_a_job_measured_again_before_runs_were_named_is_of_another_run(tmp_path):
    results = Results(tmp_path / "results.jsonl")
    for engine, wall in (("octavo", 4.0), ("vllm", 6.0), ("octavo", 3.0)):
        old = record(engine, 0, B=[wall])
        del old["run"]
        assert "mixed" not in (ratios(results.jobs()) if results.records else "")
        results.add(old)
    assert "| mixed: 2.00 |" in ratios(results.jobs())


@pytest.mark.parametrize(("only", "slots"), [("AC", "1"), ("C", "1"), ("BD", "32"), ("D", "32")])
def test_llama_cpp_has_one_slot_for_one_stream(only, slots, tmp_path):
    server = tmp_path / "llama-server"
    server.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/arguments\nexit 1\n')
    server.chmod(0o755)
    path = tmp_path / "workloads.json"
    path.write_text(json.dumps(workloads()))
    engine = type("Fake", (LlamaCpp,), {"python": sys.executable, "binary": str(server)})(tmp_path)
    with pytest.raises(RunError, match="llama-server ended with 1"):
        measure(engine, tmp_path / "model", "int8", only, caching=False, setting=setting(path, threads=2))
    words = (tmp_path / "arguments").read_text().split()
    assert words[words.index("-np") + 1] == slots
    assert "--no-kv-unified" in words


def test_a_round_is_of_one_run_and_measured_again_when_asked(tmp_path, monkeypatch):
    measured = []

    def fake_measure(engine, *_, **settings):
        measured.append((engine.name, settings["caching"]))
        return {"B": [4.0], "start_s": 1.0, "peak_bytes": 1}

    monkeypatch.setattr("compare.measure", fake_measure)
    monkeypatch.setattr("compare.measure_limits", lambda _: LIMITS)
    clock = iter(range(100))
    monkeypatch.setattr("compare.time.gmtime", lambda: time.struct_time((2026, 1, 1, 0, next(clock), 0, 0, 1, 0)))
    engines = [
        type("Peer", (HereTransformers,), {"name": name, "workloads": "B", "version": lambda _: "1"})(tmp_path)
        for name in ("octavo", "vllm")
    ]
    for engine in engines:
        monkeypatch.setattr(engine, "checkpoint", lambda source, _: source)
    arguments = {"only": "B", "precision": ["bf16"], "rounds": 1, "threads": 2, "kv_gib": 1, "timeout": 9.0}
    results = Results(tmp_path / "results.jsonl")
    for again, count in ((False, 2), (False, 2), (True, 4)):
        measure_round(0, results, SimpleNamespace(again=again, **arguments), engines, tmp_path, tmp_path)
        assert len(measured) == count
    first, second = results.records[:3], results.records[3:]
    assert [len({record["run"] for record in each}) for each in (first, second)] == [1, 1]
    assert first[0]["run"] != second[0]["run"]
    assert first[0]["run"].startswith("2026-01-01T00:00:00Z, ")
    assert results.jobs() == second[1:]
    assert "| tie, 1.00 |" in ratios(results.jobs())


def test_a_picture_keeps_the_dot_of_its_name(tmp_path):
    pytest.importorskip("matplotlib")
    best = {"int8": {"A": 42.0, "B": 2.5, "C": 1000.0, "D off": 4.0, "D on": 1.0}}
    draw(RECORDS, best, tmp_path / "compare-qwen2-0.5b")
    assert {path.name for path in tmp_path.iterdir()} == {"compare-qwen2-0.5b.png", "compare-qwen2-0.5b.svg"}


def test_pictures_that_cannot_be_drawn_are_refused_before_anything_is_measured(monkeypatch, capsys):
    monkeypatch.setattr("comparison.report.find_spec", {}.get)
    monkeypatch.setattr(sys, "argv", ["compare.py", "--pictures", "folder"])
    with pytest.raises(SystemExit):
        main()
    assert "--pictures: plots need matplotlib" in capsys.readouterr().err


def test_pictures_are_written_beside_their_target(tmp_path):
    written = []
    grid = SimpleNamespace(savefig=lambda path, **_: written.append(path))
    save_picture(grid, tmp_path / "qwen2-0.5b")
    assert written == [tmp_path / "qwen2-0.5b.png", tmp_path / "qwen2-0.5b.svg"]


def test_what_was_measured_is_kept(tmp_path):
    path = tmp_path / "results.jsonl"
    results = Results(path)
    results.add({"round": 0, "kind": "limits", "limits": {"flops": 3.0}})
    results.add({"round": 1, "kind": "limits", "limits": {"flops": 1.0}})
    results.add(RECORDS[0])
    again = Results(path)
    assert again.records == results.records
    assert again.jobs() == [RECORDS[0]]
    assert again.limits() == {"flops": 2.0}
    again.add({"round": 1, "kind": "limits", "run": "tuesday", "limits": {"flops": 2.0}})
    assert again.limits() == {"flops": 2.5}
    assert again.has(engine="octavo", precision="int8", round=0)
    assert not again.has(engine="octavo", precision="int8", round=1)
    assert again.letters(engine="octavo", round=0, version="1") == "ABD"
    assert not again.letters(engine="octavo", round=0, version="2")
    newer = RECORDS[0] | {"version": "2"}
    again.add(newer)
    assert Results(path).jobs() == [newer]
    again.add(record("octavo", 0, B=[3.0]) | {"version": "3"})
    first, second = Results(path).jobs()
    assert set(first["result"]) == {"A", "D", "start_s", "peak_bytes"}
    assert second["result"]["B"] == [3.0]


def test_a_round_runs_each_engine_with_and_without_cache(tmp_path):
    engines = [engine(tmp_path) for engine in ENGINES]
    planned = [(e.name, p, letters, caching) for e, p, letters, caching in jobs(engines, ["bf16", "int4"], "ACD")]
    assert planned[:2] == [("octavo", "bf16", "ACD", False), ("octavo", "bf16", "D", True)]
    assert ("transformers", "bf16", "AC", False) in planned
    assert not any(name == "transformers" and (p == "int4" or caching) for name, p, _, caching in planned)
    # llama.cpp runs A and C in a process, D in another
    assert [job[2:] for job in planned if job[:2] == ("llama.cpp", "int4")] == [
        ("AC", False),
        ("D", False),
        ("D", True),
    ]
    assert len(planned) == len(set(planned)) == 2 * (3 * 2 + 3) + 1
