from __future__ import annotations

import sys

import pytest
from fakes import EOS, TEXT, ByteTokenizer, FakeExecutor, answer_text, make_engine

from octavo.engine.engine_core import EngineCore
from octavo.engine.input_processor import draw_seed
from octavo.errors import PromptTooLongError, RequestError
from octavo.sampling_params import RequestOutputKind, SamplingParams


def run(engine) -> dict[str, list]:
    """Return all outputs of every request, in order."""
    outputs: dict[str, list] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


def assert_idle(engine) -> None:
    manager = engine.core.scheduler.kv_cache_manager
    assert manager.pool.num_free_blocks == manager.pool.num_blocks
    assert manager.num_tracked_requests == 0
    assert not engine.output_processor._states
    assert engine.core.executor._rows == {}


def test_batch_returns_text_of_each_prompt():
    engine = make_engine()
    results = engine.generate_batch(["one", "three"], SamplingParams(max_tokens=10))
    assert [output.outputs[0].text for output in results.values()] == [answer_text(3, 0, 10), answer_text(5, 0, 10)]
    assert all(output.finished and output.outputs[0].finish_reason == "length" for output in results.values())
    run(engine)
    assert_idle(engine)


def test_batch_accepts_different_max_tokens():
    engine = make_engine(max_num_seqs=3)
    lengths = [1, 30, 2, 17, 8]
    params = [SamplingParams(max_tokens=length) for length in lengths]
    results = engine.generate_batch(["x" * (index + 1) for index in range(5)], params)
    assert [len(output.outputs[0].token_ids) for output in results.values()] == lengths


def test_generate_stops_at_eos():
    output = make_engine().generate("hello", SamplingParams(max_tokens=200))
    assert output.outputs[0].text == answer_text(5)
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].token_ids[-1] == EOS
    assert output.prompt == "hello"


@pytest.mark.parametrize("max_tokens", [1, 2, 15, 16, 17])
def test_generate_returns_exactly_max_tokens(max_tokens):
    output = make_engine().generate("hello", SamplingParams(max_tokens=max_tokens))
    assert len(output.outputs[0].token_ids) == max_tokens


def test_batch_texts_equal_sequential_texts():
    prompts = ["x" * (1 + 7 * index) for index in range(12)]
    params = SamplingParams(max_tokens=40)
    batch = make_engine(max_num_seqs=5, max_num_batched_tokens=32).generate_batch(prompts, params)
    sequential = [make_engine(max_num_seqs=1).generate(prompt, params) for prompt in prompts]
    assert [o.outputs[0].text for o in batch.values()] == [o.outputs[0].text for o in sequential]


def test_default_max_tokens_is_16():
    assert len(make_engine().generate("hello").outputs[0].token_ids) == 16


def test_max_tokens_none_generates_up_to_max_model_len():
    output = make_engine(max_model_len=40).generate("hello", SamplingParams(max_tokens=None, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 35
    assert output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_logprobs_fit_every_output_kind_and_sent_ones_are_freed(kind):
    engine, params = make_engine(), SamplingParams(max_tokens=9, n=2, logprobs=2, output_kind=kind)
    engine.add_request("a", "hello", params)
    sent, counts = [[], []], []
    while engine.has_unfinished_requests():
        for output in engine.step():
            for index, completion in enumerate(output.outputs):
                counts.append(len(completion.logprobs))
                so_far = sent[index] if kind is RequestOutputKind.DELTA else []
                sent[index] = [*so_far, *zip(completion.token_ids, completion.logprobs, strict=True)]
        if kind is RequestOutputKind.DELTA and engine.has_unfinished_requests():
            held = {sys.getrefcount(pair[1]) for pair in sent[0][:-1]}
            assert held <= {2}, "its pair and this call hold it, and nothing of the engine"
    assert [len(each) for each in sent] == [9, 9]
    for token_id, entry in (pair for each in sent for pair in each):
        assert entry[token_id].rank == 1
        assert len(entry) == 2
    assert kind is not RequestOutputKind.DELTA or max(counts) == 1
    assert_idle(engine)


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_streamed_outputs_add_up_to_complete_text(kind):
    engine = make_engine()
    engine.add_request("a", "hello", SamplingParams(max_tokens=60, n=2, output_kind=kind, stop=["zz"]))
    outputs = run(engine)["a"]
    for index in range(2):
        pieces = [output.outputs[index] for output in outputs]
        text = "".join(p.text for p in pieces) if kind is RequestOutputKind.DELTA else pieces[-1].text
        deltas = [token_id for p in pieces for token_id in p.token_ids]
        tokens = deltas if kind is RequestOutputKind.DELTA else pieces[-1].token_ids
        assert text == answer_text(5, index, 60)
        assert len(tokens) == 60
    assert [output.finished for output in outputs].count(True) == 1
    assert outputs[-1].finished
    assert kind is not RequestOutputKind.FINAL_ONLY or len(outputs) == 1
    assert_idle(engine)


def test_stop_string_ends_request_and_frees_blocks():
    engine = make_engine()
    whole = answer_text(5)
    stop = whole[12:17]
    engine.add_request("a", "hello", SamplingParams(max_tokens=70, stop=[stop]))
    engine.add_request("b", "other prompt", SamplingParams(max_tokens=5))
    outputs = run(engine)
    last = outputs["a"][-1].outputs[0]
    assert last.text == whole[: whole.index(stop)]
    assert (last.finish_reason, last.stop_reason) == ("stop", stop)
    assert all(last.text.startswith(output.outputs[0].text) for output in outputs["a"])
    assert outputs["b"][-1].outputs[0].text == answer_text(12, 0, 5)
    assert_idle(engine)


def test_include_stop_str_in_output_keeps_stop_string():
    engine = make_engine()
    params = SamplingParams(max_tokens=70, stop="brown", include_stop_str_in_output=True)
    text = engine.generate("x" * len(TEXT.encode()), params).outputs[0].text
    assert text == TEXT[: TEXT.index("brown") + 5]


def test_stop_token_ends_output_after_min_tokens():
    engine = make_engine()
    first = answer_text(5)
    token = ord(first[4])
    output = engine.generate("hello", SamplingParams(max_tokens=50, stop_token_ids=[token])).outputs[0]
    assert (output.finish_reason, output.stop_reason) == ("stop", token)
    assert output.text == first[: first.index(chr(token))]
    later = engine.generate("hello", SamplingParams(max_tokens=50, stop_token_ids=[token], min_tokens=20)).outputs[0]
    assert len(later.token_ids) > 20


def test_logprobs_are_delivered_with_their_tokens():
    output = make_engine().generate("hello", SamplingParams(max_tokens=6, logprobs=2, prompt_logprobs=1))
    completion = output.outputs[0]
    assert len(completion.logprobs) == 6
    for token_id, entry in zip(completion.token_ids, completion.logprobs, strict=True):
        assert entry[token_id].rank == 1
        assert len(entry) == 2
    assert completion.cumulative_logprob == pytest.approx(-0.25 * 6)
    assert output.prompt_logprobs[0] is None
    assert [ord("hello"[i]) in entry for i, entry in enumerate(output.prompt_logprobs) if entry] == [True] * 4


@pytest.mark.parametrize("after_steps", [0, 1, 3])
def test_abort_yields_exactly_one_final_output(after_steps):
    engine = make_engine()
    engine.add_request("a", "hello", SamplingParams(max_tokens=100, n=2))
    engine.add_request("b", "hello there", SamplingParams(max_tokens=8))
    for _ in range(after_steps):
        engine.step()
    engine.abort_request("a")
    engine.abort_request(["a", "unknown"])
    outputs = run(engine)
    assert [output.finished for output in outputs["a"]] == [True]
    assert {completion.finish_reason for completion in outputs["a"][0].outputs} == {"abort"}
    assert outputs["b"][-1].outputs[0].text == answer_text(11, 0, 8)
    assert_idle(engine)


def test_f20_failed_step_ends_only_its_requests():
    executor = FakeExecutor()
    engine = make_engine(executor, max_num_seqs=1)
    engine.add_request("a", "hello", SamplingParams(max_tokens=5))
    engine.add_request("b", "hello", SamplingParams(max_tokens=5))
    executor.fail_next = True
    outputs = run(engine)
    assert outputs["a"][-1].outputs[0].finish_reason == "error"
    assert outputs["a"][-1].error
    assert outputs["b"][-1].outputs[0].text == answer_text(5, 0, 5)
    assert_idle(engine)


@pytest.mark.parametrize(
    ("prompt", "params", "parameter"),
    [
        ("", None, "prompt"),
        ([], None, "prompt"),
        ([1, 2, 300], None, "prompt"),
        ([1, -1], None, "prompt"),
        ([1, True], None, "prompt"),
        ({"text": "x"}, None, "prompt"),
        (17, None, "prompt"),
        ("x" * 200, None, "prompt"),
        ("x", SamplingParams(logit_bias={257: 1.0}), "logit_bias"),
        ("x", SamplingParams(stop_token_ids=[1000]), "stop_token_ids"),
        ("x", SamplingParams(allowed_token_ids=[257]), "allowed_token_ids"),
    ],
)
def test_invalid_requests_are_refused_and_change_nothing(prompt, params, parameter):
    engine = make_engine(max_model_len=200)
    with pytest.raises(RequestError) as caught:
        engine.add_request("a", prompt, params)
    assert caught.value.parameter == parameter
    assert not engine.has_unfinished_requests()
    assert engine.generate("hello", SamplingParams(max_tokens=3)).outputs[0].text == answer_text(5, 0, 3)
    run(engine)
    assert_idle(engine)


def test_refused_stream_removes_its_siblings():
    engine = make_engine(max_num_waiting=2)
    with pytest.raises(RequestError, match="queue is full"):
        engine.add_request("a", "hello", SamplingParams(n=3))
    assert "a" not in engine.output_processor
    assert engine.core.scheduler.get_num_unfinished_requests() == 0
    engine.add_request("a", "hello", SamplingParams(n=2, max_tokens=2))
    assert len(run(engine)["a"][-1].outputs) == 2


def test_request_id_in_use_is_refused():
    engine = make_engine()
    engine.add_request("a", "hello", SamplingParams(max_tokens=3))
    with pytest.raises(RequestError, match="in use"):
        engine.add_request("a", "hello")
    assert len(run(engine)["a"]) == 3


def test_one_invalid_prompt_refuses_entire_batch():
    engine = make_engine()
    with pytest.raises(RequestError):
        engine.generate_batch(["good", ""], SamplingParams(max_tokens=3))
    run(engine)
    assert_idle(engine)


def test_seeds_depend_on_engine_seed_and_arrival_number():
    seeds = {draw_seed(engine_seed, arrival) for engine_seed in range(10) for arrival in range(100)}
    assert len(seeds) == 1000
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert draw_seed(0, 0) == draw_seed(0, 0)


def test_empty_step_does_not_reach_executor():
    engine = make_engine()
    assert isinstance(engine.core, EngineCore)
    assert engine.step() == []
    assert engine.core.executor.num_steps == 0


@pytest.mark.parametrize("salt", ["", "x" * 2000, "\ud800", 3])
def test_invalid_cache_salt_is_refused(salt):
    engine = make_engine()
    with pytest.raises(RequestError) as caught:
        engine.add_request("a", "hello", cache_salt=salt)
    assert caught.value.parameter == "cache_salt"
    assert engine.generate("hello", SamplingParams(max_tokens=3)).finished


def test_sampling_params_may_change_until_request_is_added():
    params = SamplingParams(max_tokens=3)
    params.max_tokens = 5
    engine = make_engine()
    engine.add_request("a", "hello", params)
    params.max_tokens = 1
    assert len(run(engine)["a"][-1].outputs[0].token_ids) == 5
    params.max_tokens = 0
    with pytest.raises(RequestError, match="max_tokens"):
        engine.add_request("b", "hello", params)


def test_engine_serves_again_after_interrupt(monkeypatch):
    executor = FakeExecutor()
    engine = make_engine(executor, max_num_seqs=2)
    submit = executor.submit

    def interrupted(scheduled) -> None:
        monkeypatch.setattr(executor, "submit", submit)
        raise KeyboardInterrupt

    for _ in range(5):
        engine.add_request("a", "hello", SamplingParams(max_tokens=20))
        engine.add_request("b", "hello you", SamplingParams(max_tokens=3))
        engine.step()
        monkeypatch.setattr(executor, "submit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        outputs = run(engine)
        assert {name: news[-1].outputs[0].finish_reason for name, news in outputs.items()} == {
            "a": "error",
            "b": "error",
        }
        assert_idle(engine)
    assert engine.generate("hello", SamplingParams(max_tokens=4)).outputs[0].text == answer_text(5, 0, 4)


def test_interrupted_batch_removes_all_its_requests(monkeypatch):
    executor = FakeExecutor()
    engine = make_engine(executor, max_num_seqs=2)
    submit = executor.submit

    def interrupted(scheduled) -> None:
        if scheduled.step == 3:
            raise KeyboardInterrupt
        submit(scheduled)

    monkeypatch.setattr(executor, "submit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.generate_batch(["a", "b", "c"], SamplingParams(max_tokens=20))
    run(engine)
    assert_idle(engine)
    assert len(engine.generate_batch(["a", "b"], SamplingParams(max_tokens=3))) == 2


def test_timed_out_request_fails_and_other_request_continues():
    engine = make_engine(FakeExecutor(step_s=0.01), max_num_seqs=2)
    engine.add_request("slow", "hello", SamplingParams(max_tokens=60), timeout_s=0.1)
    engine.add_request("other", "hello", SamplingParams(max_tokens=20), tenant="b")
    finished = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                finished[output.request_id] = output
    assert "deadline" in (finished["slow"].error or "")
    assert finished["other"].outputs[0].finish_reason == "length"


@pytest.mark.parametrize("timeout_s", [0, -1.0, float("nan"), "soon", True])
def test_timeout_s_must_be_number_above_zero(timeout_s):
    with pytest.raises(RequestError, match="timeout_s"):
        make_engine().add_request("a", "hello", SamplingParams(), timeout_s=timeout_s)


def test_text_that_cannot_fit_is_refused_without_tokenizing(monkeypatch):
    engine = make_engine(max_model_len=100)
    encoded = []
    monkeypatch.setattr(ByteTokenizer, "encode", lambda _self, text, **_: encoded.append(text) or [1])
    with pytest.raises(PromptTooLongError, match="too long: 2000 characters, and 100 tokens are 500 at most") as caught:
        engine.add_request("a", "x" * 2000)
    assert caught.value.parameter == "prompt"
    assert not encoded
    monkeypatch.setattr(ByteTokenizer, "longest_token_chars", 50)
    engine.add_request("b", "x" * 2000)
    assert encoded == ["x" * 2000]
