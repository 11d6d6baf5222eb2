"""Drafts found by lookup are used as they are; a draft model is asked for the other requests while it pays off."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.speculative.interface import DraftTask
from octavo.speculative.model import ModelProposer
from octavo.speculative.none import NoProposer


class Counting:
    """A draft model that continues with 1, 2, 3 ..., up to a given number of tokens."""

    max_model_len = 100

    def __init__(self, ends_after=99):
        self.ends_after = ends_after
        self.asked, self.num_passes, self.has_ended = [], 0, False

    def begin(self, request_ids):
        self.asked.append(list(request_ids))
        self.num_passes, self.has_ended = 0, False

    def choose_next(self, indices):
        self.num_passes += 1
        tokens = np.full(len(indices), self.num_passes)
        return tokens, np.full(len(indices), self.num_passes < self.ends_after)

    def end(self):
        self.has_ended = True


class Found(NoProposer):
    """Finds seven tokens for the requests that it knows."""

    num_speculative_tokens = 8

    def __init__(self, names):
        self.names = names

    def propose(self, tasks):
        return [[7] * min(task.max_drafts, 7) if task.request_id in self.names else [] for task in tasks]


def task(name, max_drafts=9, max_computed=None, num_tokens=3):
    return DraftTask(name, np.zeros(num_tokens, dtype=np.int32), max_drafts, None, max_computed=max_computed)


def test_draft_model_runs_only_for_requests_without_lookup_draft():
    model = Counting()
    proposer = ModelProposer(model, 4, Found("a"))
    assert proposer.propose([task("a"), task("b"), task("c", max_drafts=2)]) == [[7] * 7, [1, 2, 3, 4], [1, 2]]
    assert (model.asked, model.has_ended, proposer.num_passes) == ([["b", "c"]], True, 4)
    assert proposer.computed == {"b", "c"}
    assert proposer.computes
    proposer.propose([task("a")])
    assert (proposer.num_passes, proposer.computed) == (0, frozenset())


def test_max_computed_limits_model_drafts_but_not_lookups():
    model = Counting()
    proposer = ModelProposer(model, 4, Found("ab"))
    tasks = [task("a", max_computed=0), task("b", max_computed=1), task("c", max_computed=1), task("d", max_computed=0)]
    assert proposer.propose(tasks) == [[7] * 7, [7] * 7, [1], []]
    assert (model.asked, proposer.num_passes, proposer.computed) == ([["c"]], 1, {"c"})


@pytest.mark.parametrize(("num_tokens", "most"), [(96, 4), (98, 3), (100, 1), (101, 0)])
def test_draft_model_never_exceeds_max_model_len(num_tokens, most):
    proposer = ModelProposer(Counting(), 4, NoProposer())
    assert proposer.propose([task("a", num_tokens=num_tokens)]) == [[1, 2, 3, 4][:most]]


def test_failed_draft_model_reports_no_computed_requests():
    model = Counting()
    proposer = ModelProposer(model, 4, NoProposer())
    proposer.propose([task("a")])
    model.choose_next = lambda _indices: 1 / 0
    with pytest.raises(ZeroDivisionError):
        proposer.propose([task("a")])
    assert model.has_ended
    assert proposer.computed == frozenset()
