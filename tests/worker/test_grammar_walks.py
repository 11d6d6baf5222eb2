from __future__ import annotations

import threading

import pytest

from octavo.worker.grammar_walks import GrammarWalks, Walk, Walked, wait_for


def test_slow_grammar_walks_start_after_fast_ones():
    walks, done, may_go_on = GrammarWalks(), [], threading.Event()

    def walk(name, last_s):
        each = Walk(1, [])
        walks.add(each, lambda: done.append(name) or Walked([], None), last_s)
        return each

    walks.add(Walk(1, []), lambda: may_go_on.wait(60) and Walked([], None), 0.0)
    walks.begin()
    begun = [walk("long", 5.0), walk("first", 0.0)]
    walks.begin()
    begun.append(walk("second", 0.0))
    walks.begin()
    may_go_on.set()
    for each in begun:
        each.result.result(60)
    assert done == ["first", "second", "long"]


def test_grammar_walk_result_raises_exception_of_walk():
    walks, walk = GrammarWalks(), Walk(1, [])

    def fail():
        raise KeyboardInterrupt

    walks.add(walk, fail, 0.0)
    walks.begin()
    with pytest.raises(KeyboardInterrupt):
        walk.result.result(60)


def test_wait_for_returns_with_pending_grammar_walks():
    ready, pending = Walk(1, []), Walk(1, [])
    ready.result.set_result(Walked([], None))
    wait_for([ready, pending], 0.0, is_all=True)
    wait_for([pending], 0.0, is_all=True)
    assert (ready.is_ready, pending.is_ready) == (True, False)
