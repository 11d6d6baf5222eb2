"""A recorded forward pass has the bits of the model's own code, and a pass that it would change is not recorded."""

import itertools
import time
from dataclasses import replace

import pytest
import torch
from kernel_backends import ISAS, compiled_kernels

from octavo.kernels.interface import AttentionBatch, OutputRows
from octavo.kernels.operations.add import add
from octavo.kernels.operations.soft_cap import soft_cap
from octavo.kernels.quantization import quantize_int4, quantize_int8
from octavo.kernels.reference import ReferenceKernels
from octavo.kernels.state_batch import StateBatch
from octavo.models.expert_layer import ExpertBranches, Experts
from octavo.models.gated_attention import GatedAttentionConfig
from octavo.models.gated_conv import GatedConvConfig
from octavo.models.gated_delta import GatedDeltaConfig
from octavo.models.kv_layout import StateShape
from octavo.models.latent_attention import LatentAttentionConfig
from octavo.models.loader import load_model
from octavo.models.mamba2 import Mamba2Config
from octavo.models.no_sublayer import NoSublayer, Unchanged
from octavo.models.plain_mlp import PlainMLP
from octavo.models.random_weights import tiny_config, write_checkpoint
from octavo.models.registry import FAMILIES, read_architecture
from octavo.models.weight_source import FolderWeights
from octavo.worker.kv_cache import PagedKVCache, make_states

BLOCK_SIZE, NUM_BLOCKS, MAX_TOKENS = 16, 24, 96
# Numbers of tokens of each sequence in a step: decodes, chunks, both, the largest step.
STEPS = [[1], [1, 1, 1], [5], [20, 1, 7], [1] * 9, [40, 56], [3, 1, 30]]
FORMATS = [("float32", None), ("bfloat16", None), ("bfloat16", "int8"), ("bfloat16", "int4"), ("bfloat16", "int4_all")]

# torch reads the rows of tables, so such models are not recorded.
RECORDED = {"Gemma4ForCausalLM": {"hidden_size_per_layer_input": 0}}


def step_of(lengths, generator, starts):
    """Return token ids and batch of a step: sequence i continues at starts[i], in its own blocks."""
    counts = torch.tensor(lengths)
    query_start = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]).int()
    first = torch.tensor(starts[: len(lengths)])
    rows = torch.repeat_interleave(torch.arange(len(lengths)), counts)
    positions = torch.arange(sum(lengths)) - query_start[:-1].long()[rows] + first[rows]
    tables = torch.arange(NUM_BLOCKS, dtype=torch.int32)[: len(lengths) * 2].view(len(lengths), 2).contiguous()
    if max(starts[i] + n for i, n in enumerate(lengths)) > 2 * BLOCK_SIZE:
        tables = torch.arange(NUM_BLOCKS, dtype=torch.int32).view(4, 6)[: len(lengths)].contiguous()
    blocks = tables[rows, positions // BLOCK_SIZE].long()
    batch = AttentionBatch(
        query_start=query_start,
        seq_lens=(first + counts).int(),
        block_tables=tables,
        positions=positions,
        slot_mapping=blocks * BLOCK_SIZE + positions % BLOCK_SIZE,
        block_size=BLOCK_SIZE,
        states=states_of(query_start, first),
    )
    return torch.randint(0, 512, (sum(lengths),), generator=generator), batch


def states_of(query_start, first):
    """Return slots of sequences, which continue if they do not start at 0. A repeated step reads the same states."""
    slots = torch.arange(len(first), dtype=torch.int32)
    return StateBatch.plain(query_start, torch.where(first > 0, slots, -1).int(), slots + NUM_BLOCKS // 2)


def with_outputs(batch, counts):
    """Return the batch with the last `counts[i]` rows of sequence i as outputs."""
    ends = batch.query_start[1:].tolist()
    rows = torch.tensor([end - count + i for end, count in zip(ends, counts, strict=True) for i in range(count)]).long()
    kept = [i for i, count in enumerate(counts) if count]
    start = torch.tensor([0, *itertools.accumulate(counts[i] for i in kept)], dtype=torch.int32)
    attention = AttentionBatch(
        query_start=start,
        seq_lens=batch.seq_lens[kept],
        block_tables=batch.block_tables[kept].contiguous(),
        positions=batch.positions[rows],
        slot_mapping=batch.slot_mapping[rows],
        block_size=BLOCK_SIZE,
    )
    return replace(batch, outputs=OutputRows(rows, attention))


class Cache:
    def __init__(self, model):
        dtype = str(model.dtype).removeprefix("torch.")
        self.layers = []
        layout = model.architecture.kv_layout
        _, states = make_states(layout, NUM_BLOCKS, 0, model.dtype)
        for number, spec in enumerate(layout.layers):
            if spec.shared_layer is not None:
                self.layers.append(self.layers[spec.shared_layer])
                continue
            if isinstance(spec, StateShape):
                self.layers.append(tuple(part.fill_(0.25) for part in states[number]))
                continue
            size = spec.block_bytes(BLOCK_SIZE, dtype) // model.dtype.itemsize
            self.layers.append(spec.views(torch.zeros(NUM_BLOCKS, size, dtype=model.dtype), BLOCK_SIZE))

    def layer(self, index):
        return self.layers[index]


def load(path, kernels, dtype, quantization):
    return load_model(
        FolderWeights(path), read_architecture(path), kernels, dtype=dtype, device=torch.device("cpu"),
        max_model_len=96, quantization=quantization,
    )  # fmt: skip


def calls_of_layer(kernels, config, layer, dtype):
    """Return the number of kernel calls of one layer, with both of its norms."""
    mixer = config.attention
    if isinstance(mixer, LatentAttentionConfig):
        calls = 8
    elif isinstance(mixer, GatedDeltaConfig):
        calls = 7
    elif isinstance(mixer, GatedConvConfig | Mamba2Config):
        calls = 6
    elif isinstance(mixer, NoSublayer):
        calls = 0
    else:
        calls = 6 if mixer.qk_norm else 4
        calls += -1 if mixer.is_shared else mixer.v_norm
        calls += 3 * isinstance(mixer, GatedAttentionConfig)
    calls += config.stream_scale
    mlp = layer.mlp
    if isinstance(mlp, PlainMLP):
        return calls + 3 + 1
    if isinstance(mlp, Experts) and not mlp.config.is_gated:
        return calls + 10 + 1
    if isinstance(mlp, Unchanged):
        return calls + 1
    if isinstance(mlp, ExpertBranches):
        gate_up = mlp.shared.gate_up
        calls += 7 + 6  # five norms and a sum
    elif isinstance(mlp, Experts):
        gate_up = mlp.shared_gate_up
        calls += 7 + (mlp.shared_gate is not None)
    else:
        gate_up = mlp.gate_up
    if gate_up is not None:
        number = gate_up.storage.dtype_number
        is_fused = kernels.kernel_set.fuses_gate(int(dtype == "bfloat16"), number, gate_up.out_features)
        calls += 2 if is_fused else 3
    return calls + (4 if config.norms.after_mlp is not None else 2)


@pytest.mark.sweep(128)
@pytest.mark.parametrize(("dtype", "quantization"), FORMATS)
@pytest.mark.parametrize("name", FAMILIES)
def test_recorded_forward_has_bits_of_model_code(name, dtype, quantization, tmp_path, compiled, generator):
    path = write_checkpoint(tmp_path, tiny_config(name, attention_bias=True) | RECORDED.get(name, {}), std=0.1)
    model = load(path, compiled, dtype, quantization)
    plain, recorded = Cache(model), Cache(model)
    with torch.inference_mode():
        ids, batch = step_of([4, 2], generator, [0, 0])
        first, again = compiled.record_forward(
            lambda ids, batch: model.forward(ids, batch, recorded), ids, batch, MAX_TOKENS
        )
        assert torch.equal(first, model.forward(ids, batch, plain))
        around = 3 if model.architecture.layers[0].norms.before_attention is None else 4
        layers = zip(model.architecture.layers, model.layers, strict=True)
        assert len(again.calls) == around + sum(calls_of_layer(compiled, *each, dtype) for each in layers)
        assert again.calls.count("take_rows") == 2
        assert again.max_tokens == MAX_TOKENS
        starts = [0] * 9
        for lengths in STEPS:
            ids, batch = step_of(lengths, generator, starts)
            whole = model.forward(ids, batch, plain)
            assert torch.equal(again(ids, batch), whole), lengths
            for counts in (
                [0] * len(lengths),
                [1] * len(lengths),
                lengths[:1] + [0] * (len(lengths) - 1),
                [0, *lengths[1:]],
            ):
                wanted = with_outputs(batch, counts)
                assert torch.equal(again(ids, wanted), whole[wanted.outputs.rows]), (lengths, counts)
                assert torch.equal(model.forward(ids, wanted, plain), whole[wanted.outputs.rows]), (lengths, counts)
            starts = [3, 1, 2, 5, 0, 7, 1, 1, 4] if len(lengths) > 3 else [2, 0, 1] + [0] * 6
        for ours, theirs in zip(recorded.layers, plain.layers, strict=True):
            assert all(map(torch.equal, ours, theirs))


def test_experts_of_gemma4_are_recorded(tmp_path, compiled, generator):
    """The model's own code gives the same bits, so only this test sees that torch multiplies weights of experts."""
    config = tiny_config("Gemma4ForCausalLM", hidden_size_per_layer_input=0)
    model = load(write_checkpoint(tmp_path, config), compiled, "bfloat16", None)
    cache = Cache(model)
    with torch.inference_mode():
        _, again = compiled.record_forward(
            lambda *step: model.forward(*step, cache), *step_of([3], generator, [0]), MAX_TOKENS
        )
    assert again is not None


@pytest.mark.sweep(16)
@pytest.mark.parametrize("name", FAMILIES)
def test_forward_is_recorded_from_one_token_step(name, tmp_path, compiled, generator):
    """It has one row, and torch does not report the row stride of every view of it."""
    path = write_checkpoint(tmp_path, tiny_config(name, attention_bias=True) | RECORDED.get(name, {}), std=0.1)
    model = load(path, compiled, "bfloat16", None)
    plain, recorded = Cache(model), Cache(model)
    with torch.inference_mode():
        _, again = compiled.record_forward(
            lambda *step: model.forward(*step, recorded), *step_of([1], generator, [0]), MAX_TOKENS
        )
        ids, batch = step_of([5, 1, 3], generator, [0] * 3)
        assert torch.equal(again(ids, batch), model.forward(ids, batch, plain))


def test_weights_with_column_order_are_recorded(tmp_path, compiled, generator):
    model = load(write_checkpoint(tmp_path, tiny_config("LlamaForCausalLM"), std=0.1), compiled, "bfloat16", "int4")
    for layer in model.layers:
        weight = quantize_int4(torch.randn(64, 160, generator=generator))
        order = torch.randperm(160, generator=generator)
        layer.mlp.down = compiled.pack_linear(replace(weight, order=order.int()))
    plain, recorded = Cache(model), Cache(model)
    with torch.inference_mode():
        ids, batch = step_of([4, 2], generator, [0, 0])
        _, again = compiled.record_forward(lambda *step: model.forward(*step, recorded), ids, batch, MAX_TOKENS)
        ids, batch = step_of([5, 1, 3], generator, [0] * 3)
        assert torch.equal(again(ids, batch), model.forward(ids, batch, plain))


def test_measure_calls_times_each_recorded_call(tmp_path, compiled, generator):
    model = load(write_checkpoint(tmp_path, tiny_config("Qwen2ForCausalLM"), std=0.1), compiled, "bfloat16", None)
    cache = Cache(model)
    with torch.inference_mode():
        ids, batch = step_of([4, 2], generator, [0, 0])
        _, recorded = compiled.record_forward(
            lambda ids, batch: model.forward(ids, batch, cache), ids, batch, MAX_TOKENS
        )
        names = recorded.calls
        assert names[:3] == ("embedding", "rms_norm", "linear")
        assert names.count("paged_attention") == len(model.layers)
        unmeasured = recorded(ids, batch).clone()
        nanoseconds = recorded.measure_calls()
        start = time.perf_counter_ns()
        assert torch.equal(recorded(ids, batch), unmeasured)
        whole = time.perf_counter_ns() - start
        once = nanoseconds.clone()
        assert len(once) == len(names)
        assert all(took > 0 or name == "take_rows" for took, name in zip(once.tolist(), names, strict=True))
        assert int(once.sum()) <= whole
        recorded(ids, batch)
        assert bool((nanoseconds >= once).all())
        assert int(nanoseconds.sum()) > int(once.sum())


def hold_views(kernels, weights):
    """A forward pass that reads early results late, through views of tensors that it has released."""
    wide, narrow, table, ones = weights

    def forward(ids, _batch):
        x = kernels.embedding(ids, table, torch.float32)
        left, right = kernels.linear(x, wide).split_with_sizes((64, 64), dim=1)  # a view outlives its tensor
        first = kernels.linear(left, narrow)
        second = kernels.rms_norm(kernels.linear(right, narrow), ones, 1e-6)
        third = kernels.linear(kernels.linear(second, narrow), narrow)
        kernels.add_rms_norm(first, third, ones, 1e-6)
        return kernels.add_rms_norm(second, third, ones, 1e-6)

    return forward


@pytest.mark.parametrize("isa", ISAS)
def test_buffer_is_not_reused_while_referenced(isa, generator):
    kernels = compiled_kernels(isa)
    make = lambda *shape: torch.randn(*shape, generator=generator) / 8  # noqa: E731
    weights = (
        kernels.pack_linear(make(128, 64)),
        kernels.pack_linear(make(64, 64)),
        kernels.pack_linear(make(100, 64)),
        torch.ones(64),
    )
    forward = hold_views(kernels, weights)
    with torch.inference_mode():
        ids, batch = step_of([3], generator, [0])
        ids %= 100
        first, again = kernels.record_forward(forward, ids, batch, MAX_TOKENS)
        assert torch.equal(first, forward(ids, batch))
        for lengths in ([1], [7, 9], [90]):
            ids, batch = step_of(lengths, generator, [0, 0])
            ids %= 100
            assert torch.equal(again(ids, batch), forward(ids, batch))


COMPUTED = {
    "times": lambda x: x * 2,
    "in place": lambda x: x.add_(1),
    "copied": lambda x: x.unsqueeze(1).transpose(1, 2).contiguous().squeeze(2),
    "gathered": lambda x: x[torch.arange(x.shape[0])],
    "by a function": torch.nn.functional.silu,
    "made": lambda x: torch.cat([x, torch.zeros(x.shape[0], 2)], dim=1),
}


@pytest.mark.parametrize("compute", COMPUTED.values(), ids=COMPUTED)
def test_forward_with_torch_operations_is_not_recorded(compute, compiled, generator):
    table = compiled.pack_linear(torch.randn(512, 64, generator=generator))

    def forward(ids, _batch):
        return compute(compiled.embedding(ids, table, torch.float32))

    ids, batch = step_of([3], generator, [0])
    hidden, again = compiled.record_forward(forward, ids, batch, MAX_TOKENS)
    assert again is None
    assert torch.equal(hidden, forward(ids, batch))
    assert torch.equal(forward(ids, batch), hidden)  # the recorder is removed completely


def test_array_of_other_batch_is_refused(compiled, generator):
    table = compiled.pack_linear(torch.randn(512, 64, generator=generator))
    ids, batch = step_of([3], generator, [0])
    other = ids.clone()
    for array, problem in ((other, "not the batch's"), (ids[1:], "no multiple")):
        with pytest.raises(ValueError, match=problem):
            compiled.record_forward(
                lambda _ids, _batch, array=array: compiled.embedding(array, table, torch.float32),
                ids, batch, MAX_TOKENS,
            )  # fmt: skip
    assert compiled.embedding(ids, table, torch.float32).shape == (3, 64)


def test_whole_batch_attention_after_take_rows_is_refused(tmp_path, compiled, generator):
    """A replay would use the right batch instead of the one that such a pass keeps."""
    model = load(write_checkpoint(tmp_path, tiny_config("Qwen2ForCausalLM"), std=0.1), compiled, "bfloat16", None)
    cache = Cache(model)

    def forward(ids, batch):
        whole = replace(batch, outputs=None)
        return model.forward(ids, replace(batch, outputs=replace(batch.outputs, attention=whole)), cache)

    with torch.inference_mode():
        ids, batch = step_of([4, 2], generator, [0, 0])
        with pytest.raises(ValueError, match="not the batch's"):
            compiled.record_forward(forward, ids, batch, MAX_TOKENS)


def test_invalid_output_rows_raise_and_change_nothing(tmp_path, compiled, generator):
    model = load(write_checkpoint(tmp_path, tiny_config("Qwen2ForCausalLM"), std=0.1), compiled, "bfloat16", None)
    cache = Cache(model)
    with torch.inference_mode():
        ids, batch = step_of([4, 2], generator, [0, 0])
        _, again = compiled.record_forward(lambda ids, batch: model.forward(ids, batch, cache), ids, batch, MAX_TOKENS)
        before = again(ids, batch).clone()
        wanted = with_outputs(batch, [1, 1])
        for rows in ([3, 6], [-1, 5]):
            with pytest.raises(IndexError, match="output rows"):
                again(ids, replace(wanted, outputs=replace(wanted.outputs, rows=torch.tensor(rows))))
        many = replace(batch, outputs=OutputRows(torch.zeros(7, dtype=torch.int64), batch))
        with pytest.raises(IndexError, match="output rows"):
            again(ids, many)
        assert torch.equal(again(ids, batch), before)


@pytest.mark.sweep(8)
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.int8])
def test_output_rows_after_long_and_shared_contexts_have_equal_bits(tmp_path, compiled, generator, kv_dtype):
    """In the last layer, chunks compute only output rows, which share prefixes and are cut into partitions unlike
    chunks.
    """
    config = tiny_config("Qwen2ForCausalLM", num_attention_heads=4, num_key_value_heads=2)
    path = write_checkpoint(tmp_path, config, std=0.1)
    architecture = read_architecture(path)
    cpu, weights = torch.device("cpu"), FolderWeights(path)
    model = load_model(weights, architecture, compiled, dtype="bfloat16", device=cpu, max_model_len=1200)
    cache = PagedKVCache(
        architecture.kv_layout, num_blocks=[120], block_size=BLOCK_SIZE, dtype=kv_dtype, device=torch.device("cpu"),
    )  # fmt: skip
    long, shared = 1150, 160  # tokens of the first sequence, and of the prefix that the rest shares with it
    tables = torch.zeros(4, 75, dtype=torch.int32)
    tables[0] = torch.arange(75)
    for i in range(1, 4):
        tables[i, :10] = tables[0, :10]
        tables[i, 10:14] = torch.arange(75 + 4 * i, 79 + 4 * i)
    lengths, starts = [20, 12, 30, 1], [long - 20, shared, shared, shared + 3]
    token_ids = torch.randint(0, 512, (4, 1200), generator=generator)
    token_ids[1:, :shared] = token_ids[0, :shared]

    def step(counts, first):
        start = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
        rows = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
        positions = torch.arange(sum(counts)) - start[:-1].long()[rows] + torch.tensor(first)[rows]
        blocks = tables[rows, positions // BLOCK_SIZE].long()
        batch = AttentionBatch(
            query_start=start,
            seq_lens=(torch.tensor(first) + torch.tensor(counts)).int(),
            block_tables=tables[: len(counts)],
            positions=positions,
            slot_mapping=blocks * BLOCK_SIZE + positions % BLOCK_SIZE,
            block_size=BLOCK_SIZE,
        )
        return token_ids[rows, positions], batch

    with torch.inference_mode():
        model.forward(*step([long - 20], [0]), cache)
        model.forward(*step([1, 1, 1, 3], [0, shared, shared, shared]), cache)  # the last sequence's own beginning
        ids, batch = step(lengths, starts)
        whole, again = compiled.record_forward(
            lambda ids, batch: model.forward(ids, batch, cache), ids, batch, MAX_TOKENS
        )
        whole = whole.clone()
        for counts in ([1, 1, 1, 1], [0, 1, 1, 1], [1, 0, 0, 0], [3, 1, 2, 1]):
            wanted = with_outputs(batch, counts)
            assert torch.equal(again(ids, wanted), whole[wanted.outputs.rows]), counts
            assert torch.equal(model.forward(ids, wanted, cache), whole[wanted.outputs.rows]), counts


def test_id_outside_vocabulary_raises_and_changes_nothing(compiled, generator):
    table = compiled.pack_linear(torch.randn(512, 64, generator=generator))
    ids, batch = step_of([3], generator, [0])
    _, again = compiled.record_forward(
        lambda ids, _batch: compiled.embedding(ids, table, torch.float32), ids, batch, MAX_TOKENS
    )
    before = again(ids, batch).clone()
    with pytest.raises(IndexError, match="vocabulary"):
        again(torch.tensor([1, 512, 3]), batch)
    assert torch.equal(again(ids, batch), before)


def grouped(batch, num_groups):
    """Return the batch with tables and slots of further KV groups, each with other blocks."""

    def group(of, index):
        tables = (of.block_tables + 6 * index) % NUM_BLOCKS
        slots = (of.slot_mapping + 6 * index * BLOCK_SIZE) % (NUM_BLOCKS * BLOCK_SIZE)
        return replace(of, outputs=None, block_tables=tables, slot_mapping=slots)

    groups = tuple(group(batch, index) for index in range(1, num_groups))
    if batch.outputs is None:
        return replace(batch, more_groups=groups)
    rows = batch.outputs.attention
    outputs = replace(
        batch.outputs, attention=replace(rows, more_groups=tuple(group(rows, i) for i in range(1, num_groups)))
    )
    return replace(batch, more_groups=groups, outputs=outputs)


@pytest.mark.parametrize("num_groups", [1, 2, 3, 4])
def test_steps_with_one_to_four_kv_groups_are_recorded(num_groups, tmp_path, compiled, generator):
    config = tiny_config("Qwen2ForCausalLM", num_hidden_layers=num_groups)
    model = load(write_checkpoint(tmp_path, config, std=0.1), compiled, "bfloat16", None)
    for index, layer in enumerate(model.layers):
        layer.kv_group = index
    plain, recorded = Cache(model), Cache(model)
    with torch.inference_mode():
        ids, batch = step_of([4, 2], generator, [0, 0])
        _, again = compiled.record_forward(
            lambda *step: model.forward(*step, recorded), ids, grouped(batch, num_groups), MAX_TOKENS
        )
        model.forward(ids, grouped(batch, num_groups), plain)
        for lengths, counts in (([5, 1, 3], [1, 1, 1]), ([1, 1, 1], [0, 1, 1]), ([20, 1, 7], [3, 0, 1])):
            ids, batch = step_of(lengths, generator, [4, 2, 0])
            step = grouped(with_outputs(batch, counts), num_groups)
            assert torch.equal(again(ids, step), model.forward(ids, step, plain))
        for ours, theirs in zip(recorded.layers, plain.layers, strict=True):
            assert all(map(torch.equal, ours, theirs))
        with pytest.raises(ValueError, match="another number of KV groups"):
            again(ids, grouped(with_outputs(batch, [1, 1, 1]), num_groups + 1))


def test_operation_is_recorded(compiled, generator):
    table = compiled.pack_linear(torch.randn(512, 64, generator=generator))

    def forward(ids, _batch):
        x, residual = (compiled.embedding(ids, table, torch.bfloat16) for _ in range(2))
        add(compiled, x, residual, 0.5)
        return residual

    ids, batch = step_of([3], generator, [0])
    _, again = compiled.record_forward(forward, ids, batch, MAX_TOKENS)
    assert again.calls == ("embedding", "embedding", "add")
    ids, batch = step_of([20, 1, 7], generator, [0] * 3)
    assert torch.equal(again(ids, batch), forward(ids, batch))


def test_forward_with_unrecordable_kernel_is_not_recorded(compiled, generator):
    table = compiled.pack_linear(torch.randn(512, 64, generator=generator))

    def forward(ids, _batch):
        x = compiled.embedding(ids, table, torch.float32)
        soft_cap(compiled, x, 0.5)
        return x

    ids, batch = step_of([3], generator, [0])
    hidden, again = compiled.record_forward(forward, ids, batch, MAX_TOKENS)
    assert again is None
    assert torch.equal(hidden, forward(ids, batch))


def test_reference_backend_records_nothing(generator):
    kernels = ReferenceKernels()
    table = kernels.pack_linear(torch.randn(512, 64, generator=generator))
    ids, batch = step_of([3], generator, [0])
    hidden, again = kernels.record_forward(
        lambda ids, _batch: kernels.embedding(ids, table, torch.float32), ids, batch, MAX_TOKENS
    )
    assert again is None
    assert hidden.shape == (3, 64)


def test_largest_step_of_quantized_rows_has_equal_bits(fastest, generator):
    """The largest step has many times the rows of the recorded one: no write goes past the end of a buffer."""
    weight = fastest.pack_linear(quantize_int8(torch.randn(96, 64, generator=generator)))
    table = fastest.pack_linear(torch.randn(512, 64, generator=generator))

    def forward(ids, _batch):
        return fastest.linear(fastest.embedding(ids, table, torch.bfloat16), weight)

    ids, batch = step_of([1], generator, [0])
    _, again = fastest.record_forward(forward, ids, batch, MAX_TOKENS)
    ids, batch = step_of([40, 56], generator, [0, 0])
    assert torch.equal(again(ids, batch), forward(ids, batch))
