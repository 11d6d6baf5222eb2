"""Messages between ranks keep what another rank needs, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.config import DeviceConfig, EngineConfig, ModelConfig
from octavo.data.scheduler_output import BlockCopies, CachedRequestData, NewRequestData, SchedulerOutput
from octavo.models.random_weights import tiny_config, write_checkpoint
from octavo.models.registry import read_architecture
from octavo.ranks import messages
from octavo.sampling_params import SamplingParams
from octavo.worker import sampler

NEW = NewRequestData(
    "r1", [5, 6, 70_000], 2, SamplingParams(max_tokens=9, temperature=0.5, stop="end", prompt_logprobs=2, logprobs=4),
    7, 3, frozenset({4}), [[1, 2], [9]], 1, rotary_positions=[[0, 1, 2], [0, 0, 1], [0, 1, 1]],
)  # fmt: skip


def sent(message):
    return messages.decode_to_rank(messages.encode(message))


def received(message):
    return messages.decode_from_rank(messages.encode(message))


def test_launch_keeps_configuration_with_paths():
    config = EngineConfig(model=ModelConfig(model="/some/model"), device=DeviceConfig(tensor_parallel_size=3))
    launch = messages.Launch(config, 2, 3, 11, 12, "bfloat16", "int4", 4, [8, 9], "1.2.3", 30, "json")
    assert sent(launch) == launch
    assert sent(
        messages.Launch(EngineConfig(record=Path("/j")), 1, 2, 3, None, "x", None, 1, [], "", 0, "")
    ).config.record == Path("/j")


def test_answers_of_ranks_arrive_as_sent():
    for message in (messages.Loaded("kernels", "model"), messages.Failed("why"), messages.Ready("weights", "draft")):
        assert received(message) == message
    allocate = messages.Allocate([4, 5], 6, "int8", 7, 8, 2, 9, 10)
    assert sent(allocate) == allocate


def test_step_keeps_scheduled_tokens_blocks_and_scores_but_no_sampling_parameters():
    known = CachedRequestData(["r2"], [[[3]], [[]]], [12])
    scheduled = SchedulerOutput(
        41, [NEW], known, {"r1": 2, "r2": 3}, 5, finished_req_ids={"r3"}, preempted_req_ids={"r4"},
        scheduled_spec_decode_tokens={"r2": [8, 9]}, copies=BlockCopies([(0, 1, 2)], [(1, 2, 3)], [(0, 3, 4)]),
        state_saves={"r1": [(1, 5), (2, 6)]},
    )  # fmt: skip
    step = sent(messages.Step.of(6, scheduled, {"r2": [1]}))
    assert (step.number, step.sampled) == (6, {"r2": [1]})
    found = step.to_scheduled()
    assert found.step == 0
    assert (found.num_scheduled_tokens, found.total_num_scheduled_tokens) == ({"r1": 2, "r2": 3}, 5)
    assert list(found.num_scheduled_tokens) == ["r1", "r2"]
    assert found.scheduled_cached_reqs == known
    assert found.finished_req_ids == {"r3", "r4"}
    assert found.scheduled_spec_decode_tokens == {"r2": [8, 9]}
    assert found.copies == scheduled.copies
    assert found.state_saves == scheduled.state_saves
    [data] = found.scheduled_new_reqs
    for name in (
        "request_id",
        "token_ids",
        "num_prompt_tokens",
        "block_ids",
        "num_computed_tokens",
        "rotary_positions",
    ):
        assert getattr(data, name) == getattr(NEW, name), name
    assert data.sampling_params == SamplingParams(max_tokens=1, top_k=2, prompt_logprobs=2)
    assert (data.seed, data.sample_index, data.stop_token_ids) == (7, 3, frozenset())


@pytest.mark.parametrize(
    ("params", "is_simple"),
    [
        ({"temperature": 0.0}, True),
        ({"temperature": 0.7, "stop": "end", "prompt_logprobs": 2}, True),
        ({"top_k": 5}, False),
        ({"top_p": 0.9}, False),
        ({"min_p": 0.1}, False),
        ({"typical_p": 0.9}, False),
        ({"logprobs": 0}, False),
        ({"logit_bias": {3: 1.0}}, False),
        ({"min_tokens": 2}, False),
        ({"presence_penalty": 0.5}, False),
    ],
)
def test_ranks_agree_which_requests_need_all_logits(params, is_simple):
    params = SamplingParams(max_tokens=9, **params)
    data = NewRequestData("r", [1], 1, params, 5, 2, frozenset(), [[1]], 0)
    scheduled = SchedulerOutput(1, [data], CachedRequestData([], [[]], []), {"r": 1}, 1)
    [found] = sent(messages.Step.of(1, scheduled, {})).to_scheduled().scheduled_new_reqs
    assert sampler.is_simple(params) == sampler.is_simple(found.sampling_params) == is_simple
    if is_simple:
        assert (found.sampling_params.temperature, found.seed, found.sample_index) == (params.temperature, 5, 2)


@pytest.mark.parametrize("pooling", [None, "mean", "last"])
def test_step_keeps_pooling(pooling):
    data = NewRequestData("r", [1], 1, SamplingParams(max_tokens=1, pooling=pooling), 0, 0, frozenset(), [[1]], 0)
    scheduled = SchedulerOutput(1, [data], CachedRequestData([], [[]], []), {"r": 1}, 1)
    [found] = sent(messages.Step.of(1, scheduled, {})).to_scheduled().scheduled_new_reqs
    assert found.sampling_params.pooling == pooling


def test_messages_cannot_be_changed():
    scheduled = SchedulerOutput(1, [NEW], CachedRequestData([], [[]], []), {"r1": 1}, 1)
    step = messages.Step.of(1, scheduled, {})
    others = [
        messages.Loaded("", ""),
        messages.Failed(""),
        messages.Ready("weights", "draft"),
        messages.Allocate([], 0, "", 0, 0, 0, 0, 0),
    ]
    launch = messages.Launch(EngineConfig(), 1, 2, 3, None, "", None, 1, [], "", 0, "")
    for message in (step, step.new[0], launch, *others):
        name = next(iter(message.__struct_fields__), "anything")
        with pytest.raises(AttributeError):
            setattr(message, name, None)


def test_digest_differs_for_other_configurations(tmp_path):
    digests = set()
    for index, size in enumerate((48, 96)):
        config = tiny_config("Qwen3ForCausalLM", intermediate_size=size)
        digests.add(messages.model_digest(read_architecture(write_checkpoint(tmp_path / str(index), config, std=0.1))))
    assert len(digests) == 2
