"""Conversations of ten turns with tools, on a small trained Qwen3.5: the tokens are `==` however they are computed.

`tools/train_hybrid_model.py` trained the model. The conversations share a system prompt or first turns, call tools,
drop reasoning of earlier turns, and branch. Each is compared with itself played alone without a cache.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import jsonschema
import pytest
from agent_conversations import MODEL, MOST_TOKENS, TEMPERATURES, play_all, read_scripts
from alone_and_crowd import has_swapped, needs_kernels

from octavo import LLM, SamplingParams

pytestmark = needs_kernels
BLOCK_TOKENS, LEAST_DISTANCE = 16, 4  # a state is saved this many blocks before the last one
FEW_BLOCKS = {"num_gpu_blocks_override": 160}


@dataclass(frozen=True)
class Way:
    """One way to play the conversations. interval: See `state_checkpoint_interval`; None if little is cached."""

    name: str
    together: bool = True
    method: str = "none"
    interval: int | None = LEAST_DISTANCE * BLOCK_TOKENS
    is_preempted: bool = False
    options: dict[str, Any] = field(default_factory=dict)


WAYS = [
    Way("cache", together=False),
    Way("cache_together"),
    Way("suffix", together=False, method="suffix"),
    Way("suffix_together", method="suffix"),
    Way("ngram", together=False, method="ngram"),
    Way("ngram_together", method="ngram"),
    Way("intervals", interval=32, options={"state_checkpoint_interval": 32}),
    Way("chunks_of_37", method="suffix", options={"long_prefill_token_threshold": 37}),
    Way("recomputed", interval=None, is_preempted=True, options=FEW_BLOCKS),
    Way(
        "swapped",
        interval=None,
        is_preempted=True,
        options={**FEW_BLOCKS, "preemption": "swap", "swap_space_bytes": 32 << 20},
    ),
    Way(
        "swapped_with_drafts",
        method="suffix",
        interval=None,
        is_preempted=True,
        options={**FEW_BLOCKS, "preemption": "swap", "swap_space_bytes": 32 << 20},
    ),
    Way("no_cache_together", interval=None, options={"enable_prefix_caching": False}),
    Way("ahead", together=False, options={"async_scheduling": True}),
    Way("ahead_together", options={"async_scheduling": True}),
    Way("ahead_few_blocks", interval=None, is_preempted=True, options={**FEW_BLOCKS, "async_scheduling": True}),
    Way("threads", options={"num_threads": 3}),
]


def make_llm(method: str = "none", **options: Any) -> LLM:
    fixed = {"max_model_len": 4096, "num_threads": 1, "packed_cache_bytes": 0, "kv_cache_memory_bytes": 256 << 20}
    return LLM(str(MODEL), speculative_config={"method": method}, **{**fixed, **options})


@pytest.fixture(scope="module")
def alone():
    """The answers of each conversation alone, without cache and drafts."""
    return play_all(make_llm(enable_prefix_caching=False, max_num_seqs=1), together=False)


def tokens_of(answers):
    return [(each.turn, each.num_prompt_tokens, each.token_ids) for each in answers]


@pytest.mark.sweep(16)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_conversations_have_equal_tokens(alone, way):
    llm = make_llm(way.method, **way.options)
    got, stats = play_all(llm, together=way.together), llm.llm_engine.core.metrics.stats
    assert got.keys() == alone.keys()
    for name, answers in got.items():
        assert tokens_of(answers) == tokens_of(alone[name]), name
    assert (stats.num_preemptions > 0) == way.is_preempted
    assert has_swapped(llm.llm_engine) == ("swap_space_bytes" in way.options)
    assert (stats.drafts.num_accepted_tokens > 0) == (way.method != "none")
    assert (stats.prefix_cache_hits > 0) == way.options.get("enable_prefix_caching", True)
    if way.interval is not None:
        for answer in (each for answers in got.values() for each in answers):
            assert answer.num_known - answer.num_cached < way.interval + BLOCK_TOKENS


def first_answers(answers):
    """Return the first answer of each turn; a branch comes last."""
    return {answer.turn: answer for answer in reversed(answers)}


def is_valid(call, tools):
    """Return True if a call names a tool, and its arguments have the schema of the tool."""
    name, arguments = call
    try:
        return jsonschema.Draft202012Validator(tools[name]["function"]["parameters"]).is_valid(json.loads(arguments))
    except (KeyError, ValueError):
        return False


def test_most_questions_get_valid_calls(alone):
    scripts, tools = read_scripts()
    due = [
        first_answers(alone[script["name"], 0.0])[index].calls
        for script in scripts
        for index, turn in enumerate(script["turns"])
        if turn["results"]
    ]
    right = [calls for calls in due if calls and all(is_valid(call, tools) for call in calls)]
    assert len(due) > 45
    assert len(right) > 0.8 * len(due)


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_grammars_are_obeyed(alone, temperature):
    [script], tools = [each for each in read_scripts()[0] if each["name"] == "grammars"], read_scripts()[1]
    answers = first_answers(alone["grammars", temperature])
    ended = [
        (turn, answers[index])
        for index, turn in enumerate(script["turns"])
        if turn.keys() & {"choice", "format"} and len(answers[index].token_ids[0]) < MOST_TOKENS
    ]
    for turn, answer in ended:
        is_content = "format" in turn and not answer.calls
        assert is_content or (answer.calls and all(is_valid(call, tools) for call in answer.calls))
        if is_content:
            jsonschema.validate(json.loads(answer.content), turn["format"])
    assert len(ended) >= 3


def test_scripts_have_what_they_are_for(alone):
    tokenizer, (scripts, _) = make_llm().get_tokenizer(), read_scripts()
    assert [len(script["turns"]) for script in scripts] == [10] * 6
    results = [result for script in scripts for turn in script["turns"] for result in turn["results"]]
    assert max(len(tokenizer.encode(result)) for result in results) >= 400
    counts = [len(answer.token_ids) for answer in alone["two answers", 1.0] if len(answer.token_ids) > 1]
    assert counts.count(2) == len(counts) >= 3
    branch = next(script["branch"] for script in scripts if "branch" in script)
    turns = [answer.turn for answer in alone["branches", 0.0]]
    assert turns.count(branch["after"]) >= 2
    assert scripts[0]["turns"][:4] == scripts[1]["turns"][:4]


def test_later_turns_drop_reasoning(alone):
    """So they differ from what was computed, before its end."""
    answers = alone["travel", 0.0]
    for last, answer in pairwise(answers):
        assert (answer.num_known >= last.num_prompt_tokens) == (answer.turn == last.turn)


def test_chat_gives_the_tokens_of_the_player(alone):
    (script, *_), tools = read_scripts()
    messages = [
        {"role": "system", "content": script["system"]},
        {"role": "user", "content": script["turns"][0]["user"]},
    ]
    params = SamplingParams(temperature=0.0, max_tokens=MOST_TOKENS)
    [output] = make_llm().chat(messages, params, use_tqdm=False, tools=[tools[name] for name in script["tools"]])
    assert output.outputs[0].token_ids == alone["travel", 0.0][0].token_ids[0]
