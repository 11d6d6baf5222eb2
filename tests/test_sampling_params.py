from __future__ import annotations

import math

import numpy as np
import pytest

from octavo.errors import RequestError
from octavo.sampling_params import SamplingParams, StructuredOutputsParams


def test_sampling_defaults_equal_vllm():
    params = SamplingParams()
    assert (params.n, params.max_tokens, params.temperature, params.top_p, params.top_k) == (1, 16, 1.0, 1.0, 0)
    assert params.logprobs is None
    assert not params.is_greedy


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("n", [0, -1, 129, 1.5, True, "2"]),
        ("max_tokens", [0, -3, 2.5, True]),
        ("min_tokens", [-1, 17, 0.5]),
        ("temperature", [-0.1, math.nan, math.inf, "hot", True]),
        ("top_k", [-2, 1.5]),
        ("top_p", [False, -0.1, 1.1, math.nan]),
        ("min_p", [-0.1, 1.1, math.nan]),
        ("typical_p", [0.0, 1.1, math.nan]),
        ("seed", [2**64, -(2**63) - 1, 1.0, "x"]),
        ("presence_penalty", [-2.1, 2.1, math.nan]),
        ("frequency_penalty", [-2.1, 2.1, math.inf]),
        ("repetition_penalty", [0.0, -1.0, math.nan]),
        ("logprobs", [-1, 21, 1.0]),
        ("prompt_logprobs", [-1, 21]),
        ("num_speculative_tokens", [-1, 33, 1.0, True, "4"]),
        ("stop", ["", ["a", ""], ["x" * 1025], [3], ["a"] * 65, 3]),
        ("stop_token_ids", [[-1], [1.5], 7]),
        ("shown_special_token_ids", [[-1], [1.5], 7]),
        ("logit_bias", [{-1: 0.0}, {1: math.nan}, {1: 101.0}, [7], np.array([1, 2])]),
        ("allowed_token_ids", [[], [-4], 7]),
        ("ignore_eos", [None, 2, "yes"]),
        ("detokenize", [None, 0.5]),
        ("skip_special_tokens", [None, "no"]),
        ("include_stop_str_in_output", [None, -1]),
    ],
)
def test_out_of_range_sampling_value_is_refused_with_field_name(field, values):
    for value in values:
        with pytest.raises(RequestError) as caught:
            SamplingParams(**{field: value})
        assert caught.value.parameter == field
        assert field in str(caught.value)


def test_structured_outputs_with_pooling_are_refused():
    structure = StructuredOutputsParams(json_object=True)
    with pytest.raises(RequestError, match="pooling generates no tokens: remove structured_outputs") as caught:
        SamplingParams(pooling="last", max_tokens=1, structured_outputs=structure)
    assert caught.value.parameter == "pooling"


def test_sampling_params_convert_numpy_numbers():
    params = SamplingParams(
        n=np.int64(2),
        max_tokens=np.int32(5),
        temperature=np.float32(0.5),
        top_p=np.float64(0.9),
        seed=np.uint64(2**64 - 1),
        stop_token_ids=np.array([3, 4]),
        allowed_token_ids=(np.int64(5),),
        logit_bias={np.int64(7): np.float16(1.5)},
        ignore_eos=np.True_,
        detokenize=1,
    )
    assert params == SamplingParams(
        n=2,
        max_tokens=5,
        temperature=0.5,
        top_p=0.9,
        seed=2**64 - 1,
        stop_token_ids=[3, 4],
        allowed_token_ids=[5],
        logit_bias={7: 1.5},
        ignore_eos=True,
    )
    assert {type(value) for value in (params.ignore_eos, params.detokenize)} == {bool}
    assert {type(value) for value in (params.n, params.max_tokens, params.seed, *params.stop_token_ids)} == {int}
    assert {type(value) for value in (params.temperature, params.top_p, *params.logit_bias.values())} == {float}
    with pytest.raises(RequestError, match="temperature"):
        SamplingParams(temperature=np.float64("nan"))


def test_limit_values_are_accepted_and_normalized():
    SamplingParams(n=128, temperature=100.0, top_p=1e-9, seed=2**64 - 1, logprobs=0, max_tokens=None)
    assert SamplingParams(top_k=-1).top_k == 0
    assert SamplingParams(seed=-1).seed is None
    assert SamplingParams(temperature=1e-7).is_greedy
    assert SamplingParams(stop="x").stop_strings == ["x"]
    assert SamplingParams(stop=["x", "y"]).stop_strings == ["x", "y"]


def test_stop_strings_without_detokenize_are_refused():
    with pytest.raises(RequestError, match="detokenize"):
        SamplingParams(stop="x", detokenize=False)
