"""A few faults of `kv_faults.py`, and tests that it detects violations."""

from __future__ import annotations

import asyncio
import json

import pytest
from known_answers import judge
from kv_faults import CASES, Verdict, answers_of_one_engine, run
from mooncake_master import needs_mooncake
from raw_http import Answer

RIGHT = [("a", -0.5), ("b", -0.25), ("c", 0.0)]
STREAM = {"stream": True}
POOL = ("donor", "master")


def event(tokens=(), reason=None):
    logprobs = {"tokens": [token for token, _ in tokens], "token_logprobs": [each for _, each in tokens]}
    choice = {"text": "", "logprobs": logprobs if tokens else None, "finish_reason": reason}
    return f"data: {json.dumps({'choices': [choice]})}\n\n"


ERROR = 'data: {"error": {"code": "engine_lost"}}\n\n'
DONE = "data: [DONE]\n\n"
WHOLE = event(RIGHT[:2]) + event(RIGHT[2:], "length") + DONE
JUDGED = [
    (WHOLE, False, ("whole", False, False)),
    (event(RIGHT[:1]) + ERROR + DONE, False, ("error", False, False)),
    (event(RIGHT[:1]), True, ("cut", False, False)),
    (event(RIGHT[:1]), False, ("cut", False, False)),  # an answer without an end
    (event(RIGHT[:1]) + ERROR, False, ("cut", False, False)),
    (event(RIGHT[:2], "length") + DONE, False, ("whole", True, False)),  # one token is missing
    (event([("a", -0.75)]) + ERROR + DONE, False, ("error", True, False)),  # wrong log probability
    (event(RIGHT[1:2]), True, ("cut", True, False)),
    (event(RIGHT) + event(RIGHT[:1], "length") + DONE, False, ("whole", True, True)),
    (event(RIGHT, "length") + event((), "length") + DONE, False, ("cut", False, True)),
    (WHOLE + DONE, False, ("cut", False, True)),
    (WHOLE + event(RIGHT), False, ("whole", True, True)),
    (event(RIGHT, "length") + ERROR + DONE, False, ("error", False, True)),
]


@pytest.mark.parametrize(("text", "is_cut", "expected"), JUDGED)
def test_judge_classifies_streamed_answers(text, is_cut, expected):
    assert judge(Answer(200, {}, text.encode()), STREAM, RIGHT, is_cut=is_cut) == expected


def test_judge_classifies_unstreamed_answers():
    body = event(RIGHT, "length").removeprefix("data: ").encode()
    assert judge(Answer(200, {}, body), {}, RIGHT, is_cut=False) == ("whole", False, False)
    assert judge(Answer(200, {}, body[:40]), {}, RIGHT, is_cut=True) == ("cut", False, False)
    assert judge(Answer(503, {}, b""), {}, RIGHT, is_cut=False) == ("refused", False, False)
    assert judge(Answer(200, {}, body), {}, RIGHT[::-1], is_cut=False) == ("whole", True, False)


@pytest.fixture(scope="module")
def right():
    return asyncio.run(answers_of_one_engine())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "trouble"),
    [
        pytest.param(name, trouble, marks=needs_mooncake if name in POOL else ())
        for name, case in CASES.items()
        for trouble in case.troubles
    ],
)
def test_two_runs_of_each_fault_break_no_rule(name, trouble, right):
    assert asyncio.run(run(name, trouble, 2, right, Verdict())).broken == []
