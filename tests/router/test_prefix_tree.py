"""The prompts that the tree expects in an engine's cache: those that the engine has computed and not evicted."""

from __future__ import annotations

from octavo.router.engines import EngineHandle
from octavo.router.policies.prefix_tree import Found, PrefixTree
from octavo.router.request_summary import read_request_summary

ENGINE = EngineHandle("http://a")


def prompt(text: str):
    return read_request_summary(b'{"prompt":"%b"}' % (text.encode() * 200), tenant="", headers={}, session_header="")


def test_open_request_gives_no_prefix_hit_yet():
    """Its engine may still be computing it. After the request has ended, the whole prompt is expected."""
    tree, summary = PrefixTree(1000), prompt("open ")
    first = tree.add(summary, ENGINE)
    second = tree.add(summary, ENGINE)
    assert (first.num_bytes, second.num_bytes) == (0, 0)
    tree.close(ENGINE, first)
    tree.close(ENGINE, second)
    third = tree.add(summary, ENGINE)
    assert third.num_bytes == summary.pieces[1][-1]


def test_prompt_older_than_open_requests_is_prefix_hit():
    tree, old, new = PrefixTree(1000), prompt("old "), prompt("new ")
    tree.close(ENGINE, tree.add(old, ENGINE))
    tree.add(new, ENGINE)
    assert tree.add(old, ENGINE).num_bytes == old.pieces[1][-1]


def test_loss_evicts_entries_up_to_and_including_time():
    tree, old, new = PrefixTree(1000), prompt("old "), prompt("new ")
    for summary in (old, new):
        tree.close(ENGINE, tree.add(summary, ENGINE))
    tree.lost(ENGINE, 1)
    assert tree.find(old, [ENGINE]).num_bytes == 0
    assert tree.find(new, [ENGINE]).num_bytes == new.pieces[1][-1]


def test_prefix_tree_keeps_exactly_max_entries():
    summary = prompt("kept ")
    num_pieces = len(summary.pieces[0])
    for max_entries, num_kept in ((num_pieces, num_pieces), (num_pieces - 1, num_pieces - 1)):
        tree = PrefixTree(max_entries)
        tree.add(summary, ENGINE)
        assert len(tree._nodes) == num_kept


def test_unknown_prompt_has_no_hit_and_no_branch():
    tree, summary = PrefixTree(1000), prompt("new ")
    assert tree.find(summary, [ENGINE]) == Found(0, [ENGINE], 0, is_branch=False)
    tree.add(prompt("other "), ENGINE)
    assert tree.find(summary, [ENGINE]) == Found(0, [ENGINE], 0, is_branch=False)


def test_prompt_diverging_from_known_prefix_is_branch():
    tree = PrefixTree(1000)
    common = "common " * 20
    first, second, longer = (
        read_request_summary(b'{"prompt":"%b"}' % (common + more).encode(), tenant="", headers={}, session_header="")
        for more in ("a" * 200, "b" * 200, "a" * 400)
    )
    tree.add(first, ENGINE)
    found = tree.find(second, [ENGINE])
    assert (0 < found.num_bytes <= len(common) + 10, found.is_branch) == (True, True)
    assert tree.find(longer, [ENGINE]).is_branch is False
    assert tree.find(first, [ENGINE]).is_branch is False


def test_since_is_time_of_oldest_prompt_piece():
    tree, short = PrefixTree(1000), prompt("old ")
    first = tree.add(short, ENGINE)
    assert (first.since, first.now) == (1, 1)
    tree.close(ENGINE, first)
    tree.add(prompt("other "), ENGINE)
    third = tree.add(short, ENGINE)
    assert (third.since, third.now) == (1, 3)
    assert tree.add(short, ENGINE).since == 3


def test_lru_eviction_keeps_parents_longest():
    tree, old, new = PrefixTree(1000), prompt("old "), prompt("new ")
    tree.add(old, ENGINE)
    tree.add(new, ENGINE)
    tree.add(old, ENGINE)
    tree._max_entries = len(old.pieces[0]) + 1
    tree.add(old, ENGINE)
    assert tree.find(old, [ENGINE]).num_bytes == old.pieces[1][-1]
    assert tree.find(new, [ENGINE]).num_bytes == new.pieces[1][0]


def test_prefix_hits_are_separate_per_engine():
    other = EngineHandle("http://b", number=1)
    tree, summary = PrefixTree(1000), prompt("mine ")
    tree.close(ENGINE, tree.add(summary, ENGINE))
    assert tree._open == {}
    hashes, ends = summary.pieces
    assert tree.find(summary, [ENGINE, other]) == Found(ends[-1], [ENGINE], len(hashes), is_branch=False)
    assert tree.find(summary, [other]).num_bytes == 0
    tree.lost(ENGINE, 1)
    tree.lost(ENGINE, 0)  # everything older is lost already
    assert tree.find(summary, [ENGINE]).num_bytes == 0
    tree.add(summary, other)
    tree.forget(other)
    assert tree.find(summary, [other]).num_bytes == 0
