"""Decode steps with graphs have the bits of steps launched kernel by kernel, and values that a graph would freeze are
detected.
"""

import contextlib
from dataclasses import replace

import pytest
import torch
from broken_kernels import broken

from octavo.config import DeviceConfig
from octavo.kernels.interface import AttentionBatch, DecodePlan, OutputRows
from octavo.models.loader import load_model
from octavo.models.random_weights import tiny_config, write_checkpoint
from octavo.models.registry import read_architecture
from octavo.models.weight_source import FolderWeights
from octavo.worker.decode_plan import kept_bytes, make_decode_plan
from octavo.worker.kv_cache import PagedKVCache
from octavo.worker.memory import forward_bytes, kernel_scratch_bytes

pytest.importorskip("triton")
from interpreted_graphs import InterpretedGraphPool
from triton.runtime.errors import InterpreterError

from octavo.kernels.triton import decode_graphs
from octavo.kernels.triton.decode_graphs import DecodeGraphs
from octavo.kernels.triton.graphs import CaptureError

BLOCK_SIZE, NUM_BLOCKS, TABLE_WIDTH = 16, 80, 20
SIZES = {1: (1, 4)}
LENGTHS = [[7, 300, 257]]  # of the sequences of a step
SMALL = {
    "hidden_size": 32, "intermediate_size": 48, "head_dim": 16, "num_attention_heads": 2, "num_key_value_heads": 1,
    "num_hidden_layers": 1, "vocab_size": 96, "torch_dtype": "bfloat16",
}  # fmt: skip


class Model:
    """A tiny model with a cache of random numbers, and steps of it."""

    def __init__(self, path, kernels, device, family="Qwen3ForCausalLM", *, quantization=None, kv_dtype=None, **config):
        write_checkpoint(path, tiny_config(family, **SMALL | config), std=0.2)
        with torch.device("cpu"):
            self.model = load_model(
                FolderWeights(path), read_architecture(path), kernels, dtype="bfloat16", device=device,
                quantization=quantization, max_model_len=TABLE_WIDTH * BLOCK_SIZE,
            )  # fmt: skip
        self.kernels, self.device, self.has_windows = kernels, device, False
        layout = self.model.architecture.kv_layout
        self.has_windows = layout.window is not None
        self.cache = PagedKVCache(
            layout, num_blocks=[NUM_BLOCKS] * len(layout.kv_groups),
            block_size=BLOCK_SIZE, dtype=kv_dtype or torch.bfloat16, device=device,
        )  # fmt: skip
        generator = torch.Generator().manual_seed(0)
        self.before = [torch.randint(-100, 100, each.shape, generator=generator) for each in self.cache.memory]
        self.reset()

    def reset(self):
        """Fill the cache. Bytes of rounded KV are also bytes of float32 scales: below 63 all of these are finite."""
        for memory, before in zip(self.cache.memory, self.before, strict=True):
            memory.copy_(before.abs() % 63 if memory.dtype == torch.int8 else before / 50)

    def forward(self, token_ids, batch):
        return self.model.forward(token_ids, batch, self.cache)

    def step(self, lengths, seed=0, counts=None, outputs=None):
        """Return token ids and the batch of sequences of these lengths, with their newest tokens to compute.

        counts: number of rows for each sequence; None: one. outputs: output rows of each sequence, its last ones; None:
        all.
        """
        generator = torch.Generator("cpu").manual_seed(seed)
        lens, width = torch.tensor(lengths, device="cpu"), -(-max(lengths) // BLOCK_SIZE)
        counts = torch.tensor(counts or [1] * len(lengths), device="cpu")
        order = torch.randperm(NUM_BLOCKS, generator=generator, device="cpu")[: len(lengths) * width]
        batch = self._batch(lens, order.view(len(lengths), width), counts)
        if self.has_windows:
            second = self._batch(lens, order.flip(0).view(len(lengths), width), counts)
            batch = replace(batch, more_groups=(second,))
        if outputs is not None:
            kept = [int(row in outputs) for row in (counts.cumsum(0) - 1).tolist()]
            rows = torch.tensor(outputs, device=self.device)
            there = torch.tensor(kept, device="cpu").nonzero()[:, 0]
            tables = order.view(len(lengths), width)[there]
            of_rows = self._batch(lens[there], tables, torch.ones_like(there))
            batch = replace(batch, outputs=OutputRows(rows, of_rows))
        token_ids = torch.randint(0, SMALL["vocab_size"], (int(counts.sum()),), generator=generator, device="cpu")
        return token_ids.to(self.device), batch

    def _batch(self, lens, tables, counts):
        sequence = torch.arange(len(lens), device="cpu").repeat_interleave(counts)
        start = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
        positions = (lens - counts)[sequence] + torch.arange(len(sequence), device="cpu") - start[sequence]
        slots = tables[sequence, positions // BLOCK_SIZE] * BLOCK_SIZE
        tensors = start, lens.int(), tables.int().contiguous(), positions, slots + positions % BLOCK_SIZE
        return AttentionBatch(*(each.to(self.device) for each in tensors), BLOCK_SIZE)

    def capture(self, sizes=SIZES, num_bytes=1 << 40):
        """Return the graphs, captured after a first step of one short sequence."""
        plan = DecodePlan(sizes, TABLE_WIDTH, num_bytes)
        with torch.inference_mode():
            return self.kernels.record_forward(self.forward, *self.step([3]), 64, plan)[1]

    def outcome(self, forward, lengths, seed=0, **options):
        """Return the hidden states of a step, and all keys and values after it."""
        self.reset()
        with torch.inference_mode():
            hidden = forward(*self.step(lengths, seed, **options)).clone()
        return [hidden, *(each.clone() for each in self.cache.memory)]


def assert_same(model, graphs, steps=LENGTHS, **options):
    for seed, lengths in enumerate(steps):
        expected = model.outcome(model.forward, lengths, seed, **options)
        for one, other in zip(expected, model.outcome(graphs, lengths, seed, **options), strict=True):
            assert torch.equal(one, other), lengths
    return expected[0]


@pytest.fixture(scope="module")
def model(tmp_path_factory, kernels, device):
    with contextlib.nullcontext() if device.type == "cpu" else device:
        return Model(tmp_path_factory.mktemp("model"), kernels, device)


@pytest.mark.turn(8)
def test_decode_graph_has_bits_of_single_kernel_launches(model):
    """A capture with sequences of length zero serves long ones, padded or not."""
    graphs = model.capture()
    assert graphs.sizes == {1: [1, 4]}
    assert_same(model, graphs)


@pytest.mark.turn(8)
def test_decode_graph_serves_sequences_with_different_row_counts(model):
    """Drafts are verified, or a draft model catches up and needs only the last rows; also a sequence alone."""
    graphs = model.capture({1: (1,), 3: (1, 3)})
    steps = {"lengths": [7, 300, 257], "counts": [1, 4, 2]}
    assert graphs.size_for(model.step(**steps)[1]) == (3, 3)
    hidden = assert_same(model, graphs, [steps["lengths"]], counts=steps["counts"])
    last = assert_same(model, graphs, [steps["lengths"]], counts=steps["counts"], outputs=[0, 6])
    assert torch.equal(last, hidden[[0, 6]])
    token_ids, batch = model.step(**steps)
    model.reset()
    alone = AttentionBatch(
        torch.tensor([0, 4], dtype=torch.int32), batch.seq_lens[1:2], batch.block_tables[1:2].contiguous(),
        batch.positions[1:5], batch.slot_mapping[1:5], BLOCK_SIZE,
    )  # fmt: skip
    for rows in (slice(0, 1), slice(1, 4), slice(0, 4)):  # a decode, drafts, and more rows than drafts have
        part = replace(
            alone, query_start=torch.tensor([0, rows.stop - rows.start], dtype=torch.int32),
            seq_lens=batch.positions[1:5][rows][-1:].int() + 1, positions=batch.positions[1:5][rows],
            slot_mapping=batch.slot_mapping[1:5][rows],
        )  # fmt: skip
        assert graphs.size_for(part) == {1: (1, 1), 3: (3, 1), 4: (3, 3)}[rows.stop - rows.start]
        with torch.inference_mode():
            assert torch.equal(graphs(token_ids[1:5][rows], part), hidden[1:5][rows])


MIXED = {"lengths": [300, 70, 7, 257], "counts": [1, 40, 7, 3]}  # a decode, a whole prompt, and chunks


@pytest.mark.turn(8)
@pytest.mark.parametrize("mean", [1, 3])
def test_graph_serves_decodes_and_prompts_in_one_step(model, mean):
    """Heads of 40 tokens take two tiles. Graphs have unused sequences, and also rows of no sequence."""
    graphs = model.capture({1: (56,)} if mean == 1 else {1: (1,), 3: (20,)})
    assert graphs.size_for(model.step(**MIXED)[1]) == ((1, 56) if mean == 1 else (3, 20))
    hidden = assert_same(model, graphs, [MIXED["lengths"]], counts=MIXED["counts"])
    assert not hidden.isnan().any()
    last = assert_same(model, graphs, [MIXED["lengths"]], counts=MIXED["counts"], outputs=[0, 40, 47, 50])
    assert torch.equal(last, hidden[[0, 40, 47, 50]])


@pytest.mark.turn(8)
@pytest.mark.sweep(24)
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("Gemma2ForCausalLM", {"sliding_window": 20, "query_pre_attn_scalar": 16, "num_hidden_layers": 2}),
        ("Qwen3ForCausalLM", {"kv_dtype": torch.int8, "quantization": "int8"}),
        ("Qwen3ForCausalLM", {"kv_dtype": torch.float8_e4m3fn, "quantization": "fp8"}),
        ("Qwen2ForCausalLM", {"quantization": "int4"}),
        ("Qwen3ForCausalLM", {"quantization": "int4_all"}),
        ("Olmo2ForCausalLM", {}),
        ("Qwen2MoeForCausalLM", {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 24}),
        ("DeepseekV3ForCausalLM", {"num_hidden_layers": 2, "moe_intermediate_size": 24, "num_key_value_heads": 2}),
        (
            "DeepseekV2ForCausalLM",
            {"kv_dtype": torch.float8_e4m3fn, "first_k_dense_replace": 1, "num_key_value_heads": 2},
        ),
        (
            "Gemma4ForCausalLM",
            {
                "sliding_window": 20,
                "num_hidden_layers": 2,
                "layer_types": ["sliding_attention", "full_attention"],
                "num_kv_shared_layers": 0,
                "hidden_size_per_layer_input": 0,
                "moe_intermediate_size": 24,
                "global_head_dim": 32,
                "num_global_key_value_heads": 1,
            },
        ),
    ],
    ids=[
        "windows",
        "int8",
        "fp8",
        "int4",
        "int4 embedding",
        "norms behind",
        "experts",
        "latents and experts",
        "fp8 latents",
        "expert branches and two head sizes",
    ],
)
def test_decode_graph_bits_are_equal_for_other_models_and_dtypes(tmp_path, kernels, device, family, options):
    model = Model(tmp_path, kernels, device, family, **options)
    assert model.has_windows == ("sliding_window" in options)
    graphs = model.capture({1: (4, 16)})
    assert_same(model, graphs, [[300, 7, 40]])
    assert graphs.size_for(model.step([300, 7, 40], counts=[1, 7, 5])[1]) == (1, 16)
    assert_same(model, graphs, [[300, 7, 40]], counts=[1, 7, 5])


def found(model, module, name, wrong, size=4, **options):
    """Return whether a pass with a mistake is refused, or has other bits."""
    right = getattr(module, name)
    try:
        setattr(module, name, wrong)
        graphs = model.capture({1: (size,)})
        setattr(module, name, right)
        assert_same(model, graphs, [[300, 7, 40]], **options)
    except (AssertionError, RuntimeError, InterpreterError) as error:
        return str(error)
    finally:
        setattr(module, name, right)
    return None


@pytest.mark.turn(12)
def test_frozen_batch_value_in_graph_is_detected(model):
    """The longest sequence, known to the host from elsewhere or read on it, is the one of the capture."""
    from octavo.kernels.triton import attention

    right, longest = attention.paged_attention, 3

    def knows(q, k_cache, v_cache, batch, *options):
        lengths = batch.seq_lens.clamp(max=longest)
        return right(q, k_cache, v_cache, replace(batch, seq_lens=lengths), *options)

    def reads(q, k_cache, v_cache, batch, *options):
        lengths = batch.seq_lens.clamp(max=max(batch.seq_lens.tolist()))
        return right(q, k_cache, v_cache, replace(batch, seq_lens=lengths), *options)

    assert "[300, 7, 40]" in found(model, attention, "paged_attention", knows)
    assert "no graph can hold" in found(model, attention, "paged_attention", reads)


@pytest.mark.slow
def test_temporary_memory_in_graph_is_detected(model):
    """A tensor made before the capture has old values if it is kept, and any content if it is freed."""
    from octavo.kernels.triton import rope_kv

    right, positions = rope_kv.rope_and_write_kv, {}

    def remembers(q, k, v, cos_sin, batch, *caches, **options):
        kept = positions.setdefault(len(q), batch.positions + 0)
        return right(q, k, v, cos_sin, replace(batch, positions=kept), *caches, **options)

    assert "[300, 7, 40]" in found(model, rope_kv, "rope_and_write_kv", remembers)
    positions.clear()
    graphs = None
    try:
        rope_kv.rope_and_write_kv = remembers
        graphs = model.capture({1: (1,)})
    finally:
        rope_kv.rope_and_write_kv = right
    positions.clear()
    with pytest.raises(RuntimeError, match="memory that was given back"):
        assert_same(model, graphs, [[5]])


def made_step(generator, counts, width):
    """Return token ids and a batch of random numbers. counts: rows of each sequence; width: width of the tables."""

    def some(*shape, dtype=torch.int32):
        return torch.randint(1, 1000, shape, generator=generator).to(dtype)

    num_rows, num_seqs = sum(counts), len(counts)
    start, ids = torch.tensor([0, *counts]).cumsum(0).int(), some(num_rows, dtype=torch.int64)
    positions, slots, tables = (
        some(num_rows, dtype=torch.int64),
        some(num_rows, dtype=torch.int64),
        some(num_seqs, width),
    )
    batch = AttentionBatch(start, some(num_seqs), tables, positions, slots, BLOCK_SIZE)
    more_groups = (replace(batch, block_tables=tables + group, slot_mapping=slots + group) for group in (1, 2))
    return ids, replace(batch, more_groups=tuple(more_groups))


def assert_copied(module, generator):
    """Fill inputs with a large step, then with a small one, and check the values that a graph reads."""
    size, (ids, batch) = (2, 4), made_step(generator, [2, 1, 2, 3], 20)
    inputs = module.DecodeInputs(batch, DecodePlan({1: (1,), 2: (4,)}, 20, 1 << 40))
    inputs.fill(size, ids, batch)
    before = batch.block_tables
    ids, batch = made_step(generator, [1, 3], 11)
    inputs.fill(size, ids, batch)
    own_ids, own = inputs.of_size(size)
    assert own_ids.tolist() == [*ids.tolist(), 0, 0, 0, 0]
    assert own.positions.tolist() == [*batch.positions.tolist(), 0, 0, 0, 0]
    assert own.query_start.tolist() == [0, 1, 4, 5, 6]
    assert own.seq_lens.tolist() == [*batch.seq_lens.tolist(), 0, 0]
    for group in range(3):
        each, given = own.of_group(group), batch.of_group(group)
        assert each.slot_mapping.tolist() == [*given.slot_mapping.tolist(), -1, -1, -1, -1]
        assert torch.equal(each.block_tables[:2, :11], given.block_tables)
        assert torch.equal(each.block_tables[2:], before[2:] + group)  # of padding sequences of length zero, never read


def test_decode_inputs_are_copied_and_padded(kernels, generator, monkeypatch):
    monkeypatch.setattr(decode_graphs, "_BLOCK", 8)  # tables have several blocks
    assert_copied(decode_graphs, generator)


@pytest.mark.sweep(8)
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("index.to(tl.int64) * graph_width", "index.to(tl.int64) * width"),
        ("column = tl.program_id(1) * BLOCK + ", "column = "),
        ("tl.load(slots_ptr + index, mask=is_row, other=-1)", "tl.load(slots_ptr + index, mask=is_row, other=0)"),
        ("token_ids, given.positions, given.slot_mapping,", "token_ids, given.positions, batch.slot_mapping,"),
        ("num_rows + index + 1 - num_seqs", "num_rows + index - num_seqs"),
        ("tl.load(query_start_ptr + index + 1,", "tl.load(query_start_ptr + index,"),
        ("given.seq_lens, given.block_tables,", "given.seq_lens, batch.block_tables,"),
    ],
)
def test_broken_decode_input_copy_is_detected(kernels, generator, tmp_path, old, new):
    wrong = broken(tmp_path, "decode_graphs", old, new)
    wrong._BLOCK = 8
    with pytest.raises(AssertionError):
        assert_copied(wrong, generator)


def test_interpreted_graph_replays_torch_operations():
    """Operations of torch compute on the current values of their inputs. Memory is wiped, and shared by all graphs."""
    pool, x, out, made = InterpretedGraphPool(), torch.ones(4), torch.zeros(2, 2), []

    def run():
        if not made:
            made.append((x * 2).view(2, 2).t())  # a view keeps its memory
            made[0][0].add_(1.0)
        out.copy_(made[0] + torch.arange(2))

    first, second = pool.capture(run), pool.capture(run)
    assert out.tolist() == [[3.0, 4.0], [2.0, 3.0]]
    x.copy_(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    first()
    assert out.tolist() == [[3.0, 8.0], [4.0, 9.0]]
    second()
    assert out.isnan().all()  # the operands are not computed yet
    made.clear()
    pool.capture(run)
    before = pool.num_bytes
    made.clear()
    pool.capture(run)
    assert pool.num_bytes == before


@pytest.mark.parametrize("way", ["tolist", "item", "bool", "numpy", "from the host", "nonzero"])
def test_capture_refuses_host_synchronization(way):
    x = torch.ones(2)
    ways = {
        "tolist": x.tolist, "item": lambda: float(x[0] + 1), "bool": lambda: bool((x > 0).all()),
        "numpy": x.numpy, "from the host": lambda: torch.tensor([1.0]) + x, "nonzero": lambda: x[x > 0],
    }  # fmt: skip
    with pytest.raises(RuntimeError, match="no graph can hold"), torch.inference_mode():
        InterpretedGraphPool().capture(ways[way])


@pytest.mark.slow
def test_padding_rows_that_write_kv_are_detected(model, tmp_path, monkeypatch):
    from octavo.kernels.triton import rope_kv

    assert found(model, rope_kv, "rope_and_write_kv", rope_kv.rope_and_write_kv) is None
    wrong = broken(
        tmp_path, "rope_kv", "        is_head = (kv_head < NUM_KV_HEADS) & (slot >= 0)",
        "        slot = tl.maximum(slot, 0)\n        is_head = kv_head < NUM_KV_HEADS",
    )  # fmt: skip
    assert found(model, rope_kv, "rope_and_write_kv", wrong.rope_and_write_kv) is not None


@pytest.mark.turn(12)
@pytest.mark.sweep(4)
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("elif (num_tokens <= split_tokens) |", "elif (split_tokens == 1) |"),
        ("tile = tl.where(is_sharer, number % sequence_tiles, number)", "tile = number * 0"),
        ("num_tiles = num_tokens * group // BLOCK_M + num_seqs", "num_tiles = num_seqs // 16"),
        ("if (num_tokens <= split_tokens) & (token < num_tokens):", "if token < num_tokens:"),
    ],
    ids=["each row is split", "one tile", "tiles", "each sequence is merged"],
)
def test_attention_that_expects_one_row_per_sequence_is_detected(model, tmp_path, old, new):
    """In graphs that are captured with one row per sequence, a prompt has many rows."""
    from octavo.kernels.triton import attention

    wrong = broken(tmp_path, "attention", old, new)
    assert found(model, attention, "paged_attention", wrong.paged_attention, 48, counts=[1, 7, 40]) is not None


class Pool:
    """Graphs that are Python functions; each takes `num_bytes` bytes."""

    def __init__(self, num_bytes=0):
        self.num_bytes, self.of_each = 0, num_bytes

    def capture(self, run):
        self.num_bytes += self.of_each
        return run


def hidden_of(token_ids, batch):
    return torch.zeros(len(token_ids), 3)


def made_graphs(model, sizes, pool, num_bytes=1 << 40):
    return DecodeGraphs(hidden_of, model.step([3])[1], DecodePlan(sizes, TABLE_WIDTH, num_bytes), pool)


def test_size_for_selects_smallest_fitting_graph(model):
    graphs = made_graphs(model, {1: (1, 2, 4, 8), 3: (1, 2)}, Pool())
    sizes = [graphs.size_for(model.step([9] * count)[1]) for count in (1, 2, 3, 4, 5, 8, 9)]
    assert sizes == [(1, 1), (1, 2), (1, 4), (1, 4), (1, 8), (1, 8), None]
    counts = ([1, 2], [5, 1], [6, 1], [2, 1, 1])
    assert [graphs.size_for(model.step([9] * len(some), counts=some)[1]) for some in counts] == [(3, 2)] * 2 + [
        None
    ] * 2
    decodes = model.step([40, 9])[1]
    wide = replace(decodes, block_tables=torch.zeros(2, TABLE_WIDTH + 1, dtype=torch.int32))
    assert [graphs.size_for(batch) for batch in (decodes, wide)] == [(1, 2), None]
    ran = []
    graphs.forward = lambda token_ids, batch: ran.append(len(token_ids))
    graphs(torch.zeros(2, dtype=torch.int64), wide)
    assert ran == [2]


def test_size_for_mixed_step_limits_padding(model):
    """A mixed step uses the graphs with the most rows per sequence. Padding up to one tile of rows is free."""
    graphs = made_graphs(model, {1: (1, 2, 4, 8, 16, 24, 128)}, Pool())

    def sizes(*all_counts):
        return [graphs.size_for(model.step([100] * len(some), counts=some)[1]) for some in all_counts]

    assert sizes([2], [3, 1], [1, 1, 7], [20, 1], [24]) == [(1, 2), (1, 4), (1, 16), (1, 24), (1, 24)]
    assert sizes([25], [85], [80, 5, 1], [100, 28], [100, 29]) == [None, None, (1, 128), (1, 128), None]
    graphs = made_graphs(model, {1: (1, 8, 64), 4: (1, 2, 16, 24)}, Pool())
    assert sizes([5], [9], [7, 1], [60], [70], [90, 1, 1]) == [(4, 2), (4, 16), (4, 2), (4, 16), (4, 24), (4, 24)]
    assert sizes([97]) == [None]
    graphs = made_graphs(model, {1: (1,), 4: (1, 2, 16)}, Pool())
    assert graphs._size_for_mixed(40, 17) is None, "the graph has 64 rows, but only 16 sequences"


def test_graphs_are_captured_in_descending_order_of_rows(model):
    seen = []
    pool = Pool()
    plan = DecodePlan({1: (1, 8), 3: (1, 4)}, TABLE_WIDTH, 1 << 40)
    DecodeGraphs(lambda ids, batch: seen.append(len(ids)) or hidden_of(ids, batch), model.step([3])[1], plan, pool)
    assert seen == [12, 8, 3, 1]


def test_decode_graphs_over_planned_memory_are_omitted(model, caplog):
    """The largest graphs are captured first. Graphs that do not fit are omitted, and their steps are padded further."""
    caplog.set_level("INFO")
    sizes = {1: (1, 2, 4, 8)}
    kept = made_graphs(model, sizes, Pool()).num_bytes  # inputs and results
    graphs = made_graphs(model, sizes, Pool(100), kept + 250)
    assert graphs.sizes == {1: [4, 8]}
    assert graphs.num_bytes == kept + 300  # the third graph was captured before its size was known
    assert graphs.size_for(model.step([9])[1]) == (1, 4)
    [warning] = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert warning.startswith(f"only 2 of 4 decode graphs fit into {kept + 250} bytes")
    assert made_graphs(model, {1: (1, 2)}, Pool(100), 50).size_for(model.step([9])[1]) is None


def test_failed_capture_omits_smaller_graphs_with_warning(model, caplog):
    class Refusing(Pool):
        def capture(self, run):
            if self.num_bytes == 200:
                raise CaptureError("operation not permitted when stream is capturing")
            return super().capture(run)

    graphs = made_graphs(model, {1: (1, 2, 4, 8)}, Refusing(100))
    assert graphs.sizes == {1: [4, 8]}
    assert "steps of up to 2 rows are not captured as graphs: operation not permitted" in caplog.text


@pytest.mark.turn(12)
def test_decode_graph_memory_is_within_plan(model):
    """Inputs and results are exact; each intermediate result counts at least 512 bytes."""
    architecture, pool = model.model.architecture, InterpretedGraphPool()
    plan = make_decode_plan(
        model.model, DeviceConfig(max_cudagraph_capture_size=4), model.device, num_rows=[1, 2], max_num_seqs=8,
        max_model_len=TABLE_WIDTH * BLOCK_SIZE, block_size=BLOCK_SIZE,
    )  # fmt: skip
    with torch.inference_mode():
        graphs = DecodeGraphs(model.forward, model.step([3])[1], replace(plan, sizes={2: (4,)}), pool)
    assert graphs.num_bytes - pool.num_bytes == kept_bytes(architecture, 4, 8, TABLE_WIDTH, "bfloat16")
    shapes = forward_bytes(architecture, 8, "bfloat16")
    shapes += kernel_scratch_bytes(architecture, model.kernels, max_seq_len=TABLE_WIDTH * BLOCK_SIZE, max_tokens=8)
    assert 0 < pool.num_bytes <= shapes + 20 * 512
    assert plan.num_bytes > shapes


def test_cuda_graph_pool_captures_replays_and_counts_memory(monkeypatch):
    """torch's graph calls, in order; a graph's size is the growth of the allocator, or the loss of free device
    memory.
    """
    from octavo.kernels.triton.graphs import CudaGraphPool

    calls, memory = [], iter([(100, 1000), (150, 930), (150, 930), (170, 925)])

    class Graph:
        def replay(self):
            calls.append("replay")

    @contextlib.contextmanager
    def captured(graph, *, pool, stream, capture_error_mode):
        calls.append(("begin", pool, stream, capture_error_mode))
        yield
        calls.append("end")

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    monkeypatch.setattr(torch.cuda, "Stream", lambda _device: "stream")
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", captured)
    monkeypatch.setattr(CudaGraphPool, "_memory", lambda _self: next(memory))
    pool = CudaGraphPool(torch.device("cuda"))
    replay = pool.capture(lambda: calls.append("run"))
    assert calls == [("begin", "pool", "stream", "thread_local"), "run", "end", "replay"]
    assert pool.num_bytes == 70
    pool.capture(lambda: None)
    assert pool.num_bytes == 90
    replay()
    assert calls.count("replay") == 3
