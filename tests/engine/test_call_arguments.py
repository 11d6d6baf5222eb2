"""Arguments of calls in a history: in whatever form a client sends them back, the model sees its own text."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.engine.call_arguments import UNREADABLE_KEY, begun_arguments, parse_arguments, read_arguments

UNREADABLE = ("[1]", "nonsense", '{"a": "C:\\path\\new"}', '{"a": oops, "b": 1}')


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", {}),
        ("{}", {}),
        ('{"a": 1}', {"a": 1}),
        ('{"a": "x\ny"}', {"a": "x\ny"}),
        ('{"a": "C:\\path"}', {"a": "C:\\path"}),
        ('{"a": 1,}', {"a": 1}),
        ('{"a": "say "hi" now"}', {"a": 'say "hi" now'}),
        ("{'a': True}", {"a": True}),
        ("[1]", None),
        ("nonsense", None),
        ('{"a": "C:\\path\\new"}', None),
        ('{"a": NaN}', None),
        ('{"a": "\\ud800"}', None),
        ('{"a": "x', None),
        ('{"a": ' + "[" * 9999, None),
    ],
)
def test_parse_arguments_returns_object_or_none(text: str, value: dict[str, Any] | None) -> None:
    assert parse_arguments(text) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a": "x\ny"}', {"a": "x\ny"}),
        ('{"a": 1, "b": ["x', {"a": 1, "b": ["x"]}),
        ('{"a": "x', {"a": "x"}),
        ('{"ci', {}),  # no argument is complete
        ("{", {}),
        *(
            (text, {UNREADABLE_KEY: text})
            for text in ("[1]", "nonsense", '{"a": "C:\\path\\new"}', '{"a": oops, "b": 1}')
        ),
    ],
)
def test_read_arguments_repairs_text_or_keeps_raw_text(text: str, value: dict[str, Any]) -> None:
    assert read_arguments(text) == value


def test_begun_arguments_drop_incomplete_string() -> None:
    assert begun_arguments('{"a": 1, "b": "x') == {"a": 1}
    assert begun_arguments("nonsense") == {}
