"""Requests of Dynamo as sampling parameters, and outputs as Dynamo's chunks."""

from __future__ import annotations

import pytest

from octavo.dynamo.requests import Chunks, sampling_params
from octavo.errors import RequestError
from octavo.outputs import CompletionOutput, Logprob, RequestOutput
from octavo.sampling_params import RequestOutputKind, SamplingParams


def test_options_of_all_three_groups_are_read():
    request = {
        "token_ids": [1],
        "sampling_options": {"temperature": 0.5, "top_k": 3, "seed": 7, "n": 2, "best_of": 2, "min_p": None},
        "stop_conditions": {"max_tokens": 9, "min_tokens": 2, "stop": ["x"], "stop_token_ids_hidden": [5]},
        "output_options": {"logprobs": 2, "prompt_logprobs": 0, "skip_special_tokens": True},
    }
    assert sampling_params(request, {}) == SamplingParams(
        temperature=0.5,
        top_k=3,
        seed=7,
        n=2,
        max_tokens=9,
        min_tokens=2,
        stop_token_ids=[5],
        logprobs=2,
        prompt_logprobs=0,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


def test_defaults_hold_where_a_request_gives_nothing():
    request = {"token_ids": [1], "sampling_options": {"temperature": None}, "stop_conditions": None}
    params = sampling_params(request, {"temperature": 0.7, "top_p": 0.9})
    assert (params.temperature, params.top_p, params.max_tokens) == (0.7, 0.9, None)
    params = sampling_params({"sampling_options": {"top_p": 0.1}}, {"top_p": 0.9, "max_tokens": 5})
    assert (params.top_p, params.max_tokens) == (0.1, 5)


def test_guided_decoding_becomes_structured_outputs():
    params = sampling_params({"sampling_options": {"guided_decoding": {"json": {"type": "object"}, "regex": None}}}, {})
    assert params.structured_outputs is not None
    assert params.structured_outputs.kind == "json"


@pytest.mark.parametrize(
    "request_",
    [
        {"sampling_options": {"use_beam_search": True}},
        {"sampling_options": {"length_penalty": 2.0}},
        {"sampling_options": {"guided_decoding": {"structural_tag": {"x": 1}}}},
        {"stop_conditions": {"max_thinking_tokens": 4}},
        {"sampling_options": {"n": 2, "best_of": 3}},
        {"sampling_options": {"best_of": 2}},
        {"sampling_options": {"temperature": -1}},
    ],
)
def test_unsupported_options_are_refused(request_):
    with pytest.raises(RequestError):
        sampling_params(request_, {})


def output(*completions: CompletionOutput, finished: bool = False, **more) -> RequestOutput:
    return RequestOutput("r", None, [1, 2, 3], list(completions), finished, **more)


def test_last_chunk_has_usage_of_all_choices():
    chunks = Chunks()
    assert chunks.of(output(CompletionOutput(0, "", [7]), CompletionOutput(1, "", []))) == [
        {"index": 0, "token_ids": [7]}
    ]
    first = CompletionOutput(0, "", [8], finish_reason="stop")
    assert chunks.of(output(first, CompletionOutput(1, "", [9]))) == [
        {"index": 0, "token_ids": [8], "finish_reason": "stop"},
        {"index": 1, "token_ids": [9]},
    ]
    ended = CompletionOutput(0, "", [], finish_reason="stop")
    last = chunks.of(
        output(ended, CompletionOutput(1, "", [], finish_reason="abort"), finished=True, num_cached_tokens=2)
    )
    usage = {
        "prompt_tokens": 3,
        "completion_tokens": 3,
        "total_tokens": 6,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    assert last == [{"index": 1, "token_ids": [], "finish_reason": "cancelled", "completion_usage": usage}]


def test_log_probabilities_are_listed_by_position():
    found = [{7: Logprob(-0.5, 1, "a"), 8: Logprob(-2.0, 2, "b")}]
    (chunk,) = Chunks().of(output(CompletionOutput(0, "", [7], logprobs=found)))
    assert chunk["log_probs"] == [-0.5]
    assert chunk["top_logprobs"] == [
        [
            {"rank": 1, "token_id": 7, "token": "a", "logprob": -0.5},
            {"rank": 2, "token_id": 8, "token": "b", "logprob": -2.0},
        ]
    ]


def test_log_probabilities_of_prompt_come_with_last_chunk():
    found = [None, {7: Logprob(-0.5, 1, "a")}]
    completion = CompletionOutput(0, "", [7], finish_reason="length")
    (chunk,) = Chunks().of(output(completion, finished=True, prompt_logprobs=found))
    entry = {"logprob": -0.5, "rank": 1, "decoded_token": "a"}
    assert chunk["engine_data"] == {"prompt_logprobs": [None, {"7": entry}]}
