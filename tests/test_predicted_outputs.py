"""A prediction is a draft of its request: right, wrong or half right, the answer is the same as without it."""

from __future__ import annotations

import pytest
from alone_and_crowd import needs_kernels
from test_speculation import CONFIGS, FEW_BLOCKS, Run, Verified, answers, expected, make_engine, make_requests

from octavo import LLMEngine, SamplingParams
from octavo.config import SpeculativeConfig
from octavo.errors import RequestError

pytestmark = needs_kernels
COUNT = 15  # every combination of options
WRONG = list(range(300, 340))
KINDS = {
    "right": lambda answer: answer,
    "wrong": lambda _answer: WRONG,
    "edited": lambda answer: answer[:9] + WRONG[:3] + answer[10:],
    "without_its_beginning": lambda answer: answer[4:],
    "longer": lambda answer: WRONG + answer + WRONG,
}


def run_predicted(kind: str, method: str, run: Run) -> tuple[float, int]:
    """Compare with the answers without a prediction; return the share and the number of accepted drafts."""
    told, sequences = expected("bfloat16", COUNT)
    verified = Verified()
    config = SpeculativeConfig(**CONFIGS[method], num_speculative_tokens=run.num_drafts)
    engine = make_engine("bfloat16", run, config, verified)
    encode = engine.input_processor.tokenizer.encode
    requests = []
    for index, (text, params) in enumerate(make_requests(COUNT)):
        sequence = sequences[str(index) if params.n == 1 else f"{index}#0"]
        requests.append(({"prompt": text, "predicted_token_ids": KINDS[kind](sequence[len(encode(text)) :])}, params))
    assert answers(engine, requests) == told
    assert (engine.core.metrics.stats.num_preemptions > 0) == (run.num_blocks is not None)
    assert engine.core.scheduler.kv_cache_manager.pool.usage == 0.0
    return verified.num_accepted / verified.num_drafted, verified.num_accepted


@pytest.mark.sweep(12)
@pytest.mark.parametrize("kind", KINDS)
def test_prediction_does_not_change_tokens(kind):
    """Without a prediction 116 drafts are accepted, a share of 0.34."""
    share, num_accepted = run_predicted(kind, "ngram", Run("plain", num_drafts=8))
    if kind == "wrong":
        assert num_accepted < 130
    else:
        assert num_accepted > 220
        assert share > 0.6


@pytest.mark.sweep(12)
@pytest.mark.parametrize(("method", "without"), [("suffix", 82), ("draft_model", 112), ("quantized", 345)])
def test_every_speculative_method_uses_predictions(method, without):
    """For example, the third choice of three was not predicted."""
    _, num_accepted = run_predicted("right", method, Run("plain", num_drafts=8))
    assert num_accepted > max(without + 20, 250)


@pytest.mark.sweep(8)
@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_preempted_request_keeps_its_prediction(method):
    """Without a prediction 105 drafts are accepted."""
    _, num_accepted = run_predicted("edited", method, Run("preempted", **{**FEW_BLOCKS, "num_blocks": 40}))
    assert num_accepted > 200


def steps(method: str, predicted: list[int] | None, **params: int) -> tuple[list[int], int]:
    """Return the tokens of one answer, and the number of its steps."""
    engine = make_engine("bfloat16", Run("one", num_drafts=8), SpeculativeConfig(method=method))
    prompt = {"prompt": "What", "predicted_token_ids": predicted}
    engine.add_request("r", prompt, SamplingParams(max_tokens=28, temperature=1.0, seed=1, ignore_eos=True, **params))
    tokens, num_steps = [], 0
    while engine.has_unfinished_requests():
        num_steps += 1
        for output in engine.step():
            tokens = output.outputs[0].token_ids
    return tokens, num_steps


def test_right_prediction_accepts_all_drafts_from_first_step():
    tokens, num_steps = steps("ngram", None)
    again, num_fewer = steps("ngram", tokens)
    assert tokens == again
    assert num_steps > 20
    assert num_fewer == 1 + 3 + 1  # a token after the prompt, three times 9, and one that reports the end


@pytest.mark.parametrize(("method", "params"), [("none", {}), ("ngram", {"num_speculative_tokens": 0})])
def test_prediction_is_ignored_without_drafts(method, params):
    tokens, num_steps = steps(method, None, **params)
    assert steps(method, tokens, **params) == (tokens, num_steps)
    assert num_steps >= 28


@pytest.fixture(scope="module")
def engine() -> LLMEngine:
    return make_engine("bfloat16", Run("one"), SpeculativeConfig(method="ngram"))


@pytest.mark.parametrize(
    ("predicted", "message"),
    [
        ("text", "predicted_token_ids must be token ids, got 'text'"),
        (7, "predicted_token_ids must be token ids, got 7"),
        ([1, "a"], "predicted token ids must be integers, got 'a'"),
        ([1, 1 << 20], "predicted_token_ids: token id 1048576 is outside the vocabulary"),
        ([-1], "predicted_token_ids: token id -1 is outside the vocabulary"),
        ([1] * 2048, "predicted_token_ids: 2048 tokens > 2047 maximum, as max_model_len is 2048"),
    ],
)
def test_invalid_predicted_token_ids_are_refused(engine, predicted, message):
    with pytest.raises(RequestError, match=message) as error:
        engine.add_request("r", {"prompt": "a", "predicted_token_ids": predicted})
    assert error.value.parameter == "predicted_token_ids"
    assert not engine.has_unfinished_requests()
