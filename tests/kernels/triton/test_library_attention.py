"""Attention by FlashInfer and FlashAttention 3: what octavo gives them, by stand-ins here and by them on a GPU.

On a GPU (TRITON_INTERPRET=0) where the library is installed, the library itself computes.
"""

import contextlib
import importlib.util
import itertools
import sys
from dataclasses import replace
from pathlib import Path

import library_standins as standins
import pytest
import torch
from broken_kernels import broken
from paged_batches import dense_attention, paged_batch
from test_decode_graphs import Model

from octavo.errors import ConfigError
from octavo.kernels import are_exact, create_kernels
from octavo.worker.kv_plan import check_kernels_have

pytest.importorskip("triton")

FLASHINFER, FLASH_ATTENTION_3 = "flashinfer-inexact", "flash-attn-3-inexact"
LIBRARIES = {
    "flashinfer": (FLASHINFER, "flashinfer", "FlashInferKernels"),
    "flash_attn_interface": (FLASH_ATTENTION_3, "flash_attention_3", "FlashAttention3Kernels"),
    "vllm.vllm_flash_attn": (FLASH_ATTENTION_3, "flash_attention_3", "FlashAttention3Kernels"),
}
MIXED = [(40, 40), (70, 5), (300, 1), (1, 1), (129, 12), (17, 4), (16, 1)]  # KV lengths, and rows
MOST_UNITS_OFF = 8.0  # as `tools/gpu_check.py` allows


def install(monkeypatch, only):
    """Put one library where it is imported: itself where it serves this device, else its stand-in; and no other."""
    is_compiled = sys.modules["triton"].knobs.runtime.interpret is False
    for name, module in standins.modules().items():
        if name != only:
            monkeypatch.setitem(sys.modules, name, None)
        elif not (is_compiled and importlib.util.find_spec(name.partition(".")[0])):
            monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(standins.BatchPrefillWithPagedKVCacheWrapper, "made", [])


@pytest.fixture(params=LIBRARIES)
def library(request, monkeypatch, kernels):
    install(monkeypatch, request.param)
    return request.param


@pytest.fixture
def made(library, device):
    return create_kernels(device, LIBRARIES[library][0])


def units_off(kernels, generator, heads, dtype, *, window=None, softcap=None, block_size=16):
    """Return the largest error of a mixed batch, in units of the last place of the largest result.

    What is behind a window is gone: it has neither blocks nor numbers.
    """
    head_dim, num_kv_heads, group = heads
    batch, *caches = paged_batch(MIXED, block_size, num_kv_heads, head_dim, dtype, generator)
    q = torch.randn(len(batch.positions), num_kv_heads * group, head_dim, generator=generator).to(dtype)
    exact = dense_attention(q, batch, *caches, 0.3, window, torch.float64, softcap)
    for table, (length, rows) in zip(batch.block_tables, MIXED, strict=True):
        gone = 0 if window is None else max(0, length - rows + 1 - window) // block_size
        for cache in caches:
            cache[table[:gone].long()] = torch.nan
        table[:gone] = 2**30
    result = kernels.paged_attention(q, *caches, batch, 0.3, window, softcap)
    assert result.dtype == dtype
    unit = torch.finfo(dtype).eps * float(exact.abs().max())
    off = float((result.double() - exact).abs().max()) / unit
    return off if off == off else float("inf")  # noqa: PLR0124  a NaN differs from itself


@pytest.mark.sweep(3)
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (37, None), (None, 0.7), (100, 2.0), (1, None)])
@pytest.mark.parametrize("heads", [(64, 2, 1), (128, 1, 7)], ids=str)
def test_mixed_batches_are_right(made, generator, heads, window, softcap):
    for dtype, block_size in ((torch.float16, 16), (torch.bfloat16, 5)):
        off = units_off(made, generator, heads, dtype, window=window, softcap=softcap, block_size=block_size)
        assert off < MOST_UNITS_OFF, dtype


BREAKS = [
    ("flashinfer", "(lengths - 1) % batch.block_size + 1", "(lengths - 2) % batch.block_size + 1"),
    ("flashinfer", "else window - 1,", "else window,"),
    ("flashinfer", "(lengths - starts.diff() + 1 - window)", "(lengths - starts.diff() + 1 + 16 - window)"),
    ("flashinfer", "softcap or 0.0", "0.0"),
    ("flash_attn_interface", "(window - 1, 0)", "(window, 0)"),
    ("flash_attn_interface", "batch.seq_lens - first * batch.block_size", "batch.seq_lens"),
    ("flash_attn_interface", "num_tokens - num_seqs + 1", "num_tokens // num_seqs"),
    ("flash_attn_interface", "k_cache.transpose(1, 2), v_cache.transpose(1, 2)", "v_cache.transpose(1, 2), k_cache"),
    ("vllm.vllm_flash_attn", "seqused_k=lengths", "seqused_k=lengths - 1"),
]


@pytest.mark.parametrize(("library", "old", "new"), BREAKS, ids=str)
def test_these_tests_find_mistakes(monkeypatch, tmp_path, kernels, device, generator, library, old, new):
    install(monkeypatch, library)
    _, module, name = LIBRARIES[library]
    made = getattr(broken(tmp_path, module, old, new), name)(device)
    with contextlib.suppress(AssertionError, IndexError, ValueError):  # of the stand-in, or of a page that is not there
        assert units_off(made, generator, (64, 2, 1), torch.float16, window=37, softcap=0.7) <= MOST_UNITS_OFF
        pytest.fail("the mistake was not found")


def _batch(generator, dtype=torch.float16, head_dim=64, sequences=MIXED):
    batch, *caches = paged_batch(sequences, 16, 2, head_dim, dtype, generator)
    return torch.randn(len(batch.positions), 2, head_dim, generator=generator).to(dtype), batch, caches


@pytest.mark.parametrize("library", ["flashinfer", "flash_attn_interface"], indirect=True)
@pytest.mark.parametrize("kind", ["float32", "head_dim"])
def test_what_has_no_kernel_there_is_computed_by_octavos(made, kernels, generator, kind):
    """With the bits that these have, and one warning."""
    dtype, head_dim = torch.float32 if kind == "float32" else torch.bfloat16, 20 if kind == "head_dim" else 64
    q, batch, caches = _batch(generator, dtype, head_dim, [(20, 3), (7, 1)])
    what = f"octavo's own kernels compute attention of heads of {head_dim} in {str(dtype)[6:]}"
    with pytest.warns(RuntimeWarning, match=what) as warned:
        results = [made.paged_attention(q, *caches, batch, 0.3, None) for _ in range(2)]
    assert len(warned) == 1
    for result in results:
        assert torch.equal(result, kernels.paged_attention(q, *caches, batch, 0.3, None))


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8"])
def test_rounded_keys_and_values_are_refused(made, kernels, kv_cache_dtype):
    """As octavo lays them out, no library reads them: all of attention would be left to Triton, unasked."""
    for each, kind in ((kernels, kv_cache_dtype), (made, "auto")):
        check_kernels_have(each, kind)
    with pytest.raises(ConfigError, match=f"{made.name} have no .* {kv_cache_dtype}: choose kv_cache_dtype auto, or"):
        check_kernels_have(made, kv_cache_dtype)


def test_what_is_inexact_says_so_and_is_told_apart(made, kernels, library, device):
    backend = LIBRARIES[library][0]
    assert made.name == backend
    assert backend.endswith("-inexact")
    assert not are_exact(device, backend)
    assert made.identity != kernels.identity
    heads = {"num_heads": 16, "num_kv_heads": 8, "head_dim": 64, "vocab_size": 100, "max_tokens": 64}
    assert made.scratch_bytes(**heads, max_seq_len=100) >= (128 << 20) + kernels.scratch_bytes(**heads, max_seq_len=100)


@pytest.mark.parametrize("backend", [FLASHINFER, FLASH_ATTENTION_3])
def test_what_is_not_installed_is_one_error(monkeypatch, kernels, device, backend):
    install(monkeypatch, only=None)
    command = (
        r"pip install flashinfer-python; or" if backend == FLASHINFER else r"pip install flash-attn-3 .*vllm\); or"
    )
    with pytest.raises(ConfigError, match=f"{backend}' needs .* cannot be imported .*: {command} choose triton"):
        create_kernels(device, backend)


@pytest.mark.parametrize(("found", "says"), [((8, 9), "capability 9.0 to 9.x, it has 8.9"), (None, "NVIDIA's; choose")])
def test_other_gpus_are_refused(monkeypatch, kernels, found, says):
    install(monkeypatch, "flash_attn_interface")
    monkeypatch.setattr(torch.version, "hip", "6.4" if found is None else None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: found)
    with pytest.raises(ConfigError, match=says):
        create_kernels(torch.device("cuda"), FLASH_ATTENTION_3)


@pytest.mark.parametrize("library", ["flashinfer"], indirect=True)
class TestFlashInfer:
    @pytest.fixture(autouse=True)
    def _of_the_stand_in(self, library):
        if not hasattr(sys.modules.get(library), "__spec__") or sys.modules[library].__spec__ is not None:
            pytest.skip("the library itself is here")

    def test_a_batch_is_planned_once_for_layers_of_a_kind(self, made, generator):
        wrappers = standins.BatchPrefillWithPagedKVCacheWrapper.made
        q, batch, caches = _batch(generator)
        for _ in range(3):  # layers
            for window in (None, 37):
                made.paged_attention(q, *caches, batch, 0.3, window)
        assert [(each.num_plans, each.num_runs) for each in wrappers] == [(1, 3), (1, 3)]  # of the two masks
        for _ in range(4):  # steps
            q, batch, caches = _batch(generator)
            made.paged_attention(q, *caches, batch, 0.3, None)
        assert [each.num_plans for each in wrappers] == [2, 2, 1, 1]  # no more wrappers than were counted

    def test_memory_of_partial_results_grows_with_heads(self, made, generator, monkeypatch):
        wrappers = standins.BatchPrefillWithPagedKVCacheWrapper.made
        monkeypatch.setattr(made, "_num_units", 800)
        for num_heads in (2, 16):
            q, batch, caches = _batch(generator)
            q = q.repeat(1, num_heads // 2, 1)
            made.paged_attention(q, *caches, batch, 0.3, None)
        needed = [num_heads // 2 * 2 * 800 * 128 * 65 * 4 for num_heads in (2, 16)]
        assert [each.workspace.numel() >= least for each, least in zip(wrappers, needed, strict=True)] == [True, True]
        assert wrappers[0].workspace.numel() < needed[1]

    def test_no_graphs_are_captured_where_it_computes(self, made, caplog):
        assert not made.captures_graphs({64, 80}, torch.bfloat16)
        assert "no decode graphs are captured: FlashInfer plans each step on the host" in caplog.text
        assert made.captures_graphs({80}, torch.bfloat16)


@pytest.mark.parametrize("library", ["flash_attn_interface"], indirect=True)
def test_a_graph_gives_what_kernels_give_one_by_one(tmp_path, made, device):
    """Decodes and drafts, with rows of no sequence, other lengths than were captured, and windows."""
    model = Model(tmp_path, made, device, "Gemma2ForCausalLM", sliding_window=20, num_hidden_layers=2)
    assert made.captures_graphs({16}, torch.bfloat16)
    captured = model.capture({3: (2,)})
    assert captured.sizes == {3: [2]}
    with torch.inference_mode():
        for lengths, counts in (([90, 300], [1, 4]), ([40], [2])):
            step = model.step(lengths, counts=counts)
            by_graph = captured(*step).float().clone()
            torch.testing.assert_close(by_graph, model.forward(*step).float(), atol=0.03, rtol=0.03)


@pytest.mark.parametrize("library", ["flash_attn_interface", "vllm.vllm_flash_attn"], indirect=True)
@pytest.mark.parametrize("window", [None, 5])
def test_what_pads_a_graph_gets_zeros(made, generator, window):
    """Sequences of no length with one row or none, and rows of no sequence."""
    q, batch, caches = _batch(generator)
    expected = made.paged_attention(q, *caches, batch, 0.3, window)
    starts, num_rows = batch.query_start.tolist(), len(q)
    padded = replace(
        batch,
        query_start=torch.tensor([*starts, num_rows + 1, num_rows + 1], dtype=torch.int32),
        seq_lens=torch.cat([batch.seq_lens, torch.zeros(2, dtype=torch.int32)]),
        block_tables=torch.cat([batch.block_tables, torch.zeros_like(batch.block_tables[:2])]),
        positions=torch.cat([batch.positions, torch.zeros(3, dtype=torch.int64)]),
        slot_mapping=torch.cat([batch.slot_mapping, torch.full((3,), -1)]),
        has_rows_behind=True,
    )
    result = made.paged_attention(torch.cat([q, q[:3]]), *caches, padded, 0.3, window)
    torch.testing.assert_close(result[:num_rows], expected, atol=2e-3, rtol=2e-3)
    assert torch.equal(result[num_rows:], torch.zeros_like(result[num_rows:]))


def test_splits_are_bounded(made, library):
    """By the room that was set aside, and where a device is busy without there are none."""
    if library == "flashinfer":
        pytest.skip("it is given the memory")
    num_splits = sys.modules[type(made).__module__]._num_splits
    shapes = itertools.product((1, 17, 256, 4096), ((8, 8), (32, 8), (64, 1)), (64, 128, 256))
    for rows, (num_heads, num_kv_heads), head_dim in shapes:
        q = torch.empty(rows, num_heads, head_dim, device="meta")
        number = num_splits(q, num_kv_heads, 1)
        assert number == 1 or number * rows * num_heads * (head_dim + 1) * 4 <= 128 << 20
    assert num_splits(torch.empty(1, 32, 128, device="meta"), 8, 1) == 32
    assert num_splits(torch.empty(2048, 32, 128, device="meta"), 8, 2048) == 1


SOURCES = [
    ("flashinfer", "prefill.py", "BatchPrefillWithPagedKVCacheWrapper", ("__init__", "plan", "run")),
    ("flash_attn_interface", "flash_attn_interface.py", None, ("flash_attn_with_kvcache",)),
    ("vllm", "vllm_flash_attn/flash_attn_interface.py", None, ("flash_attn_varlen_func",)),
]


@pytest.mark.parametrize(("package", "file", "of_class", "names"), SOURCES, ids=[each[0] for each in SOURCES])
def test_the_stand_ins_have_the_libraries_signatures(package, file, of_class, names):
    """Of those that are installed, read out of their sources: a later version may have more at the end."""
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        pytest.skip(f"{package} is not installed")
    for name in names:
        own = standins.parameters(standins.__file__, name, of_class)
        real = standins.parameters(Path(found.origin).parent / file, name, of_class)
        assert list(real.items())[: len(own)] == list(own.items()), name
