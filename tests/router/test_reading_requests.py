"""The facts that the router reads from a request: prompt, amount of work, tenant and session."""

from __future__ import annotations

import json
from typing import Any

import pytest

from octavo.http.tenants import Tenant
from octavo.router.engines import EngineHandle
from octavo.router.request_summary import RequestSummary, read_request_summary
from octavo.router.routed_request import RoutedRequest, Share


def summary(
    tenant: str = "", headers: dict[str, str] | None = None, *, is_answered: bool = True, **body: Any
) -> RequestSummary:
    return read_request_summary(
        json.dumps(body).encode(),
        tenant=tenant,
        headers=headers or {},
        session_header="x-session-id",
        is_answered=is_answered,
    )


def pieces(*parts: bytes, owner: bytes = b"") -> tuple[list[bytes], list[int]]:
    return RequestSummary(prompt=tuple(memoryview(part) for part in parts), owner=owner).pieces


def test_piece_hashes_cover_every_byte() -> None:
    """The byte may be at the beginning or the end of a piece, or of a part of the prompt."""
    parts = [bytes(300), bytes(700), bytes(4000)]
    hashes, ends = pieces(*parts)
    assert len(set(hashes)) == len(hashes) > 3
    assert ends == sorted(ends)
    assert ends[-1] <= 5000
    for place in (0, 299, 300, 999, 1000, ends[0] - 1, ends[0], ends[1] - 1, ends[1], ends[-1] - 1):
        whole = bytearray(b"".join(parts))
        whole[place] = 1
        changed, _ = pieces(bytes(whole[:300]), bytes(whole[300:1000]), bytes(whole[1000:]))
        same = [one == other for one, other in zip(hashes, changed, strict=True)]
        assert same == [end <= place for end in ends], place


def test_pieces_depend_on_owner_but_not_on_field_cuts() -> None:
    assert pieces(bytes(1000), bytes(3000)) == pieces(bytes(4000))
    assert pieces(bytes(4000), owner=b"a")[0] != pieces(bytes(4000), owner=b"b")[0]
    assert pieces() == ([], [])


@pytest.mark.parametrize(
    ("body", "scores"),
    [
        ({}, False),
        ({"prompt_logprobs": 0}, True),
        ({"echo": True}, False),
        ({"logprobs": 1}, False),
        ({"echo": True, "logprobs": 0}, True),
        ({"echo": False, "logprobs": 0}, False),
        ({"parameters": {}}, False),
        ({"parameters": {"decoder_input_details": False}}, False),
        ({"parameters": {"decoder_input_details": True}}, True),
    ],
)
def test_prompt_logprob_options_set_scores_prompt(body: Any, scores: bool) -> None:
    assert summary(prompt="a", **body).scores_prompt is scores


@pytest.mark.parametrize(
    ("body", "most"),
    [
        ({"max_tokens": 7}, 7),
        ({"max_completion_tokens": 7, "max_tokens": 9}, 7),
        ({"max_output_tokens": 7}, 7),
        ({"num_predict": 7}, 7),
        ({"parameters": {"max_new_tokens": 7}}, 7),
        ({"options": {"num_predict": 7}}, 7),
        ({"max_tokens": 0, "max_completion_tokens": 1}, 1),
        ({"max_tokens": True, "max_completion_tokens": 2}, 2),
    ],
)
def test_smallest_max_tokens_field_wins(body: Any, most: int) -> None:
    assert summary(prompt="a", **body).max_tokens == most
    assert summary(prompt="a", is_answered=False, **body).max_tokens == 0


@pytest.mark.parametrize("value", [None, 0, -1, True, "7", 1.5])
def test_invalid_max_tokens_gives_default(value: Any) -> None:
    assert summary(prompt="a", max_tokens=value).max_tokens == summary(prompt="a").max_tokens > 1


@pytest.mark.parametrize(
    ("body", "num_choices", "num_streams"),
    [
        ({"prompt": "a"}, 1, 1),
        ({"prompt": "a", "n": 3}, 3, 3),
        ({"prompt": ["a", "b"], "n": 3}, 3, 6),
        ({"prompt": [1, 2, 3], "n": 2}, 2, 2),
        ({"prompt": [[1, 2], [3]]}, 1, 2),
        ({"input": ["a", "b", "c"]}, 1, 3),
        ({"input": [{"role": "user", "content": "a"}]}, 1, 1),
        ({"prompt": "a", "n": 0}, 1, 1),
        ({"prompt": "a", "n": True}, 1, 1),
    ],
)
def test_streams_are_prompts_times_choices(body: Any, num_choices: int, num_streams: int) -> None:
    found = summary(**body)
    assert (found.num_choices, found.num_streams) == (num_choices, num_streams)


def test_prompt_tokens_are_estimated() -> None:
    assert summary(prompt=[5] * 100).num_tokens == 100
    assert 50 < summary(prompt="word " * 100).num_tokens < 500
    assert summary().num_tokens == 0


@pytest.mark.parametrize(
    ("headers", "body", "session"),
    [
        ({}, {}, None),
        ({}, {"user": "u"}, "u"),
        ({}, {"user": "", "prompt_cache_key": "k"}, "k"),
        ({}, {"user": 7, "cache_salt": "s"}, "s"),
        ({"x-session-id": "h"}, {"user": "u"}, "h"),
    ],
)
def test_session_comes_from_header_or_body_fields(headers: Any, body: Any, session: str | None) -> None:
    assert summary(headers=headers, prompt="a", **body).session == session


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"a"', b"[" * 100_000])
def test_unreadable_body_yields_empty_request(body: bytes) -> None:
    headers = {"x-session-id": "h"}
    assert read_request_summary(body, tenant="t", headers=headers, session_header="x-session-id") == RequestSummary(
        session="h"
    )


def test_cache_owner_depends_on_model_salt_and_tenant() -> None:
    given = [{}, {"model": "m"}, {"cache_salt": "s"}, {"model": 7, "cache_salt": 8}]
    owners = [summary(prompt="a", **body).owner for body in given] + [summary("tenant", prompt="a").owner]
    assert owners[0] == owners[3]
    assert len({*owners}) == 4
    assert [summary(prompt="a", **body).model for body in given] == [None, "m", None, None]


def test_request_counts_as_engine_load_until_it_ends() -> None:
    engine = EngineHandle("http://e")
    share = Share(RoutedRequest(RequestSummary(num_tokens=100, max_tokens=10, num_streams=2), Tenant()), engine)
    with share:
        counts = (engine.open_tokens, engine.num_sent_tokens, engine.num_requests, len(engine.routed_requests))
        assert counts == (120, 120, 1, 1)
        share.note_returned(1)  # the first event shows that the prompt is computed
        assert engine.open_tokens == 19
        share.note_returned(3)
        assert engine.open_tokens == 16
        share.note_returned(100)
        assert engine.open_tokens == 0
    assert (engine.open_tokens, engine.num_sent_tokens, engine.num_requests, len(engine.routed_requests)) == (
        0,
        120,
        1,
        0,
    )


def test_request_numbers_are_clamped() -> None:
    """They decide the routing, so a client may not choose arbitrary values."""
    found = summary(prompt="a", n=10**9, max_tokens=10**9)
    assert (found.num_choices, found.num_streams, found.max_tokens) == (1024, 1024, 1 << 17)
    found = summary(prompt="a", n=1024, max_tokens=1 << 17)
    assert (found.num_choices, found.max_tokens) == (1024, 1 << 17)
    assert summary(prompt="a").max_tokens == 256
    assert len(pieces(bytes(6 << 20))[0]) == 4096
    assert pieces(bytes(10_000))[1][126:130] == [127 * 64, 128 * 64, 128 * 64 + 1024]
    assert len(pieces(bytes(63))[0]) == 0
    assert pieces(bytes(64))[1] == [64]


@pytest.mark.parametrize(
    ("prompt", "num_tokens"), [("x" * 39, 10), ([5], 1), ([], 0), ([[1, 2], [3, 4]], 3), (" [1,2]", 1)]
)
def test_token_estimate_counts_four_bytes_or_one_id(prompt: Any, num_tokens: int) -> None:
    assert summary(prompt=prompt).num_tokens == num_tokens


@pytest.mark.parametrize("num_quotes", [1, 4095, 4096, 4097, 9000])
def test_closing_quote_and_blanks_are_not_in_prompt(num_quotes: int) -> None:
    body = b'{"prompt":"ab' + b" " * num_quotes + b'"}'
    found = read_request_summary(body, tenant="", headers={}, session_header="")
    assert [bytes(part) for part in found.prompt] == [b'"ab']
    found = read_request_summary(b'{"system":"s","prompt":"  "}', tenant="", headers={}, session_header="")
    assert [bytes(part) for part in found.prompt] == [b'"s"', b""]


def test_prompt_list_after_blanks_is_counted() -> None:
    body = b'{"prompt": \n [ "a", "b"]}'
    assert read_request_summary(body, tenant="", headers={}, session_header="").num_streams == 2
