"""Predicted times of kernels follow from bytes, instructions and resident programs, in cases computed by hand."""

import sys
from dataclasses import replace
from math import inf
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("triton")

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import gpu_speed
import kernel_times
from compile_kernels import BOUNDS, Taken
from gpu_device import ON_GPU
from kernel_times import DEVICES, bounds_of, measured, predict, predictions, programs_per_processor, seconds
from kernel_work import MODELS, Launch, Operation, attention, linear

H100 = DEVICES["H100"]
VERSIONS = sorted(path.stem.removeprefix("triton-") for path in BOUNDS.glob("*.csv"))
TAKEN = Taken("case", "kernel", "sm_90", 128, 0, 73728, 4, 0, "wgmma m64n128k16")
LAUNCH = Launch("case", "kernel", programs=132, steps=16, memory_bytes=0.0, instructions=0.0, pipeline=8, depth=2)


def largest(times):
    return max(times, key=times.get)


def product_times(rows, width, columns):
    """Return the times of the first launch of a product in bfloat16 on an H100."""
    launch = linear("bfloat16", rows, width, columns, H100).launches[0]
    return seconds(launch, bounds_of()[launch.case, launch.kernel, "sm_90"], H100)


def test_product_of_one_row_takes_the_time_of_its_bytes():
    times = product_times(1, 12288, 4096)
    assert largest(times) == "memory"
    assert times["memory"] == pytest.approx(2 * (12288 * 4096 + 12288 + 4096) / (0.9 * 3.35e12))


def test_product_of_prompt_takes_the_time_of_its_reads_from_l2():
    times = product_times(4096, 4096, 6144)
    assert largest(times) == "L2"
    tiles, steps, bytes_of_step = (4096 // 128) * (6144 // 128), 4096 // 64, (128 + 128) * 64 * 2
    assert times["L2"] == pytest.approx(tiles * steps * bytes_of_step / 7.0e12)


def test_compute_bound_launch_takes_the_time_of_its_multiplications():
    launch = replace(LAUNCH, macs=64 * 128 * 64, programs=10 * 132, steps=8)
    assert seconds(launch, TAKEN, H100)["tensor cores"] == pytest.approx(10 * 8 * (524288 / 2048) / 1.75e9 / 0.8)
    assert seconds(launch, replace(TAKEN, products="mma m16n8k16"), H100)["tensor cores"] == pytest.approx(
        10 * 8 * (524288 / 1024) / 1.75e9 / 0.8
    )


def test_copies_in_flight_limit_the_rate_of_loads():
    """16 steps of 0.6 us arrive two per latency, after the latency of the start."""
    assert seconds(LAUNCH, TAKEN, H100)["latency"] == pytest.approx(0.6e-6 * (1 + 16 / 2))
    assert seconds(replace(LAUNCH, depth=4), TAKEN, H100)["latency"] == pytest.approx(0.6e-6 * (1 + 16 / 4))


def test_loads_without_copies_add_to_instructions():
    launch = replace(LAUNCH, depth=0, instructions=875.0)  # 1 us alone: two cycles each at 1.75 GHz
    assert seconds(launch, TAKEN, H100)["few warps"] == pytest.approx(0.6e-6 + 16 * 1.6e-6)
    assert seconds(replace(launch, depth=2), TAKEN, H100)["few warps"] == pytest.approx(0.6e-6 + 2 * (0.6e-6 + 8e-6))


@pytest.mark.parametrize(
    ("registers", "shared_bytes", "num_warps", "fits"),
    [(255, 0, 4, 2), (255, 0, 8, 1), (73, 0, 4, 6), (32, 73728, 4, 3), (32, 77312, 4, 2), (24, 0, 8, 8),
     (16, 0, 1, 32)],
)  # fmt: skip
def test_resident_programs_are_limited_by_registers_memory_and_warps(registers, shared_bytes, num_warps, fits):
    taken = replace(TAKEN, registers=registers, shared_bytes=shared_bytes, num_warps=num_warps)
    assert programs_per_processor(taken, H100) == fits


def test_program_that_fits_on_no_processor_is_an_error():
    with pytest.raises(ValueError, match="does not fit on a processor of sm_80"):
        programs_per_processor(replace(TAKEN, shared_bytes=200_000), DEVICES["A100"])


def test_one_program_more_than_fit_takes_another_round():
    taken = replace(TAKEN, registers=255)  # two programs per processor
    times = [seconds(replace(LAUNCH, programs=count), taken, H100)["latency"] for count in (1, 264, 265)]
    assert times == pytest.approx([times[0], times[0], 2 * times[0]])


def test_split_decode_has_two_programs_per_processor():
    """33 programs for each of 8 KV heads share 32 sequences of 160 partitions."""
    work, merged = attention(MODELS["Qwen3-0.6B"], 32, 1, 40960, H100).launches
    assert (work.programs, work.steps) == (33 * 8, 32 * 640 / 33)
    assert (merged.programs, merged.steps) == (32 * 16, 160 / 4)


def test_prompt_reads_keys_up_to_the_last_row_of_each_tile():
    """Two query heads per KV head: a tile has 32 tokens."""
    (work,) = attention(MODELS["Qwen3-0.6B"], 1, 256, 256, H100).launches
    assert (work.programs, work.steps, work.longest) == (8 * 8, (1 + 1 + 2 + 2 + 3 + 3 + 4 + 4) / 8, 4)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", DEVICES)
def test_every_measured_operation_is_predicted_within_the_limit(name, version):
    device, bounds = DEVICES[name], bounds_of(version)
    found = {entry: predict(operation, device, bounds) for entry, operation in measured(ON_GPU, device)}
    assert {entry: each for entry, each in found.items() if not (0 < each.share <= 1 and 0 < each.us < inf)} == {}


@pytest.mark.parametrize("name", DEVICES)
def test_more_spills_never_make_a_kernel_faster(name):
    device, bounds = DEVICES[name], bounds_of()
    worse = {key: replace(taken, spilled_bytes=taken.spilled_bytes + 4096) for key, taken in bounds.items()}
    times = [
        (predict(each, device, bounds).us, predict(each, device, worse).us) for _, each in measured(ON_GPU, device)
    ]
    assert all(before <= after for before, after in times)
    assert any(before < after for before, after in times)


def test_launches_bound_an_operation_that_computes_little():
    tiny = replace(LAUNCH, steps=0.0)
    found = predict(Operation((tiny, tiny), num_bytes=3.015e6), H100, {TAKEN.key: TAKEN})
    assert (found.bound, found.us) == ("launch", pytest.approx(2 * (1.5 + 0.6)))
    assert found.share == pytest.approx(1.0 / found.us)


def test_kernel_without_row_in_the_table_is_an_error():
    bounds = {key: taken for key, taken in bounds_of().items() if key[0] != "linear bfloat16 1 row"}
    with pytest.raises(LookupError, match="no row for _multiply_partition of 'linear bfloat16 1 row' on sm_90"):
        predict(linear("bfloat16", 1, 1024, 1024, H100), H100, bounds)


def test_newest_table_is_the_default(tmp_path, monkeypatch):
    header, row = (BOUNDS / "triton-3.9.csv").read_text().splitlines()[:2]
    for version in ("3.9", "3.10"):
        (tmp_path / f"triton-{version}.csv").write_text(f"{header}\n{row.replace('add ', version + ' ')}\n")
    monkeypatch.setattr(kernel_times, "BOUNDS", tmp_path)
    bounds_of.cache_clear()
    try:
        assert [key[0] for key in bounds_of()] == ["3.10 bfloat16"]
        assert [key[0] for key in bounds_of("3.9")] == ["3.9 bfloat16"]
        with pytest.raises(ValueError, match=r"no table for Triton 3\.5: .* has 3\.10, 3\.9"):
            bounds_of("3.5")
    finally:
        bounds_of.cache_clear()


def test_stage_reports_predicted_time_next_to_measured_time(monkeypatch):
    monkeypatch.setattr(gpu_speed, "_bytes_per_s", lambda _check: 1.0)
    monkeypatch.setattr(gpu_speed, "_flops_per_s", lambda _check: 1.0)
    monkeypatch.setattr(gpu_speed, "partial", measure_nothing)
    added = {}
    entries = SimpleNamespace(add=lambda name, measure: added.update({name: measure()}))
    gpu_speed.shares(SimpleNamespace(sizes=ON_GPU, device_name="NVIDIA H200"), entries)
    expected = predictions(ON_GPU, "NVIDIA H200")
    assert {name for name in added if not name.startswith("torch ")} == set(expected)
    assert {name: entry for name, entry in added.items() if "predicted_us" in entry} == {
        name: {"us": 1.0} | prediction for name, prediction in expected.items()
    }


def measure_nothing(function, *arguments):
    """Replace functools.partial: bind `_add`, and replace the measurements."""
    if function is gpu_speed._add:
        return lambda name, measure: function(*arguments, name, measure)
    return lambda *_arguments: {"us": 1.0}


def test_int8_is_compared_with_the_rate_of_int8():
    launch = replace(LAUNCH, memory_bytes=3.015e9)  # 1 ms
    operation = Operation((launch,), 0.0, flops=2 * 2048 * 132 * 1.75e9 * 0.8 * 1e-3)
    quantized = replace(operation, launches=(replace(launch, is_int8=True),))
    shares = [predict(each, H100, {TAKEN.key: TAKEN}).share for each in (operation, quantized)]
    assert shares == pytest.approx([1 / 1.0015, 0.5 / 1.0015])


def test_unknown_device_has_no_predictions():
    assert predictions(ON_GPU, "interpreter") == {}


def test_command_prints_operations_and_steps(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["kernel_times", "--device", "A100", "--triton", "3.6"])
    kernel_times.main()
    rows = capsys.readouterr().out.splitlines()
    assert sum(row.startswith("| linear bfloat16 ") for row in rows) == len(ON_GPU.layers) * len(ON_GPU.rows)
    assert sum(" decodes at 1024 | " in row for row in rows) == 6
