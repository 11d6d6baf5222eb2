"""Answers have the requested form in every schedule, and a failing grammar affects only its own request."""

from __future__ import annotations

import gc
import itertools
import json
import re
import threading
import time

import jsonschema
import pytest
from json_schemas import HARD, generate

from octavo import LLM, RequestError, SamplingParams, StructuredOutputsParams
from octavo.structured_output import grammars
from octavo.structured_output.grammars import GrammarCompiler, Matcher

PROMPTS = ["Once upon a time", "What is 12 + 30?", "The old lighthouse"]
NAMES = sorted(HARD)


@pytest.fixture(scope="module")
def llm():
    # Without drafts, because they would call matchers too: faults are scheduled here by the number of calls.
    return LLM(kv_cache_memory_bytes=64 << 20, max_num_seqs=16, speculative_config={"method": "none"})


def sampled(structure: StructuredOutputsParams, seed: int = 0, **options) -> SamplingParams:
    return SamplingParams(structured_outputs=structure, seed=seed, max_tokens=600, **options)


def texts(llm, structures, **options):
    params = [sampled(structure, seed, **options) for seed, structure in enumerate(structures)]
    prompts = [PROMPTS[index % len(PROMPTS)] for index in range(len(params))]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.outputs[0].finish_reason for output in outputs] == ["stop"] * len(outputs)
    return [output.outputs[0].text for output in outputs]


@pytest.mark.turn(12)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_match_hard_json_schemas(llm, temperature):
    schemas = [HARD[name] for name in NAMES]
    answers = texts(llm, [StructuredOutputsParams(json=schema) for schema in schemas], temperature=temperature)
    for name, schema, answer in zip(NAMES, schemas, answers, strict=True):
        try:
            jsonschema.validate(json.loads(answer), schema, format_checker=jsonschema.FormatChecker())
        except (ValueError, jsonschema.ValidationError) as error:
            pytest.fail(f"{name}: {answer!r}: {error}")


@pytest.mark.turn(12)
def test_answers_match_generated_json_schemas(llm):
    schemas = [generate(seed) for seed in range(40)]
    answers = texts(llm, [StructuredOutputsParams(json=schema) for schema in schemas])
    for schema, answer in zip(schemas, answers, strict=True):
        jsonschema.validate(json.loads(answer), schema)


def test_answers_match_regex_choice_grammar_and_json_text(llm):
    gbnf = 'root ::= "yes" | "no" (" " [0-9])*'
    answers = texts(
        llm,
        [
            StructuredOutputsParams(regex=r"[a-z]{3,8}@[a-z]{2,5}\.(com|org)"),
            StructuredOutputsParams(choice=["left", "right", 'with "quotes"', "ünïcode 狐"]),
            StructuredOutputsParams(grammar=gbnf),
            StructuredOutputsParams(grammar='start: "<" /[a-c]{1,5}/ ">"'),
            StructuredOutputsParams(json='{"type": "boolean"}'),
        ],
    )
    assert re.fullmatch(r"[a-z]{3,8}@[a-z]{2,5}\.(com|org)", answers[0])
    assert answers[1] in ["left", "right", 'with "quotes"', "ünïcode 狐"]
    assert re.fullmatch(r"yes|no( [0-9])*", answers[2])
    assert re.fullmatch(r"<[a-c]{1,5}>", answers[3])
    assert answers[4].strip() in {"true", "false"}


@pytest.mark.turn(8)
def test_json_object_answer_is_prefix_of_json_object(llm):
    output = llm.generate(
        "Once upon a time", sampled(StructuredOutputsParams(json_object=True), temperature=0.0), use_tqdm=False
    )[0].outputs[0]
    text = output.text.rstrip("\\")  # any object is allowed: an incomplete one must be the beginning of one
    endings = itertools.product(("", '"', "null", ": null", '": null'), ("", "]", "]]"), ("", "}", "}}", "}}}", "}}}}"))
    assert any(is_json(text + "".join(ending)) for ending in endings), text[-100:]


def is_json(text):
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def test_n_outputs_have_independent_matchers(llm):
    params = SamplingParams(
        structured_outputs=StructuredOutputsParams(json=HARD["formats"]), n=4, seed=3, max_tokens=300
    )
    answers = [each.text for each in llm.generate("a", params, use_tqdm=False)[0].outputs]
    assert len(set(answers)) > 1
    for answer in answers:
        jsonschema.validate(json.loads(answer), HARD["formats"])


@pytest.mark.turn(8)
def test_structured_answers_are_equal_alone_batched_and_preempted():
    """Eight requests, half of them with a form, and so few blocks that they preempt each other."""
    names = ["a matrix", "many properties", "formats", "deep"]
    params = []
    for index, name in enumerate(names):
        params += [
            sampled(StructuredOutputsParams(json=HARD[name]), seed=index),
            SamplingParams(max_tokens=120, ignore_eos=True, seed=index),
        ]
    prompts = [f"Story number {index}:" for index in range(len(params))]
    roomy = LLM(kv_cache_memory_bytes=64 << 20, max_num_seqs=1)
    alone = [roomy.generate(p, q, use_tqdm=False)[0].outputs[0] for p, q in zip(prompts, params, strict=True)]
    for options in ({}, {"swap_space_bytes": 16 << 20, "preemption": "swap"}, {"max_num_batched_tokens": 8}):
        tight = LLM(num_gpu_blocks_override=22, max_num_seqs=8, **options)
        crowd = [output.outputs[0] for output in tight.generate(prompts, params, use_tqdm=False)]
        assert [each.token_ids for each in crowd] == [each.token_ids for each in alone]
        if "max_num_batched_tokens" not in options:
            assert tight.llm_engine.core.metrics.stats.num_preemptions > 0
    for name, output in zip(names, alone[::2], strict=True):
        jsonschema.validate(json.loads(output.text), HARD[name])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "exactly one"),
        ({"json": "{}", "regex": "a"}, "exactly one"),
        ({"regex": 5}, "regex must be a text"),
        ({"choice": []}, "exactly one|choice must be"),
        ({"choice": ["a", 5]}, "choice must be"),
        ({"choice": "ab"}, "choice must be"),
        ({"grammar": "x" * (1 << 19)}, "grammar must be"),
        ({"json_object": "yes"}, "json_object must be"),
    ],
)
def test_invalid_structured_outputs_params_are_refused(fields, message):
    with pytest.raises(RequestError, match=message) as error:
        StructuredOutputsParams(**fields)
    assert error.value.parameter == "structured_outputs"


@pytest.mark.parametrize(
    "fields",
    [
        {"json": "{"},
        {"json": '{"type": "nothing"}'},
        {"json": '{"$ref": "#/none"}'},
        {"json": '{"$ref": "http://localhost:1/schema.json"}'},
        {"regex": "(a"},
        {"regex": "(?=a)b"},
        {"grammar": "start: nothing"},
        {"grammar": "root ::= ("},
        {"json": '{"a": ' * 2000 + "1" + "}" * 2000},
    ],
)
def test_s13_uncompilable_grammar_is_refused_before_request_runs(llm, fields):
    with pytest.raises(RequestError) as error:
        llm.generate("a", sampled(StructuredOutputsParams(**fields)), use_tqdm=False)
    assert error.value.parameter == "structured_outputs"
    assert len(str(error.value)) < 500
    assert llm.generate("a", SamplingParams(max_tokens=2), use_tqdm=False)[0].finished


@pytest.mark.parametrize("fields", [{"ignore_eos": True}, {"min_tokens": 3}])
def test_ignore_eos_and_min_tokens_with_structured_outputs_are_refused(fields):
    with pytest.raises(RequestError, match="cannot be used with structured_outputs"):
        SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"), **fields)


def test_grammar_error_ends_only_its_request(llm, monkeypatch):
    allowed, count = Matcher.allowed, [0]

    def failing(self):
        count[0] += 1
        if count[0] == 5:
            self._matcher.consume_token(0)  # an error state for good
        return allowed(self)

    monkeypatch.setattr(Matcher, "allowed", failing)
    params = [sampled(StructuredOutputsParams(json=HARD["many properties"])), SamplingParams(max_tokens=20, seed=1)]
    broken, whole = llm.generate(["a", "b"], params, use_tqdm=False)
    assert broken.outputs[0].finish_reason == "error"
    assert "grammar" in broken.error
    assert whole.outputs[0].finish_reason == "length"
    monkeypatch.undo()
    assert whole.outputs[0].token_ids == llm.generate("b", params[1], use_tqdm=False)[0].outputs[0].token_ids


def test_slow_grammar_does_not_delay_or_change_other_requests(llm, monkeypatch):
    params = [sampled(StructuredOutputsParams(json=HARD["formats"]), seed=2), SamplingParams(max_tokens=30, seed=1)]
    alone = [llm.generate("a", each, use_tqdm=False)[0].outputs[0].token_ids for each in params]
    allowed, may_go_on = Matcher.allowed, threading.Event()

    def held(self):
        assert may_go_on.wait(60)
        return allowed(self)

    monkeypatch.setattr(Matcher, "allowed", held)
    engine = llm.llm_engine
    for name, each in zip(("structured", "plain"), params, strict=True):
        engine.add_request(name, "a", each)
    ended = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                ended[output.request_id] = output.outputs[0].token_ids
                may_go_on.set()
    assert list(ended) == ["plain", "structured"]
    assert [ended["structured"], ended["plain"]] == alone


def test_aborted_request_cancels_its_pending_grammar_walk(llm, monkeypatch):
    allowed, may_go_on = Matcher.allowed, threading.Event()
    monkeypatch.setattr(Matcher, "allowed", lambda self: (may_go_on.wait(60), allowed(self))[1])
    engine = llm.llm_engine
    for name in ("first", "second"):
        engine.add_request(name, "a", sampled(StructuredOutputsParams(json=HARD["formats"])))
    for _ in range(3):
        engine.step()
    rows = engine.core.executor.worker.runner.batch.requests
    walks = [rows[name].walk for name in list(rows)]
    engine.abort_request(["first", "second"])
    while engine.core.has_work():
        engine.step()
    assert [walk.result.cancelled() for walk in walks] == [False, True]  # the first one was running
    may_go_on.set()
    assert walks[0].result.result(60).error is None


def test_large_grammar_allows_same_tokens_as_small_matcher(llm, monkeypatch):
    compiler = llm.llm_engine.core.executor.worker.grammars
    wanted = StructuredOutputsParams(json={"type": "object", "properties": {f"p{n}": {} for n in range(400)}})
    ids = llm.get_tokenizer().encode('{"p7":1,"p12":2}', add_special_tokens=False)
    large = compiler.compile(wanted)
    small = Matcher(large._matcher.deep_copy(), large._vocab_size)
    assert (large.is_large, small.is_large) == (True, False)
    for token_id in ids:
        assert (large.allowed() == small.allowed()).all()
        large.advance([token_id])
        small.advance([token_id])
    with pytest.raises(RequestError, match="could not advance"):
        large.advance([ids[0]])


@pytest.mark.turn(8)
def test_grammars_of_waiting_requests_are_not_compiled_again(llm, monkeypatch):
    compiler = llm.llm_engine.core.executor.worker.grammars
    waiting = [StructuredOutputsParams(regex=f"w{{{number}}}") for number in range(1, 6)]
    for wanted in waiting:
        compiler.prepare(wanted).result()
    for number in range(1, 2 * grammars._MAX_KEPT):
        compiler.prepare(StructuredOutputsParams(regex=f"c{{{number}}}")).result()
    with monkeypatch.context() as patched:
        patched.setattr(compiler, "_compile", None)
        for wanted in waiting:
            compiler.compile(wanted)
    for number in range(1, 2 * grammars._MAX_KEPT):
        compiler.compile(StructuredOutputsParams(regex=f"d{{{number}}}"))
    gc.collect()  # garbage of other tests
    until = time.monotonic() + 10  # a thread may hold its last task for a moment
    while len(compiler._known) != len(compiler._kept) + len(waiting):
        assert time.monotonic() < until
    num_held = len(compiler._waited_for)
    for _ in range(100):  # requests of one form, as those of LLM.generate
        compiler.prepare(waiting[0]).result()
    assert len(compiler._waited_for) == num_held
    del waiting, wanted
    gc.collect()
    while compiler._waited_for:  # see above
        assert time.monotonic() < until
    assert len(compiler._known) == len(compiler._kept) == grammars._MAX_KEPT


@pytest.mark.turn(8)
def test_prepared_grammar_costs_step_no_compile_time(llm, monkeypatch):
    """With 2,000 names, a schema's text takes 4 ms and the mask of its beginning 20 ms, which each copy would
    compute.
    """
    compiler = llm.llm_engine.core.executor.worker.grammars
    found = []
    monkeypatch.setattr("octavo.structured_output.grammars.Matcher", lambda matcher, *_: found.append(matcher))
    wanted = StructuredOutputsParams(json={"type": "object", "properties": {f"p{n}": {} for n in range(2000)}})
    compiler.prepare(wanted).result()
    monkeypatch.setattr("octavo.structured_output.grammars._structure_text", None)
    compiler.compile(wanted)
    gc.collect()
    gc.disable()  # a full collection is not measured
    try:
        start = time.thread_time()
        found[0].compute_bitmask()
        taken = time.thread_time() - start
    finally:
        gc.enable()
    assert taken < 0.005


def test_vocabulary_is_read_ahead_once(llm):
    read = llm.llm_engine.core.executor.worker.grammars._read_vocabulary
    calls = []
    compiler = GrammarCompiler(lambda: calls.append(1) or read(), 1536)
    compiler.read_ahead().result()
    assert calls == [1]
    compiler.prepare(StructuredOutputsParams(regex="a")).result()
    assert calls == [1]


def test_unreadable_vocabulary_fails_grammar_requests():
    def read():
        raise ValueError("it is broken")

    compiler = GrammarCompiler(read, 1536)
    compiler.read_ahead().result()
    with pytest.raises(RequestError, match="it is broken"):
        compiler.prepare(StructuredOutputsParams(regex="a")).result()


@pytest.mark.turn(12)
def test_compiled_grammars_are_cached_up_to_limits(llm, monkeypatch):
    monkeypatch.setattr(grammars, "_MAX_KEPT_CHARS", 2000)
    compiler = llm.llm_engine.core.executor.worker.grammars
    assert isinstance(compiler, GrammarCompiler)
    for number in range(200):
        compiler.compile(StructuredOutputsParams(regex=f"a{{{number}}}"))
    assert 5 < len(compiler._kept) < 50
    assert sum(map(len, compiler._kept)) == compiler._num_kept_chars <= 2000
    monkeypatch.undo()
    for number in range(200):
        compiler.compile(StructuredOutputsParams(regex=f"b{{{number}}}"))
    assert len(compiler._kept) == grammars._MAX_KEPT
    assert sum(map(len, compiler._kept)) == compiler._num_kept_chars
    first, second = (compiler.compile(StructuredOutputsParams(regex="abc")) for _ in range(2))
    first.advance([int(token) for token in llm.get_tokenizer().encode("a")])
    assert second.num_tokens == 0
    assert (first.allowed() != second.allowed()).any()
