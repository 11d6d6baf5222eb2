"""News of the core become outputs: texts, stop strings, log probabilities, metrics, and failures of one request."""

from __future__ import annotations

import itertools
import logging

import pytest
from fakes import EOS, ByteTokenizer

from octavo.data.model_output import TokenLogprobs
from octavo.engine.output_processor import OutputProcessor, TokenTexts
from octavo.outputs import EngineCoreOutput, ErrorCode, Logprob
from octavo.runtime.faults import request_failed
from octavo.sampling_params import RequestOutputKind, SamplingParams

FINAL, DELTA, CUMULATIVE = RequestOutputKind.FINAL_ONLY, RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE
PROMPT = [104, 105]


class Answering:
    """A processor with one request `r` that has streams `r-0` and `r-1`. The clock counts its calls from 100."""

    def __init__(self, *, tokenizer=None, num_streams=1, **params):
        clock = itertools.count(100)
        self.processor = OutputProcessor(tokenizer or ByteTokenizer(), lambda: float(next(clock)))
        self.streams = [f"r-{index}" for index in range(num_streams)]
        self.add("r", self.streams, **params)

    def add(self, request_id, streams, **params):
        params = SamplingParams(**{"n": len(streams), "output_kind": CUMULATIVE, **params})
        self.processor.add_request(request_id, streams, "hi", PROMPT, params, arrival_time=50.0)

    def process(self, *news):
        return self.processor.process([*news])

    def step(self, text="", *, stream="r-0", **news):
        """Process one piece of news; return the request's output, or None."""
        outputs = self.process(said(text, stream=stream, **news)).request_outputs
        return outputs[0] if outputs else None


def said(text="", *, stream="r-0", **news):
    return EngineCoreOutput(stream, [*text.encode()] if isinstance(text, str) else text, **news)


def logprobs_of(text):
    return [TokenLogprobs([byte, EOS], [-1.0, -2.0], 3) for byte in text.encode()]


def test_token_texts_are_cached_and_cleared_when_full(monkeypatch):
    monkeypatch.setattr("octavo.engine.output_processor._NUM_TEXTS", 2)
    asked = []
    texts = TokenTexts(lambda token_id: asked.append(token_id) or str(token_id))
    assert [texts[each] for each in (1, 2, 1, 2)] == ["1", "2", "1", "2"]
    assert asked == [1, 2]
    assert (texts[3], dict(texts)) == ("3", {3: "3"})


def test_decode_and_piece_work_without_request():
    processor = Answering().processor
    assert processor.decode([*b"ab", EOS]) == "ab"
    assert processor.decode([*b"ab", EOS], skip_special_tokens=False) == "ab<eos>"
    assert processor.decode([0xC3]) == "\ufffd"
    assert [processor.piece(each) for each in (97, 0xC3, EOS)] == ["a", b"\xc3", "<eos>"]


def test_text_is_empty_without_tokenizer():
    processor = OutputProcessor(None, lambda: 0.0)
    assert (processor.decode([1, 2]), processor.piece(1)) == ("", "")


@pytest.mark.parametrize(
    ("params", "text"),
    [({}, "ab"), ({"skip_special_tokens": False}, "<eos>ab"), ({"shown_special_token_ids": [EOS]}, "<eos>ab"),
     ({"detokenize": False}, "")],
)  # fmt: skip
def test_special_token_and_detokenize_options_select_text(params, text):
    answering = Answering(**params)
    assert answering.step([EOS, *b"ab"]).outputs[0].text == text
    own = answering.processor.tokenizer
    assert (answering.processor.tokenizer_of(SamplingParams(**params)) is own) == ("shown" not in str(params))


@pytest.mark.parametrize(
    ("kind", "texts"), [(CUMULATIVE, ["a", "abc", "abcd"]), (DELTA, ["a", "bc", "d"]), (FINAL, [None, None, "abcd"])]
)
def test_output_contents_follow_output_kind(kind, texts):
    answering = Answering(output_kind=kind, logprobs=1)
    outputs = [
        answering.step(text, new_logprobs=logprobs_of(text), finish_reason=end)
        for text, end in (("a", None), ("bc", None), ("d", "length"))
    ]
    assert [each and each.outputs[0].text for each in outputs] == texts
    for output, text in zip(outputs, texts, strict=True):
        if text is not None:
            [completion] = output.outputs
            assert completion.token_ids == [*text.encode()]
            assert completion.logprobs == [
                {byte: Logprob(-1.0, 3, chr(byte)), EOS: Logprob(-2.0, 1, "<eos>")} for byte in text.encode()
            ]
    assert (outputs[-1].finished, outputs[-1].outputs[0].cumulative_logprob) == (True, -4.0)
    assert (outputs[-1].prompt, outputs[-1].prompt_token_ids, outputs[-1].request_id) == ("hi", PROMPT, "r")
    assert "r" not in answering.processor


def test_emitted_output_is_not_mutated_later():
    answering = Answering(logprobs=1)
    first = answering.step("a", new_logprobs=logprobs_of("a"))
    answering.step("b", new_logprobs=logprobs_of("b"))
    assert len(first.outputs[0].logprobs) == len(first.outputs[0].token_ids) == 1
    assert not first.finished


def test_cumulative_logprob_is_none_without_logprobs():
    [completion] = Answering().step("a").outputs
    assert (completion.logprobs, completion.cumulative_logprob) == (None, None)


def test_prompt_logprobs_come_from_first_stream():
    answering = Answering(num_streams=2, prompt_logprobs=1)
    [entry] = logprobs_of("i")
    output = answering.process(
        said("a", new_prompt_logprobs=[entry]), said("b", stream="r-1", new_prompt_logprobs=[entry])
    ).request_outputs[0]
    assert output.prompt_logprobs == [None, {105: Logprob(-1.0, 3, "i"), EOS: Logprob(-2.0, 1, "<eos>")}]
    assert Answering().step("a").prompt_logprobs is None


def test_incomplete_character_is_flushed_at_end():
    answering = Answering()
    assert answering.step([0xC3]).outputs[0].text == ""
    assert answering.step(finish_reason="abort").outputs[0].text == "\ufffd"
    assert Answering().step([97, 0xC3], finish_reason="length").outputs[0].text == "a\ufffd"


def test_incomplete_character_is_held_while_no_token_arrives():
    answering = Answering()
    assert [answering.step(text).outputs[0].text for text in ([0xC3], [], [0xA9])] == ["", "", "é"]


def test_detokenizer_is_finished_once():
    class Marking(ByteTokenizer):
        def incremental_detokenizer(self, prompt_token_ids, *, skip_special_tokens):
            inner = super().incremental_detokenizer(prompt_token_ids, skip_special_tokens=skip_special_tokens)
            inner.finish = lambda: "!"
            return inner

    assert Answering(tokenizer=Marking()).step("ab", finish_reason="length").outputs[0].text == "ab!"
    answering = Answering(tokenizer=Marking())
    assert answering.step("ab").outputs[0].text == "ab"
    assert answering.step(finish_reason="length").outputs[0].text == "ab!"


@pytest.mark.parametrize(("include", "text"), [(False, "ab"), (True, "abc")])
def test_stop_token_is_hidden_unless_include_stop_str_in_output(include, text):
    params = {"stop_token_ids": [99], "include_stop_str_in_output": include}
    [completion] = Answering(**params).step("abc", finish_reason="stop", stop_reason=99).outputs
    assert (completion.text, completion.token_ids) == (text, [97, 98, 99])
    assert (completion.finish_reason, completion.stop_reason) == ("stop", 99)
    assert Answering(**params).step("abc", finish_reason="length").outputs[0].text == "abc"


@pytest.mark.parametrize(("include", "text"), [(False, "a"), (True, "aST")])
def test_stop_string_ends_output_at_its_token(include, text):
    answering = Answering(stop=["ST"], include_stop_str_in_output=include)
    held = answering.step("aS")
    assert (held.outputs[0].text, held.finished) == ("a", False)
    processed = answering.process(said("Tbcd", num_draft_tokens=4, num_accepted_tokens=3))
    [output] = processed.request_outputs
    assert (output.outputs[0].text, output.outputs[0].token_ids) == (text, [*b"aST"])
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", "ST")
    assert (processed.streams_to_stop, processed.streams_to_fail, output.finished) == (["r-0"], [], True)
    metrics = output.metrics
    assert (metrics.num_wasted_tokens, metrics.num_draft_tokens, metrics.num_accepted_tokens) == (3, 4, 1)
    assert answering.process(said("more")).request_outputs == []


def test_stop_string_inside_piece_cuts_off_rest():
    class Long(ByteTokenizer):
        """A tokenizer with pieces of three characters."""

        def incremental_detokenizer(self, prompt_token_ids, *, skip_special_tokens):
            inner = super().incremental_detokenizer(prompt_token_ids, skip_special_tokens=skip_special_tokens)
            inner.add = lambda token_ids: "".join(chr(each) * 2 + "." for each in token_ids)
            return inner

    [completion] = Answering(tokenizer=Long(), stop=["b"]).step("ab").outputs
    assert completion.text == "aa."
    [completion] = Answering(tokenizer=Long(), stop=["b"], include_stop_str_in_output=True).step("ab").outputs
    assert completion.text == "aa.b"


def test_stream_ended_by_core_is_not_stopped_again():
    answering = Answering(stop=["ST"])
    processed = answering.process(said("aST", finish_reason="length"))
    assert (processed.streams_to_stop, processed.request_outputs[0].outputs[0].finish_reason) == ([], "stop")


def test_stop_string_counts_only_after_min_tokens():
    answering = Answering(stop=["S"], min_tokens=2)
    assert answering.step("aS").outputs[0].text == "aS"
    assert answering.step("bS").outputs[0].text == "aSb"


def test_text_held_for_stop_string_is_flushed_at_end():
    answering = Answering(stop=["ST"], output_kind=DELTA)
    assert answering.step("aS").outputs[0].text == "a"
    assert answering.step(finish_reason="length").outputs[0].text == "S"


def test_streams_of_request_finish_independently():
    answering = Answering(num_streams=2)
    assert answering.processor.stream_ids("r") == ["r-0", "r-1"]
    assert answering.processor.stream_ids("other") == []
    output = answering.step("a", finish_reason="length")
    assert (output.finished, [each.finish_reason for each in output.outputs]) == (False, ["length", None])
    assert [each.index for each in output.outputs] == [0, 1]
    assert answering.processor.stream_ids("r") == ["r-1"]
    assert answering.process(said("b")).request_outputs == []
    assert answering.step("b", stream="r-1", finish_reason="stop").finished
    assert answering.processor.stream_ids("r") == []


def test_each_request_of_step_gets_one_output():
    answering = Answering(num_streams=2)
    answering.add("s", ["s-0"])
    outputs = answering.process(said("a"), said("x", stream="s-0"), said("b", stream="r-1")).request_outputs
    assert [(each.request_id, [one.text for one in each.outputs]) for each in outputs] == [
        ("r", ["a", "b"]), ("s", ["x"]),
    ]  # fmt: skip


def test_metrics_record_each_time_once():
    answering = Answering()
    assert answering.step(admitted_time=60.0).metrics.first_token_time is None
    answering.step("a", admitted_time=61.0)  # at 101
    answering.step("b")
    metrics = answering.step("c", finish_reason="length").metrics
    times = (metrics.arrival_time, metrics.first_scheduled_time, metrics.first_token_time, metrics.finished_time)
    assert times == (50.0, 60.0, 101.0, 103.0)


def test_computed_tokens_are_summed_and_recomputed_ones_counted():
    answering = Answering(num_streams=2)
    answering.step("abc", num_cached_tokens=1, num_computed_tokens=4)  # 2 + 3 - 1 are needed, of which 1 was found
    answering.step("x", stream="r-1", num_computed_tokens=1, num_cached_tokens=1)
    answering.step(num_computed_tokens=7, num_cached_tokens=0, finish_reason="length")
    output = answering.step("y", stream="r-1", num_computed_tokens=2, num_cached_tokens=0, finish_reason="length")
    assert (output.metrics.num_computed_tokens, output.metrics.num_recomputed_tokens) == (7 + 2, 4)
    assert output.num_cached_tokens == 1
    aborted = Answering().step("ab", num_computed_tokens=1, finish_reason="abort").metrics
    assert (aborted.num_computed_tokens, aborted.num_recomputed_tokens) == (1, 0)
    plain = Answering().step("ab", num_computed_tokens=3, finish_reason="length").metrics
    assert (plain.num_computed_tokens, plain.num_recomputed_tokens) == (3, 0)


def test_draft_counts_are_summed_over_steps():
    answering = Answering()
    answering.step("abc", num_draft_tokens=4, num_accepted_tokens=2)
    metrics = answering.step("d", num_draft_tokens=3, num_accepted_tokens=0).metrics
    assert (metrics.num_draft_tokens, metrics.num_accepted_tokens) == (7, 2)


def test_first_error_is_kept_and_engine_error_names_request():
    answering = Answering(num_streams=2)
    assert answering.step("a").error is None
    assert answering.step(error="too late", finish_reason="error").error == "too late"
    assert answering.step(stream="r-1", error="later", finish_reason="error").error == "too late"
    assert Answering().step(error=ErrorCode.REQUEST_FAILED, finish_reason="error").error == request_failed("r")


def test_pooled_vector_is_kept_in_output():
    answering = Answering()
    assert answering.step(pooled=b"vector").pooled == b"vector"
    assert answering.step(finish_reason="stop").pooled == b"vector"


class Breaking(ByteTokenizer):
    """Fails at the letter x, and when the letter y is decoded."""

    def incremental_detokenizer(self, prompt_token_ids, *, skip_special_tokens):
        inner = super().incremental_detokenizer(prompt_token_ids, skip_special_tokens=skip_special_tokens)
        add = inner.add

        def broken(token_ids):
            if ord("x") in token_ids:
                raise ValueError("x")
            return add(token_ids)

        inner.add = broken
        return inner


def test_detokenizer_fault_fails_only_its_request(caplog):
    answering = Answering(tokenizer=Breaking(), num_streams=2)
    answering.add("s", ["s-0"])
    answering.step("a", finish_reason="length")
    with caplog.at_level(logging.ERROR):
        processed = answering.process(said("x", stream="r-1"), said("b", stream="s-0"))
    assert "request r failed while its answer was made" in caplog.text
    assert (processed.streams_to_fail, processed.streams_to_stop) == (["r-1"], [])
    failed, other = processed.request_outputs
    assert (failed.request_id, failed.finished, failed.error) == (
        "r",
        True,
        request_failed("r"),
    )
    assert [each.finish_reason for each in failed.outputs] == ["length", "error"]
    assert (other.outputs[0].text, other.error) == ("b", None)
    assert "r" not in answering.processor
    assert "s" in answering.processor
    assert answering.process(said("c", stream="r-1")).request_outputs == []


def test_fault_in_output_creation_fails_only_its_request(caplog, monkeypatch):
    answering = Answering(num_streams=2)
    answering.add("s", ["s-0"])
    emit = OutputProcessor._emit

    def broken(processor, state, now):
        if state.request_id == "r":
            raise ValueError("r")
        return emit(processor, state, now)

    monkeypatch.setattr(OutputProcessor, "_emit", broken)
    processed = answering.process(said("a"), said("b", stream="s-0"))
    assert processed.streams_to_fail == ["r-0", "r-1"]
    failed, other = processed.request_outputs
    assert (failed.prompt, failed.prompt_token_ids, failed.finished) == ("hi", PROMPT, True)
    assert [(each.index, each.text, each.token_ids, each.finish_reason) for each in failed.outputs] == [
        (0, "", [], "error"), (1, "", [], "error"),
    ]  # fmt: skip
    assert (failed.error, failed.metrics.arrival_time) == (request_failed("r"), 50.0)
    assert other.outputs[0].text == "b"
    assert "r" not in answering.processor
    assert answering.process(said("c"), said("c", stream="r-1")).request_outputs == []


def test_interrupt_is_not_treated_as_request_fault(monkeypatch):
    answering = Answering()
    monkeypatch.setattr(OutputProcessor, "_append", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        answering.step("a")


def test_forget_all_drops_every_request():
    answering = Answering(num_streams=2)
    answering.add("s", ["s-0"])
    assert answering.processor.forget_all() == ["r", "s"]
    assert "r" not in answering.processor
    assert answering.process(said("a"), said("b", stream="s-0")).request_outputs == []
    assert answering.processor.forget_all() == []
