"""What the tree of prompts expects in an engine's cache: only prompts that the engine has computed and not lost."""

from __future__ import annotations

from octavo.router.asked import read_asked
from octavo.router.engines import Engine
from octavo.router.policies.prefix_tree import PrefixTree

ENGINE = Engine("http://a")


def prompt(text: str):
    return read_asked(b'{"prompt":"%b"}' % (text.encode() * 200), tenant="", headers={}, session_header="")


def test_prompt_of_an_open_request_is_not_expected_yet():
    """Its engine may still be computing it. Once that request is over, all of the prompt is expected."""
    tree, asked = PrefixTree(1000), prompt("open ")
    first = tree.add(asked, ENGINE)
    second = tree.add(asked, ENGINE)
    assert (first.num_bytes, second.num_bytes) == (0, 0)
    tree.close(ENGINE, first)
    tree.close(ENGINE, second)
    third = tree.add(asked, ENGINE)
    assert third.num_bytes == asked.pieces[1][-1]


def test_prompt_that_was_sent_before_the_oldest_open_request_is_expected():
    tree, old, new = PrefixTree(1000), prompt("old "), prompt("new ")
    tree.close(ENGINE, tree.add(old, ENGINE))
    tree.add(new, ENGINE)
    assert tree.add(old, ENGINE).num_bytes == old.pieces[1][-1]


def test_loss_up_to_a_time_includes_what_was_sent_at_that_time():
    tree, old, new = PrefixTree(1000), prompt("old "), prompt("new ")
    for asked in (old, new):
        tree.close(ENGINE, tree.add(asked, ENGINE))
    tree.lost(ENGINE, 1)
    assert tree.find(old, [ENGINE]).num_bytes[ENGINE] == 0
    assert tree.find(new, [ENGINE]).num_bytes[ENGINE] == new.pieces[1][-1]


def test_tree_keeps_exactly_as_many_entries_as_it_may():
    asked = prompt("kept ")
    num_pieces = len(asked.pieces[0])
    for max_entries, num_kept in ((num_pieces, num_pieces), (num_pieces - 1, num_pieces - 1)):
        tree = PrefixTree(max_entries)
        tree.add(asked, ENGINE)
        assert len(tree) == num_kept
