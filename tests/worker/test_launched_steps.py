"""Steps launched before the previous one is collected give outputs that are equal (`==`) to those of single steps."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from kernel_backends import COMPILED, compiled_kernels
from late_queue import LateQueue

from octavo.data.scheduler_output import (
    BlockCopies,
    CachedRequestData,
    KVTransfer,
    NewRequestData,
    SchedulerOutput,
    TransferDirection,
)
from octavo.kernels.reference import ReferenceKernels
from octavo.models.loader import load_model
from octavo.models.random_weights import tiny_config, write_checkpoint
from octavo.models.registry import read_architecture
from octavo.models.weight_source import FolderWeights
from octavo.sampling_params import SamplingParams, StructuredOutputsParams
from octavo.worker import model_runner
from octavo.worker.host_copies import PinnedMemory
from octavo.worker.kv_cache import PagedKVCache
from octavo.worker.model_runner import ModelRunner

SAVE = KVTransfer(1, TransferDirection.SAVE, [b"key"], [0])
CPU = torch.device("cpu")
BLOCK_SIZE, MAX_MODEL_LEN, MAX_NUM_SEQS = 16, 48, 3
NUM_BLOCKS = MAX_MODEL_LEN // BLOCK_SIZE


@pytest.fixture(scope="module")
def kernels():
    """Kernels with rows that do not depend on the batch; plain torch may differ in the last bit on some processors."""
    return compiled_kernels("portable", num_threads=1) if COMPILED else ReferenceKernels()


@pytest.fixture(scope="module")
def model(tmp_path_factory, kernels):
    config = tiny_config("Qwen3ForCausalLM", hidden_size=32, head_dim=16, num_hidden_layers=1, vocab_size=64)
    path = write_checkpoint(tmp_path_factory.mktemp("tiny"), config, std=0.3)
    return load_model(
        FolderWeights(path), read_architecture(path), kernels=kernels, dtype="float32", device=CPU,
        max_model_len=MAX_MODEL_LEN,
    )  # fmt: skip


@pytest.fixture
def make_runner(model, kernels, monkeypatch):
    """Return a function that makes a runner on a device that copies late; the device has the queue `queue`."""

    def make(**options):
        queue = LateQueue()
        monkeypatch.setattr(model_runner, "create_host_copies", lambda device: PinnedMemory(device, queue))
        cache = PagedKVCache(
            model.architecture.kv_layout, num_blocks=[9], block_size=BLOCK_SIZE, dtype=torch.float32, device=CPU
        )
        runner = ModelRunner(
            model, kernels, cache, max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=64,
            max_model_len=MAX_MODEL_LEN, **options,
        )  # fmt: skip
        return runner, queue

    return make


@dataclass
class Core:
    """Decides the steps: each request has a third of the blocks from its start."""

    steps: list[SchedulerOutput] = field(default_factory=list)
    num_computed: dict[str, int] = field(default_factory=dict)
    places: dict[str, int] = field(default_factory=dict)

    def decide(self, counts, new=(), finished=(), **more):
        """new: (id, prompt, params) of each new request of this step."""
        for name in finished:
            self.places.pop(name), self.num_computed.pop(name)
        data = []
        for name, prompt, params in new:
            place = self.places[name] = min({0, 1, 2} - set(self.places.values()))
            blocks = list(range(place * NUM_BLOCKS, (place + 1) * NUM_BLOCKS))
            self.num_computed[name] = 0
            data.append(NewRequestData(name, prompt, len(prompt), params, place + 5, 0, frozenset({7}), [blocks], 0))
        cached = [name for name in counts if name not in {each.request_id for each in data}]
        told = CachedRequestData(cached, [[[] for _ in cached]], [self.num_computed[name] for name in cached])
        for name, count in counts.items():
            self.num_computed[name] += count
        total = sum(counts.values())
        self.steps.append(
            SchedulerOutput(
                len(self.steps) + 1, data, told, dict(counts), total, finished_req_ids=set(finished), **more
            )
        )
        return self


def one_by_one(runner, steps):
    return [runner.execute(step) for step in steps]


def ahead(runner, steps, queue):
    """Launch each step before the previous one is collected, if allowed; return the outputs, and the number launched
    ahead.
    """
    outputs, launched, num_ahead = [], None, 0
    for step in steps:
        if launched is not None and runner.needs_sampled_tokens(step):
            outputs.append(runner.collect(launched))
            launched = None
        num_ahead += launched is not None
        num_waits = queue.num_waits
        following = runner.launch(step)
        assert queue.num_waits == num_waits, "a launch waited for the device"
        chosen = following.chosen
        assert chosen is None or queue.is_host(chosen.to_read), "to read it would be to wait for all that is enqueued"
        if launched is not None:
            outputs.append(runner.collect(launched))
        launched = following
    return [*outputs, runner.collect(launched)], num_ahead


PLAIN = [
    {"temperature": 0.0},
    {"temperature": 1.0, "top_k": 20},
    {"temperature": 1.0, "logprobs": 3},
    {"temperature": 0.0, "min_tokens": 4},
    {"temperature": 1.0, "logit_bias": {5: 3.0, 9: -2.0}},
    {"temperature": 1.0, "allowed_token_ids": list(range(30, 50))},
    {"temperature": 1.0, "prompt_logprobs": 2},
]


def params_of(asked):
    return SamplingParams(max_tokens=20, **asked)


def decodes(asked, number=8):
    """Three requests that decode; the first one has the parameters `asked`."""
    core = Core()
    first = ("a", [3, 4, 5, 6, 8], params_of(asked))
    others = [("b", [9, 8], params_of({"temperature": 1.0})), ("c", [20, 21, 22], params_of({"temperature": 0.0}))]
    core.decide({"a": 5, "b": 2, "c": 2}, [first, *others])  # c's prompt is cut
    for _ in range(number):
        core.decide({"a": 1, "b": 1, "c": 1})
    return core.steps


@pytest.mark.parametrize("asked", PLAIN, ids=str)
def test_sampled_tokens_are_fed_on_device_before_collect(make_runner, asked):
    steps = decodes(asked)
    expected = one_by_one(make_runner()[0], steps)
    outputs, num_ahead = ahead(*_with_queue(make_runner, steps))
    assert outputs == expected
    assert num_ahead == len(steps) - 1
    assert len({token for output in outputs for token in output.sampled_token_ids["a"]}) > 2


def test_decode_step_copies_to_device_once(make_runner):
    """It copies once more if other requests are sampled than in the step before."""
    core = Core()
    requests = [(name, [3, 4, number], params_of({"temperature": 1.0})) for number, name in enumerate("abc")]
    core.decide({"a": 3, "b": 2, "c": 3}, requests)  # b's prompt is cut
    for names in ("abc", "abc", "abc", "ac", "ac"):
        core.decide(dict.fromkeys(names, 1))
    runner, queue = make_runner()
    launched, counts = None, []
    for step in core.steps:
        before = queue.num_to_device
        following = runner.launch(step)
        counts.append(queue.num_to_device - before)
        if launched is not None:
            runner.collect(launched)
        launched = following
    assert counts == [2, 2, 1, 1, 2, 1]


def _with_queue(make_runner, steps):
    runner, queue = make_runner()
    return runner, steps, queue


@pytest.mark.parametrize(
    "asked",
    [
        {"repetition_penalty": 5.0, "logit_bias": {41: 100.0, 42: 60.0}},
        {"frequency_penalty": 2.0, "allowed_token_ids": [41, 42, 43]},
    ],
    ids=["repetition", "frequency"],
)
def test_requests_with_penalties_wait_for_sampled_tokens(make_runner, monkeypatch, asked):
    steps = decodes({"temperature": 0.0, **asked}, number=16)
    expected = one_by_one(make_runner()[0], steps)
    outputs, num_ahead = ahead(*_with_queue(make_runner, steps))
    assert outputs == expected
    assert num_ahead == 0
    monkeypatch.setattr(ModelRunner, "needs_sampled_tokens", lambda *_: False)
    outputs, _ = ahead(*_with_queue(make_runner, steps))
    assert outputs != expected, "it does not hang on the rule"


def test_step_waits_only_for_tokens_that_its_requests_need(make_runner):
    """A request waits only for its own needs, and not after its end."""
    runner, _ = make_runner()
    form = params_of({"structured_outputs": StructuredOutputsParams(regex="a+")})
    penalized = params_of({"repetition_penalty": 2.0})
    core = Core()
    core.decide(
        {"a": 2, "b": 2, "c": 2}, [("a", [3, 4], params_of({})), ("b", [3, 4, 5], penalized), ("c", [1] * 9, form)]
    )
    core.decide({"a": 1, "b": 1})
    first = runner.launch(core.steps[0])
    step = core.steps[1]
    assert not runner.needs_sampled_tokens(step)
    second = runner.launch(step)
    assert runner.needs_sampled_tokens(step), "b's first token is awaited"
    runner.collect(first)
    assert runner.needs_sampled_tokens(step)
    runner.collect(second)
    assert not runner.needs_sampled_tokens(step)
    for changes in (
        {"preempted_req_ids": {"a"}},
        {"copies": BlockCopies(block_copies=[(0, 1, 2)])},
        {"kv_cancels": [1]},
        {"kv_transfers": [SAVE]},
    ):
        assert runner.needs_sampled_tokens(core.decide({}, **changes).steps[-1])
    third = runner.launch(core.decide({"b": 1}).steps[-1])
    assert runner.needs_sampled_tokens(step)
    fourth = runner.launch(core.decide({"a": 1}, finished=["b"]).steps[-1])
    assert not runner.needs_sampled_tokens(step)
    assert runner.collect(third).sampled_token_ids == {}, "b has left"
    assert set(runner.collect(fourth).sampled_token_ids) == {"a"}


def test_row_and_id_are_reused_while_last_step_is_in_flight(make_runner):
    """a ends and is computed once more in vain. Its row and its id belong to other requests before that result is
    read.
    """
    greedy = params_of({"temperature": 0.0})
    core = Core()
    core.decide({"a": 4, "b": 2}, [("a", [3, 4, 5, 6], greedy), ("b", [9, 8], greedy)])
    core.decide({"a": 1, "b": 1})
    core.decide({"b": 1, "d": 2}, [("d", [11, 12, 13], greedy)], finished=["a"])
    core.decide({"a": 3, "b": 1, "d": 1}, [("a", [30, 31, 32], greedy)])
    core.decide({"a": 1, "d": 1})
    core.decide({"a": 1, "b": 1, "d": 1})  # b was not in the step before
    core.decide({"b": 1, "e": 2}, [("e", [40, 41], greedy)], finished=["a", "d"])
    core.decide({"e": 1, "b": 1})
    expected = one_by_one(make_runner()[0], core.steps)
    runner, queue = make_runner()
    outputs, num_ahead = ahead(runner, core.steps, queue)
    assert num_ahead == len(core.steps) - 1
    for output, names in ((expected[1], ["a"]), (expected[5], ["a", "d"])):
        for name in names:
            del output.sampled_token_ids[name]  # computed in vain
    assert outputs == expected
    assert runner.batch.num_awaited.tolist() == [0, 0, 0]


def test_failed_row_returns_no_further_tokens(make_runner):
    """b's logits are NaN in the third step. It is computed once more, in vain, after token 0."""
    steps = decodes({"temperature": 1.0, "logprobs": 1}, number=6)

    def broken():
        runner, queue = make_runner()
        compute, sample, fed = runner._compute_logits, runner.sample, []

        def break_one(step, inputs, hidden):
            fed.append(step.inputs.token_ids.tolist())

            def logits_of(hidden):
                logits = compute(hidden)
                if step.scheduled.step == 3:
                    logits[[inputs.requests[i].request_id for i in inputs.sampled].index("b")] = torch.nan
                return logits

            runner._compute_logits = logits_of
            sample(step, inputs, hidden)

        runner.sample = break_one
        return runner, queue, fed

    expected = one_by_one(broken()[0], steps[:3])
    assert expected[2].errors == {"b": "the logits are NaN"}
    runner, queue, fed = broken()
    outputs, _ = ahead(runner, steps, queue)
    assert outputs[:3] == expected
    assert fed[3][1] == 0, "the choice was -1"
    whole = one_by_one(make_runner()[0], steps)
    for output, of_all in zip(outputs[3:], whole[3:], strict=True):
        assert output.errors == {}
        assert output.sampled_token_ids == {name: of_all.sampled_token_ids[name] for name in "ac"}
        assert output.logprobs == of_all.logprobs


def test_launched_steps_return_pooled_states_of_their_step(make_runner):
    """Hidden states are in memory that the next step overwrites."""
    core = Core()
    mean, last = (SamplingParams(max_tokens=1, pooling=pooling) for pooling in ("mean", "last"))
    prompt = np.arange(20, 40).tolist()
    core.decide({"a": 8, "b": 20, "c": 3}, [("a", prompt, mean), ("b", prompt, last), ("c", [5, 6, 7], params_of({}))])
    core.decide({"a": 7, "c": 1})
    core.decide({"a": 5, "c": 1}, finished=["b"])
    core.decide({"c": 1})
    core.decide({"c": 1}, finished=["a"])
    expected = one_by_one(make_runner()[0], core.steps)
    outputs, num_ahead = ahead(*_with_queue(make_runner, core.steps))
    assert outputs == expected
    assert num_ahead == len(core.steps) - 1
    assert [set(each.pooled) for each in outputs] == [{"b"}, set(), {"a"}, set(), set()]
