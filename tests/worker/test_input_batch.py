from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from octavo.data.scheduler_output import CachedRequestData, NewRequestData, SchedulerOutput
from octavo.sampling_params import SamplingParams
from octavo.worker.input_batch import InputBatch


def new_data(
    request_id: str,
    token_ids: list[int],
    block_ids: list[int],
    num_computed: int = 0,
    params: SamplingParams | None = None,
    more_block_ids: tuple[list[int], ...] = (),
) -> NewRequestData:
    params = params or SamplingParams()
    return NewRequestData(
        request_id, token_ids, len(token_ids), params, 0, 0, frozenset(), [block_ids, *more_block_ids], num_computed
    )


def told(batch, req_ids, sampled, new_block_ids, num_computed, *more_block_ids):
    """Report sampled tokens to the batch; return the requests' changes for the next step."""
    batch.append_sampled(dict(zip(req_ids, sampled, strict=True)))
    return CachedRequestData(req_ids, [new_block_ids, *more_block_ids], num_computed)


def make_output(new=(), cached=None, counts=None, finished=(), preempted=()) -> SchedulerOutput:
    counts = counts or {}
    return SchedulerOutput(
        1,
        list(new),
        cached or CachedRequestData.make_empty(),
        counts,
        sum(counts.values()),
        set(finished),
        set(preempted),
    )


@pytest.fixture
def batch():
    return InputBatch(
        max_num_seqs=4,
        max_model_len=64,
        block_size=4,
    )


def test_new_input_batch_is_empty_with_fixed_table_shapes(batch):
    assert batch.requests == {}
    assert batch.token_ids.shape == (4, 65)
    assert batch.block_tables[0].shape == (4, 16)


def test_prepare_inputs_fills_rows_of_new_requests(batch):
    scheduled = make_output(
        [new_data("a", [10, 11, 12, 13, 14], [3, 5]), new_data("b", [20, 21], [0])], counts={"a": 5, "b": 2}
    )
    batch.update(scheduled)
    inputs = batch.prepare_inputs(scheduled)
    assert inputs.token_ids.tolist() == [10, 11, 12, 13, 14, 20, 21]
    assert inputs.attention.positions.tolist() == [0, 1, 2, 3, 4, 0, 1]
    assert inputs.attention.slot_mapping.tolist() == [12, 13, 14, 15, 20, 0, 1]
    assert inputs.attention.query_start.tolist() == [0, 5, 7]
    assert inputs.attention.seq_lens.tolist() == [5, 2]
    assert inputs.attention.block_tables[0].tolist() == [3, 5]
    assert inputs.attention.block_tables[1, 0] == 0
    assert inputs.sampled == [0, 1]
    assert inputs.logits_indices is None  # all rows of hidden states are used
    outputs = inputs.attention.outputs
    assert outputs.rows.tolist() == [4, 6]  # the sampled rows are used
    assert outputs.attention.positions.tolist() == [4, 1]
    assert outputs.attention.slot_mapping.tolist() == [20, 1]
    assert outputs.attention.query_start.tolist() == [0, 1, 2]
    assert outputs.attention.seq_lens.tolist() == [5, 2]
    assert outputs.attention.block_tables.tolist() == inputs.attention.block_tables.tolist()


@pytest.mark.parametrize("asked", [{"prompt_logprobs": 0}, {"pooling": "mean", "max_tokens": 1}])
def test_prompt_logprobs_and_mean_pooling_output_all_prompt_rows(batch, asked):
    new = [
        new_data("a", [10, 11, 12, 13, 14], [3, 5]),
        new_data("b", [20, 21, 22, 23], [0], params=SamplingParams(**asked)),
        new_data("c", [30, 31, 32], [7]),
    ]
    scheduled = make_output(new, counts={"a": 4, "b": 3, "c": 3})
    batch.update(scheduled)
    inputs = batch.prepare_inputs(scheduled)
    assert [request.request_id for request in inputs.requests] == ["a", "b", "c"]
    assert inputs.sampled == [2]
    assert inputs.output_start.tolist() == [0, 0, 3, 4]
    assert inputs.logits_indices.tolist() == [3]
    outputs = inputs.attention.outputs
    assert outputs.rows.tolist() == [4, 5, 6, 9]
    assert outputs.attention.positions.tolist() == [0, 1, 2, 2]
    assert outputs.attention.query_start.tolist() == [0, 3, 4]
    assert outputs.attention.seq_lens.tolist() == [3, 3]
    assert outputs.attention.block_tables[:, 0].tolist() == [0, 7]


def test_step_without_sampled_request_has_no_outputs(batch):
    scheduled = make_output([new_data("a", list(range(6)), [0, 1])], counts={"a": 4})
    batch.update(scheduled)
    inputs = batch.prepare_inputs(scheduled)
    assert (inputs.sampled, inputs.sampled_rows.tolist(), inputs.output_start.tolist()) == ([], [], [0, 0])
    assert inputs.attention.outputs.rows.tolist() == []
    assert inputs.attention.outputs.attention.query_start.tolist() == [0]


def test_prepare_inputs_feeds_sampled_token_of_cached_request(batch):
    batch.update(make_output([new_data("a", [10, 11, 12], [2])], counts={"a": 3}))
    cached = told(batch, ["a"], [[13]], [[]], [3])
    scheduled = make_output(cached=cached, counts={"a": 1})
    batch.update(scheduled)
    inputs = batch.prepare_inputs(scheduled)
    assert inputs.token_ids.tolist() == [13]
    assert inputs.attention.positions.tolist() == [3]  # num_computed_tokens, not the length after appending
    assert inputs.attention.slot_mapping.tolist() == [11]
    assert inputs.attention.seq_lens.tolist() == [4]
    assert inputs.attention.outputs is None, "all rows"
    cached = told(batch, ["a"], [[14]], [[7]], [4])
    scheduled = make_output(cached=cached, counts={"a": 1})
    batch.update(scheduled)
    assert batch.prepare_inputs(scheduled).attention.slot_mapping.tolist() == [28]


def test_sampled_tokens_are_appended_if_a_request_has_none(batch):
    """Two tokens of one request and none of another one are as many as the requests."""
    batch.update(make_output([new_data("a", [10], [0]), new_data("b", [20], [1])]))
    batch.append_sampled({"a": [], "b": [21, 22]})
    assert batch.known_tokens(batch.requests["a"]).tolist() == [10]
    assert batch.known_tokens(batch.requests["b"]).tolist() == [20, 21, 22]


def test_prepare_inputs_orders_longer_chunk_before_decode(batch):
    batch.update(make_output([new_data("a", [10, 11], [1])], counts={"a": 2}))
    scheduled = make_output(
        [new_data("b", list(range(30, 39)), [4, 5, 6], num_computed=4)],
        told(batch, ["a"], [[12]], [[]], [2]),
        {"a": 1, "b": 3},
    )
    batch.update(scheduled)
    inputs = batch.prepare_inputs(scheduled)
    assert inputs.token_ids.tolist() == [34, 35, 36, 12]  # b's chunk is longer
    assert inputs.attention.positions.tolist() == [4, 5, 6, 2]
    assert inputs.attention.slot_mapping.tolist() == [20, 21, 22, 6]
    assert [request.request_id for request in inputs.requests] == ["b", "a"]
    assert inputs.sampled == [1]  # b's prompt is not fully computed
    assert inputs.sampled_rows.tolist() == [batch.requests["a"].row]
    assert inputs.logits_indices is None
    assert inputs.attention.outputs.rows.tolist() == [3]


def test_drafts_follow_newest_token_of_request(batch):
    """Requests with zero, two and one draft, and a prompt with logprobs for all rows."""
    new = [new_data("a", [10, 11], [1]), new_data("b", [20, 21, 22], [2]), new_data("c", [30], [3])]
    batch.update(make_output(new, counts={"a": 2, "b": 3, "c": 1}))
    scored = new_data("d", [40, 41, 42], [4], params=SamplingParams(prompt_logprobs=0))
    cached = told(batch, ["a", "b", "c"], [[12], [23], [31]], [[], [5], []], [2, 3, 1])
    scheduled = make_output([scored], cached, {"a": 1, "b": 3, "c": 2, "d": 3})
    scheduled.scheduled_spec_decode_tokens.update(b=[24, 25], c=[32])
    batch.update(scheduled)
    inputs = batch.prepare_inputs(scheduled)
    assert [request.request_id for request in inputs.requests] == ["b", "d", "c", "a"]
    assert inputs.token_ids.tolist() == [23, 24, 25, 40, 41, 42, 31, 32, 12]
    assert inputs.attention.positions.tolist() == [3, 4, 5, 0, 1, 2, 1, 2, 2]
    assert inputs.attention.slot_mapping.tolist() == [11, 20, 21, 16, 17, 18, 13, 14, 6]
    assert inputs.output_start.tolist() == [0, 3, 6, 8, 9]
    assert inputs.sampled == [0, 1, 2, 3]
    assert inputs.cu_num_logits.tolist() == [0, 3, 4, 6, 7]
    rows = [batch.requests[name].row for name in "bbbdcca"]
    assert inputs.sampled_rows.tolist() == rows
    assert inputs.num_known.tolist() == [4, 5, 6, 3, 2, 3, 3]
    assert inputs.logits_indices.tolist() == [0, 1, 2, 5, 6, 7, 8]  # only the last of d's rows
    assert batch.input_tokens(inputs).tolist() == [23, 24, 25, 42, 31, 32, 12]
    assert batch.known_tokens(batch.requests["b"]).tolist() == [20, 21, 22, 23], "drafts are not known"


@pytest.fixture
def windowed():
    return InputBatch(
        max_num_seqs=4, max_model_len=64, block_size=4, num_scratch_blocks=1,
        num_groups=2,
    )  # fmt: skip


def test_window_group_has_separate_block_table_and_slots(windowed):
    batch = windowed
    new = [
        new_data("a", list(range(10, 20)), [3, 5, 6], num_computed=8, more_block_ids=([-1, 2, 7],)),
        new_data("b", [20, 21, 22], [0], more_block_ids=([4],)),
    ]
    scheduled = make_output(new, counts={"a": 2, "b": 2})
    batch.update(scheduled)
    attention = batch.prepare_inputs(scheduled).attention
    of_all, near = attention.of_group(0), attention.of_group(1)
    assert of_all is attention
    assert near.positions is attention.positions
    assert of_all.slot_mapping.tolist() == [0, 1, 24, 25]
    assert near.slot_mapping.tolist() == [16, 17, 28, 29]
    assert of_all.block_tables.tolist() == [[0, 0, 0], [3, 5, 6]]
    assert near.block_tables.tolist() == [[4, 0, 0], [-1, 2, 7]]
    of_outputs = attention.outputs.attention
    assert attention.outputs.rows.tolist() == [3]
    assert (of_outputs.slot_mapping.tolist(), of_outputs.block_tables.tolist()) == ([25], [[3, 5, 6]])
    near = of_outputs.of_group(1)
    assert (near.slot_mapping.tolist(), near.block_tables.tolist()) == ([29], [[-1, 2, 7]])


def test_four_kv_groups_have_separate_block_tables_and_slots():
    batch = InputBatch(max_num_seqs=2, max_model_len=64, block_size=4, num_groups=4)
    new = [
        new_data("a", [10, 11, 12, 13, 14], [3, 5], more_block_ids=([2, 7], [8, 1], [-1, 9])),
        new_data("b", [20, 21], [6], more_block_ids=([4], [3], [2])),
    ]
    scheduled = make_output(new, counts={"a": 5, "b": 1})
    batch.update(scheduled)
    attention = batch.prepare_inputs(scheduled).attention
    wanted, groups = attention.outputs.attention, range(4)
    assert [attention.of_group(group).block_tables.tolist() for group in groups] == [
        [[3, 5], [6, 0]], [[2, 7], [4, 0]], [[8, 1], [3, 0]], [[-1, 9], [2, 0]],
    ]  # fmt: skip
    assert [attention.of_group(group).slot_mapping.tolist()[-2:] for group in groups] == [
        [20, 24], [28, 16], [4, 12], [36, 8],
    ]  # fmt: skip
    assert [wanted.of_group(group).slot_mapping.tolist() for group in groups] == [[20], [28], [4], [36]]
    assert all(attention.of_group(group).positions is attention.positions for group in groups)


def test_window_blocks_may_be_added_in_different_steps(windowed):
    batch = windowed
    batch.update(make_output([new_data("a", [10, 11, 12], [2, 9], more_block_ids=([1],))], counts={"a": 3}))
    cached = told(batch, ["a"], [[13, 14]], [[]], [3], [[5]])
    scheduled = make_output(cached=cached, counts={"a": 2})
    batch.update(scheduled)
    attention = batch.prepare_inputs(scheduled).attention
    assert attention.slot_mapping.tolist() == [11, 36]
    assert attention.of_group(1).slot_mapping.tolist() == [7, 20]
    batch.update(make_output([new_data("a", [9, 8], [4], more_block_ids=([6],))], finished=["a"]))
    row = batch.requests["a"].row
    assert batch.num_blocks[:, row].tolist() == [1, 1]
    assert batch.block_tables[1][row, 0] == 6


def test_missing_window_blocks_of_request_raise_error(windowed):
    """A table that is not updated would be read as if it were right."""
    batch = windowed
    new = [new_data(name, [10, 11, 12], [2 + row], more_block_ids=([row],)) for row, name in enumerate("ab")]
    batch.update(make_output(new, counts={"a": 3, "b": 3}))
    cached = told(batch, ["a", "b"], [[13], [14]], [[], []], [3, 3], [[5]])
    with pytest.raises(ValueError, match="zip"):
        batch.update(make_output(cached=cached, counts={"a": 1, "b": 1}))


def test_batch_without_windows_has_one_block_table(batch):
    scheduled = make_output([new_data("a", [10, 11, 12, 13, 14], [3, 5])], counts={"a": 5})
    batch.update(scheduled)
    attention = batch.prepare_inputs(scheduled).attention
    assert attention.more_groups == attention.outputs.attention.more_groups == ()
    assert attention.of_group(1) is attention


def test_drafts_use_scratch_blocks_after_request_blocks(windowed):
    """A separate cache of the draft model has no window blocks; a shared one uses scratch window blocks."""
    batch = windowed
    batch.update(make_output([new_data("a", [10, 11, 12], [2, 9], more_block_ids=([1],))], counts={"a": 3}))
    rows = np.array([batch.requests["a"].row])
    batch.write_scratch_blocks(rows, [np.array([[50]]), np.array([[60]])])
    guesses = np.array([3]), np.array([2]), np.array([0, 1])
    _, attention, _ = batch.gather(rows, *guesses, num_groups=2)
    assert attention.slot_mapping.tolist() == [11, 36]
    assert attention.of_group(1).slot_mapping.tolist() == [7, 240]
    _, attention, _ = batch.gather(rows, *guesses, num_groups=1)
    assert attention.slot_mapping.tolist() == [11, 36]
    assert attention.more_groups == attention.outputs.attention.more_groups == ()
    _, attention, _ = batch.gather(rows, np.array([8]), np.array([1]), np.array([0, 1]), num_groups=1)
    assert attention.slot_mapping.tolist() == [200]


def test_rejected_draft_is_removed_from_known_tokens(batch):
    batch.update(make_output([new_data("a", [10, 11], [1])], counts={"a": 2}))
    scheduled = make_output(cached=told(batch, ["a"], [[12]], [[2]], [2]), counts={"a": 4})
    scheduled.scheduled_spec_decode_tokens["a"] = [13, 99, 98]
    batch.update(scheduled)
    batch.prepare_inputs(scheduled)
    scheduled = make_output(cached=told(batch, ["a"], [[13, 14]], [[]], [4]), counts={"a": 1})
    batch.update(scheduled)
    inputs = batch.prepare_inputs(scheduled)
    assert (inputs.token_ids.tolist(), inputs.attention.positions.tolist()) == ([14], [4])
    assert batch.known_tokens(batch.requests["a"]).tolist() == [10, 11, 12, 13, 14]


def test_requests_with_equal_first_block_are_adjacent(batch):
    first_blocks = {"a": 3, "b": 1, "c": 3, "d": 1}
    new = [new_data(name, [10, 11], [block]) for name, block in first_blocks.items()]
    scheduled = make_output(new, counts=dict.fromkeys(first_blocks, 2))
    batch.update(scheduled)
    inputs = batch.prepare_inputs(scheduled)
    assert [request.request_id for request in inputs.requests] == ["b", "d", "a", "c"]
    assert inputs.attention.block_tables[:, 0].tolist() == [1, 1, 3, 3]
    assert inputs.logits_indices is None
    assert inputs.attention.outputs.rows.tolist() == [1, 3, 5, 7]


def test_every_prompt_token_is_fed_once(batch):
    scheduled = make_output([new_data("a", list(range(6)), [0, 1])], counts={"a": 4})
    batch.update(scheduled)
    fed = batch.prepare_inputs(scheduled).token_ids.tolist()
    scheduled = make_output(cached=told(batch, ["a"], [[]], [[]], [4]), counts={"a": 2})
    batch.update(scheduled)
    fed += batch.prepare_inputs(scheduled).token_ids.tolist()
    scheduled = make_output(cached=told(batch, ["a"], [[50]], [[]], [6]), counts={"a": 1})
    batch.update(scheduled)
    fed += batch.prepare_inputs(scheduled).token_ids.tolist()
    assert fed == [0, 1, 2, 3, 4, 5, 50]


def test_finished_and_preempted_requests_free_their_rows(batch):
    for round_ in range(5):
        names = [f"{round_}{index}" for index in range(4)]
        batch.update(make_output([new_data(name, [1, 2], [0]) for name in names]))
        assert len(batch.requests) == 4
        finished, preempted = names[:2], names[2:]
        batch.update(make_output(finished=[*finished, "never heard of"], preempted=preempted))
        assert batch.requests == {}


def test_request_id_may_finish_and_return_in_one_step(batch):
    batch.update(make_output([new_data("a", [1, 2, 3], [0])]))
    batch.update(make_output([new_data("a", [9], [2])], finished=["a"]))
    assert batch.known_tokens(batch.requests["a"]).tolist() == [9]
    assert np.count_nonzero(batch.num_blocks) == 1


def test_multidimensional_positions_continue_after_prompt():
    batch = InputBatch(max_num_seqs=2, max_model_len=16, block_size=4, num_groups=2, num_position_dims=2)
    image = new_data("a", [10, 11, 11, 11, 12], [3, 5], more_block_ids=([2, 7],))
    image = replace(image, rotary_positions=[[0, 1, 1, 2, 3], [0, 1, 2, 1, 3]])
    scheduled = make_output([image, new_data("b", [20, 21], [6], more_block_ids=([4],))], counts={"a": 5, "b": 1})
    batch.update(scheduled)
    attention = batch.prepare_inputs(scheduled).attention
    expected = [[0, 1, 1, 2, 3, 0], [0, 1, 2, 1, 3, 0]]
    assert [attention.of_group(group).rotary_positions.tolist() for group in range(2)] == [expected] * 2
    assert attention.outputs.attention.rotary_positions.tolist() == [[3], [3]]
    batch.append_sampled({"a": [13]})
    cached = CachedRequestData(["a", "b"], [[[], []], [[], []]], [5, 1])
    scheduled = make_output([], cached=cached, counts={"a": 1, "b": 1})
    batch.update(scheduled)
    positions = batch.prepare_inputs(scheduled).attention.rotary_positions
    assert sorted(map(tuple, positions.T.tolist())) == [(1, 1), (4, 4)]
    with pytest.raises(ValueError, match="positions of 3 dimensions, not of 2"):
        batch.add_request(replace(image, request_id="c", rotary_positions=[[0] * 5] * 3))
    assert set(batch.requests) == {"a", "b"}
