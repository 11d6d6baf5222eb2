"""Drafts of a step: the tasks of the proposer, cut off drafts, and rows that fail."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from scripted_drafts import verify_all

from octavo import LLM, SamplingParams, StructuredOutputsParams
from octavo.structured_output.grammars import Matcher
from octavo.worker import grammar_walks

PROMPT = {"prompt_token_ids": [203, 202, 201]}  # its answer does not repeat itself


class Told:
    """A proposer with fixed drafts; keeps its tasks."""

    num_speculative_tokens = 4
    num_bytes = 0
    num_passes, computed, computes = 0, frozenset(), False

    def __init__(self, drafts: list[int]) -> None:
        self.drafts = drafts
        self.tasks: list[tuple[str, list[int], int]] = []
        self.forgotten: list[str] = []
        self.ended: list[tuple[str, list[int], int]] = []

    def propose(self, tasks) -> list[list[int]]:
        self.tasks += [(task.request_id, task.token_ids.tolist(), task.max_drafts) for task in tasks]
        return [self.drafts for _ in tasks]

    def forget(self, request_ids) -> None:
        self.forgotten += request_ids

    def finish(self, ended) -> None:
        self.ended += [(each.request_id, each.token_ids.tolist(), each.num_prompt_tokens) for each in ended]


@pytest.fixture(scope="module")
def llm():
    llm = LLM(max_num_seqs=4, num_gpu_blocks_override=64)
    verify_all(llm.llm_engine)
    return llm


def start(llm, drafts: list[int], **asked) -> tuple[Told, list[list[int]]]:
    """Add a request and step once; return the proposer and the drafts that the scheduler has then."""
    engine, told = llm.llm_engine, Told(drafts)
    engine.core.executor.worker.runner.drafting.proposer = told
    defaults = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 20}
    engine.add_request("a", PROMPT, SamplingParams(**{**defaults, **asked}))
    engine.step()
    return told, [request.spec_token_ids for request in engine.core.scheduler.running]


@pytest.fixture(autouse=True)
def _grammars_are_waited_for(monkeypatch):
    """Each step waits for its grammars, even on a busy machine."""
    monkeypatch.setattr(grammar_walks, "_LEAST_S", 60.0)


@pytest.fixture(autouse=True)
def _nobody_is_left(llm):
    yield
    llm.llm_engine.abort_request("a")
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()


def token_of(llm, text: str) -> int:
    return llm.get_tokenizer().token_id(text)


def test_proposer_receives_sampled_tokens(llm):
    told, drafts = start(llm, [5, 6, 7, 8, 9])
    assert drafts == [[5, 6, 7, 8]], "never more than its number"
    ((name, known, most),) = told.tasks
    assert (name, known[:3], len(known), most) == ("a", [203, 202, 201], 4, 4)
    (output,) = llm.llm_engine.step()
    assert told.tasks[1][1] == [203, 202, 201, *output.outputs[0].token_ids]
    llm.llm_engine.abort_request("a")
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
    assert (told.ended, told.forgotten) == ([("a", [203, 202, 201, *output.outputs[0].token_ids], 3)], [])


def test_failing_proposer_does_not_change_tokens(llm, monkeypatch, caplog):
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=5)
    right = llm.generate(PROMPT, params, use_tqdm=False)[0].outputs[0].token_ids
    monkeypatch.setattr(Told, "propose", lambda *_: 1 / 0)
    told, drafts = start(llm, [], max_tokens=5)
    assert (drafts, told.forgotten[-1]) == ([[]], "a")
    outputs = [llm.llm_engine.step()[0] for _ in range(4)]
    assert outputs[-1].outputs[0].token_ids == right
    assert "no tokens are drafted" in caplog.text


def test_error_in_proposer_finish_ends_no_request(llm, monkeypatch, caplog):
    monkeypatch.setattr(Told, "finish", lambda *_: 1 / 0)
    told, _ = start(llm, [5])
    llm.llm_engine.abort_request("a")
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
    assert told.forgotten == ["a"]
    assert "could not be kept for drafting" in caplog.text


def test_proposer_finish_receives_complete_answer(llm):
    """The last tokens arrive without a task."""
    told, _ = start(llm, [], max_tokens=3)
    outputs = [llm.llm_engine.step()[0] for _ in range(2)]
    llm.llm_engine.step()
    assert outputs[-1].finished
    assert told.ended == [("a", [203, 202, 201, *outputs[-1].outputs[0].token_ids], 3)]
    assert len(told.ended[0][1]) == 6
    assert len(told.tasks) == 1


@pytest.mark.parametrize(("max_tokens", "expected"), [(1, []), (2, [[]]), (3, [[5]]), (4, [[5, 6]])])
def test_drafts_do_not_exceed_max_tokens(llm, max_tokens, expected):
    told, drafts = start(llm, [5, 6, 7, 8], max_tokens=max_tokens)
    assert drafts == expected
    assert len(told.tasks) == (max_tokens > 2)


@pytest.mark.parametrize(("most", "expected"), [(None, [5, 6, 7, 8]), (2, [5, 6]), (0, []), (9, [5, 6, 7, 8])])
def test_num_speculative_tokens_of_request_limits_drafts(llm, most, expected):
    told, drafts = start(llm, [5, 6, 7, 8], num_speculative_tokens=most)
    assert drafts == [expected]
    assert len(told.tasks) == bool(expected)


@pytest.mark.parametrize(
    ("max_drafts", "expected"), [({}, 4), ({"a": 3}, 3), ({"a": 9}, 4), ({"a": 0}, 0), ({"b": 0}, 4)]
)
def test_scheduler_max_drafts_limits_lookup_drafts(llm, monkeypatch, max_drafts, expected):
    runner = llm.llm_engine.core.executor.worker.runner
    execute = runner.execute
    monkeypatch.setattr(runner, "execute", lambda scheduled: execute(replace(scheduled, max_drafts=max_drafts)))
    told, drafts = start(llm, [5, 6, 7, 8])
    assert drafts == [[5, 6, 7, 8][:expected]]
    assert [most for _, _, most in told.tasks] == [expected] * (expected > 0)


@pytest.mark.parametrize(("max_drafts", "expected"), [({}, 4), ({"a": 3}, 3), ({"a": 9}, 4), ({"a": 0}, 0)])
def test_scheduler_max_drafts_limits_only_computed_drafts(llm, monkeypatch, max_drafts, expected):
    runner, seen = llm.llm_engine.core.executor.worker.runner, []
    execute = runner.execute
    monkeypatch.setattr(runner, "execute", lambda scheduled: execute(replace(scheduled, max_drafts=max_drafts)))
    monkeypatch.setattr(Told, "computes", True)
    propose = Told.propose
    monkeypatch.setattr(
        Told, "propose", lambda self, tasks: seen.extend(each.max_computed for each in tasks) or propose(self, tasks)
    )
    told, drafts = start(llm, [5, 6, 7, 8])
    assert drafts == [[5, 6, 7, 8]]
    assert [most for _, _, most in told.tasks] == [4]
    assert seen == [expected]


def test_step_result_reports_drafting_passes_and_time(llm, monkeypatch):
    """This holds even if nothing was found."""
    engine, results = llm.llm_engine, []
    take = engine.core.scheduler.update_from_output

    def update(scheduled, result):
        results.append(result)
        return take(scheduled, result)

    monkeypatch.setattr(engine.core.scheduler, "update_from_output", update)
    monkeypatch.setattr(Told, "num_passes", 3)
    told, _ = start(llm, [])
    assert results[-1].num_drafting_passes == 3
    assert 0 < results[-1].drafting_s < 60
    monkeypatch.setattr(told, "propose", lambda _tasks: 1 / 0)
    engine.step()
    assert results[-1].num_drafting_passes == 0


def test_drafts_end_before_stop_token(llm):
    assert start(llm, [5, 6, 7, 8], stop_token_ids=[7])[1] == [[5, 6]]


def test_finished_and_pooling_requests_get_no_drafts(llm):
    (first,) = llm.generate(PROMPT, SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True), use_tqdm=False)
    told, drafts = start(llm, [5], stop_token_ids=first.outputs[0].token_ids)
    assert (told.tasks, drafts) == ([], [])
    told, drafts = start(llm, [5], max_tokens=1, pooling="last", detokenize=False)
    assert (told.tasks, drafts) == ([], [])


@pytest.mark.parametrize(("drafts", "left"), [("abxa", "ab"), ("xa", ""), ("ab", "ab"), ("aaa", "aaa")])
def test_drafts_are_cut_at_token_that_grammar_forbids(llm, drafts, left):
    asked = {"structured_outputs": StructuredOutputsParams(regex="[ab]{9}"), "ignore_eos": False}
    assert start(llm, [token_of(llm, text) for text in drafts], **asked)[1] == [[token_of(llm, text) for text in left]]


def test_grammar_error_after_drafts_ends_request_at_same_token(llm, monkeypatch):
    """It fails in the row of the second draft: the tokens before it are reported first."""
    a = token_of(llm, "a")
    asked = {"structured_outputs": StructuredOutputsParams(regex="a{9}"), "ignore_eos": False}
    _, drafts = start(llm, [a, a, a], **asked)
    assert drafts == [[a, a, a]]
    allowed = Matcher.allowed

    def fail(matcher):
        if matcher.num_tokens == 3:
            raise RuntimeError("on purpose")
        return allowed(matcher)

    monkeypatch.setattr(Matcher, "allowed", fail)
    (output,) = llm.llm_engine.step()
    assert output.outputs[0].token_ids == [a, a, a]
    assert output.error is None
    (output,) = llm.llm_engine.step()
    assert "internal error" in output.error


def test_grammar_error_during_draft_cut_ends_no_request(llm, monkeypatch):
    a = token_of(llm, "a")
    monkeypatch.setattr(Matcher, "num_allowed", lambda *_: 1 / 0)
    asked = {"structured_outputs": StructuredOutputsParams(regex="a{4}"), "ignore_eos": False}
    assert start(llm, [a, a], **asked)[1] == [[]]
    outputs = [llm.llm_engine.step()[0] for _ in range(4)]
    assert (outputs[-1].outputs[0].text, outputs[-1].outputs[0].finish_reason) == ("aaaa", "stop")


def test_nan_logits_after_drafts_end_request_in_next_step(llm, monkeypatch):
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=9)
    right = llm.generate(PROMPT, params, use_tqdm=False)[0].outputs[0].token_ids
    runner = llm.llm_engine.core.executor.worker.runner
    compute = runner._compute_logits
    start(llm, right[1:4])

    def break_the_seventh(hidden):
        logits = compute(hidden)
        logits[6 - runner.batch.num_tokens[runner.batch.requests["a"].row], 3] = torch.nan
        return logits

    monkeypatch.setattr(runner, "_compute_logits", break_the_seventh)
    (output,) = llm.llm_engine.step()
    assert (output.outputs[0].token_ids, output.error) == (right[:3], None)
    (output,) = llm.llm_engine.step()
    assert output.error == "the logits are NaN"
