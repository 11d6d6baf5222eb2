"""Histories that a chat template refuses or loses are rewritten in another legal form."""

from __future__ import annotations

import json
import re
from itertools import product
from typing import Any

import pytest

from octavo.engine.chat_template import ChatTemplate
from octavo.engine.history import begun_by_user, with_short_ids, with_single_calls
from octavo.errors import RequestError

USER = {"role": "user", "content": "hi"}
ANSWER = {"role": "assistant", "content": "well"}
SYSTEM = {"role": "system", "content": "rules"}
LATE = {"role": "system", "content": "late"}


def call(call_id: str | None, city: str = "Rome") -> dict[str, Any]:
    function = {"name": "f", "arguments": {"city": city}}
    return {"type": "function", "function": function} | ({} if call_id is None else {"id": call_id})


def calling(*calls: dict[str, Any], content: str | None = None) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "tool_calls": [*calls]}


def result(call_id: str | None, content: str = "sunny") -> dict[str, Any]:
    return {"role": "tool", "content": content} | ({} if call_id is None else {"tool_call_id": call_id})


def render(template: str, *messages: dict[str, Any], **options: Any) -> str:
    return ChatTemplate(template).render(messages, **options)


TURN = "<{{ m.role }}>{{ m.content or '' }}"
SHOWN = (
    "{% for c in m.tool_calls or [] %}[{{ c.id }}:{{ c.function.arguments.city }}{{ c.function.arguments | tojson }}]"
    "{% endfor %}"
)
# Like Mistral's: ids of calls and results are checked.
IDS = """\
{%- for m in messages -%}
    {%- for c in m.tool_calls or [] -%}
        {%- if c.id is not defined or c.id | length != 9 -%}{{ raise_exception('ids of length 9') }}{%- endif -%}
    {%- endfor -%}
    {%- if m.role == 'tool' and (m.tool_call_id is not defined or m.tool_call_id | length != 9) -%}
        {{ raise_exception('ids of length 9') }}
    {%- endif -%}
    TURN{%- if m.role == 'tool' -%}({{ m.tool_call_id }}){%- endif -%}SHOWN
{%- endfor -%}""".replace("TURN", TURN).replace("SHOWN", SHOWN)
# Like Llama 3.1's.
SINGLE = """\
{%- for m in messages -%}
    {%- if m.tool_calls and m.tool_calls | length != 1 -%}{{ raise_exception('only single tool-calls') }}{%- endif -%}
    TURNSHOWN
{%- endfor -%}""".replace("TURN", TURN).replace("SHOWN", SHOWN)
# Like GPT-OSS's: only the first call is shown.
FIRST_CALL = SINGLE.replace("{{ raise_exception('only single tool-calls') }}", "").replace(
    "m.tool_calls or []", "(m.tool_calls or [])[:1]"
)
PLAIN = "{%- for m in messages -%}TURNSHOWN{%- endfor -%}".replace("TURN", TURN).replace("SHOWN", SHOWN)
# Like Qwen3.5's.
SYSTEM_FIRST = PLAIN.replace(
    TURN,
    "{%- if m.role == 'system' and not loop.first -%}{{ raise_exception('at the beginning') }}{%- endif -%}" + TURN,
)
# Like MiniMax's: later system messages are not shown.
SYSTEM_LOST = PLAIN.replace(TURN, "{%- if m.role != 'system' or loop.first -%}" + TURN + "{%- endif -%}")
# Like Gemma 2's, which also checks turns.
NO_SYSTEM = """\
{%- if messages[0].role == 'system' -%}{{ raise_exception('System role not supported') }}{%- endif -%}
{%- for m in messages -%}
    {%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}{{ raise_exception('must alternate') }}{%- endif -%}
    TURN
{%- endfor -%}""".replace("TURN", TURN)
# Like Mistral's: turns alternate, except for calls and results.
ALTERNATING = """\
{%- set ns = namespace(index=0) -%}
{%- for m in messages -%}
    {%- if m.role == 'user' or (m.role == 'assistant' and m.tool_calls is undefined) -%}
        {%- if (m.role == 'user') != (ns.index % 2 == 0) -%}{{ raise_exception('must alternate') }}{%- endif -%}
        {%- set ns.index = ns.index + 1 -%}
    {%- endif -%}
    TURNSHOWN
{%- endfor -%}""".replace("TURN", TURN).replace("SHOWN", SHOWN)


@pytest.mark.parametrize("call_id", ["call_abcdefghijklmnop01", "toolu_01ABC", "1", "", "a:b/c{}\u00fc", "call_0001"])
def test_tool_call_ids_are_shortened_if_template_requires_it(call_id: str) -> None:
    text = render(IDS, USER, calling(call(call_id)), result(call_id), USER)
    found = re.search(r"\[([A-Za-z0-9]{9}):Rome.*\]<tool>sunny\(([A-Za-z0-9]{9})\)<user>hi$", text)
    assert found is not None
    assert found[1] == found[2]
    assert render(IDS, USER, calling(call(call_id)), result(call_id), USER) == text
    shown = render(PLAIN, USER, calling(call(call_id)), result(call_id))
    assert f"[{call_id}:Rome" in shown  # not asked for: the id stays


def test_tool_call_ids_that_fit_are_kept() -> None:
    messages = [USER, calling(call("abcdef123")), result("abcdef123")]
    assert with_short_ids(messages) == messages
    assert "[abcdef123:Rome" in render(IDS, *messages)


def test_shortened_ids_stay_equal_as_history_grows() -> None:
    messages = [USER]
    for number in range(20):
        messages += [calling(call(f"call_{number}"), call(f"call_{number}_b")), result(f"call_{number}")]
        messages += [result(f"call_{number}_b")]
    whole = with_short_ids(messages)
    for count in range(1, len(messages), 3):
        assert with_short_ids(messages[:count]) == whole[:count]
    ids = [each["id"] for message in whole for each in message.get("tool_calls", ())]
    assert len({*ids}) == 40


def test_shortened_ids_do_not_collide(monkeypatch: pytest.MonkeyPatch) -> None:
    from octavo.engine import history

    hashed = {
        "long_one": "aaaaaaaaa",
        "long_one\x001": "bbbbbbbbb",
        "long_two": "bbbbbbbbb",
        "long_two\x001": "ccccccccc",
    }
    monkeypatch.setattr(history, "_hashed", hashed.__getitem__)
    told = with_short_ids([calling(call("long_one"), call("aaaaaaaaa"), call("long_two")), result("long_two")])
    assert [each["id"] for each in told[0]["tool_calls"]] == ["bbbbbbbbb", "aaaaaaaaa", "ccccccccc"]
    assert told[1]["tool_call_id"] == "ccccccccc"


def test_tool_calls_without_ids_get_ids() -> None:
    text = render(IDS, USER, calling(call(None, "A"), call(None, "B")), result(None, "a"), result(None, "b"), USER)
    first, second = re.findall(r"\[(\w{9}):", text)
    assert first != second
    assert f"a({first})<tool>b({second})" in text


@pytest.mark.parametrize("template", [SINGLE, FIRST_CALL])
def test_parallel_tool_calls_become_sequential_rounds(template: str) -> None:
    calls = [call(f"c{n}", city) for n, city in enumerate("ABC")]
    results = [result("c1", "b"), result("c2", "c"), result("c0", "a"), result("stray", "s")]
    text = re.sub(r"\{.*?\}", "", render(template, USER, calling(*calls, content="look"), *results, USER))
    expected = "<assistant>look[c0:A]<tool>a<assistant>[c1:B]<tool>b<assistant>[c2:C]<tool>c<tool>s<user>hi"
    assert text == f"<user>hi{expected}"
    whole = re.sub(r"\{.*?\}", "", render(PLAIN, USER, calling(*calls), *results))
    assert whole == "<user>hi<assistant>[c0:A][c1:B][c2:C]<tool>b<tool>c<tool>a<tool>s"


def test_tool_calls_without_results_are_kept() -> None:
    assert with_single_calls([calling(call("a"), call("b")), result("b")]) == [
        calling(call("a")),
        calling(call("b")),
        result("b"),
    ]
    reasoned = {**calling(call("a"), call("b"), content="x"), "reasoning_content": "hm"}
    first, second = with_single_calls([reasoned])
    assert (first["reasoning_content"], first["content"]) == ("hm", "x")
    assert second == calling(call("b"))


@pytest.mark.parametrize("template", [SYSTEM_FIRST, SYSTEM_LOST])
def test_late_system_message_becomes_user_turn(template: str) -> None:
    assert render(template, SYSTEM, USER, ANSWER, LATE, USER) == (
        "<system>rules<user>hi<assistant>well<user>late<user>hi"
    )
    assert render(template, USER, LATE) == "<user>hi<user>late"
    assert render(template, SYSTEM, LATE, USER) == "<system>rules\n\nlate<user>hi"
    assert render(template, {**LATE, "role": "developer"}, USER) == "<system>late<user>hi"
    assert render(PLAIN, SYSTEM, USER, LATE) == "<system>rules<user>hi<system>late"


def test_system_messages_become_user_turns_if_template_refuses_them() -> None:
    assert render(NO_SYSTEM, SYSTEM, USER) == "<user>rules\n\nhi"
    assert render(NO_SYSTEM, SYSTEM, LATE, USER, ANSWER, LATE, USER) == (
        "<user>rules\n\nlate\n\nhi<assistant>well<user>late\n\nhi"
    )


def test_turns_alternate_if_template_requires_it() -> None:
    late = render(
        ALTERNATING.replace("<{{", "{%- if m.role == 'system' -%}{{ raise_exception('no') }}{%- endif -%}<{{"),
        USER,
        ANSWER,
        LATE,
        USER,
    )
    assert late == "<user>hi<assistant>well<user>late\n\nhi"
    begun = render(ALTERNATING, ANSWER, USER)
    assert begun == "<user><assistant>well<user>hi"
    assert render(ALTERNATING, SYSTEM, ANSWER, USER) == "<system>rules<user><assistant>well<user>hi"
    said_first = re.sub(
        r"\{.*?\}", "", render(ALTERNATING, USER, ANSWER, calling(call("a")), result("a"), ANSWER, USER)
    )
    assert said_first == "<user>hi<assistant>well[a:Rome]<tool>sunny<assistant>well<user>hi"
    for first, second in product((USER, ANSWER), repeat=2):
        assert "hi" in render(ALTERNATING, first, second, USER)


def test_conversation_that_starts_with_user_is_unchanged() -> None:
    for messages in ([USER, ANSWER], [SYSTEM, USER], [SYSTEM]):
        assert begun_by_user(messages) == messages


def test_malformed_messages_are_passed_to_template() -> None:
    odd = {"role": "assistant", "content": "x", "tool_calls": [1, 2]}
    for function in (with_short_ids, with_single_calls):
        assert function([USER, odd, result("a")])[:2] == [USER, odd]
    with pytest.raises(RequestError, match="refused the conversation"):
        render("{{ raise_exception('never') }}", USER)


def test_rendering_does_not_mutate_messages() -> None:
    messages = [SYSTEM, USER, calling(call("a"), call("b")), result("a"), LATE, USER]
    before = json.dumps(messages)
    for template in (IDS, SINGLE, SYSTEM_FIRST, ALTERNATING):
        render(template, *messages)
    assert json.dumps(messages) == before


@pytest.mark.turn(12)
def test_message_with_many_tool_calls_takes_linear_time() -> None:
    count = 20_000  # comparing all pairs would take minutes
    calls = [call(f"call_{number}") for number in range(count)]
    results = [result(f"call_{number}", str(number)) for number in reversed(range(count))]
    told = with_single_calls(with_short_ids([calling(*calls), *results]))
    assert [message["content"] for message in told if message["role"] == "tool"] == [str(n) for n in range(count)]


@pytest.mark.parametrize("odd", [7, ["a"], {"a": 1}])
def test_non_string_tool_call_ids_are_matched(odd: Any) -> None:
    chat = [{**calling(call("x"), call("y"))}, result("y"), {**result("x"), "tool_call_id": odd}]
    chat[0]["tool_calls"][0]["id"] = odd
    told = with_short_ids(chat)
    assert told[2]["tool_call_id"] == told[0]["tool_calls"][0]["id"] != told[1]["tool_call_id"]
    assert [each["role"] for each in with_single_calls(chat)] == ["assistant", "tool", "assistant", "tool"]
