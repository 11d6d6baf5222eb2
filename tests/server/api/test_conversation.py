"""A conversation becomes the same prompt on every route, in the form that its chat template requires."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from fakes import make_engine
from running import run_server

from octavo.engine.chat_template import ChatTemplate

if TYPE_CHECKING:
    from collections.abc import Iterator

    from running import Running

# A strict template: roles must alternate, a call without text has its own form, and only users' messages may have
# parts. Its <tool_call> makes the server detect the format of calls.
STRICT = """\
{%- set ns = namespace(index=0) -%}
{%- for m in messages -%}
    {%- if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) -%}
        {%- if (m.role == 'user') != (ns.index % 2 == 0) -%}
            {{- raise_exception('conversation roles must alternate') -}}
        {%- endif -%}
        {%- set ns.index = ns.index + 1 -%}
    {%- endif -%}
    <{{ m.role }}>
    {%- if m.role == 'user' and m.content is not string -%}
        {%- for each in m.content -%}[{{ each.text }}]{%- endfor -%}
    {%- else -%}{{ '-' if m.content is none else m.content }}{%- endif -%}
    {%- for each in m.tool_calls or [] -%}<tool_call>{{ each.function.arguments | tojson }}{%- endfor -%}
{%- endfor -%}
<answer>"""
PROMPT = (
    '<system>Be brief.\nBe kind.<user>[How is Rome?][Now?]<assistant>-<tool_call>{"city": "Röme"}'
    "<tool>sunny\n21 °C\n\nAnd tomorrow?<answer>"
)
ARGUMENTS = '{"city": "Röme"}'
TOOL: dict[str, Any] = {"name": "weather", "parameters": {"type": "object"}}


class Template(ChatTemplate):
    """Keeps the last prompt."""

    def render(self, messages: Any, **options: Any) -> str:
        self.prompt = super().render(messages, **options)
        return self.prompt


@pytest.fixture(scope="module")
def template() -> Template:
    return Template(STRICT)


@pytest.fixture(scope="module")
def running(template: Template) -> Iterator[Running]:
    with run_server(engine_options={"chat_template": template}) as running:
        yield running


def text_parts(*texts: str, kind: str = "text") -> list[dict[str, str]]:
    return [{"type": kind, "text": text} for text in texts]


CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": text_parts("Be brief.", "Be kind.")},
    {"role": "user", "content": text_parts("How is Rome?", "Now?")},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None, "audio": None, "function_call": None},
    {"role": "tool", "tool_call_id": "c1", "content": text_parts("sunny", "21 °C")},
    {"role": "user", "content": "And tomorrow?"},
]
BLOCKS: dict[str, Any] = {
    "system": text_parts("Be brief.", "Be kind."),
    "messages": [
        {"role": "user", "content": "How is Rome?"},
        {"role": "user", "content": text_parts("Now?")},
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Röme"}}],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": text_parts("sunny", "21 °C")},
                *text_parts("And tomorrow?"),
            ],
        },
    ],
}
ITEMS = [
    {"role": "developer", "content": text_parts("Be brief.", "Be kind.", kind="input_text")},
    {"role": "user", "content": text_parts("How is Rome?", "Now?", kind="input_text")},
    {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": ARGUMENTS},
    {"type": "function_call_output", "call_id": "c1", "output": text_parts("sunny", "21 °C", kind="input_text")},
    {"role": "user", "content": "And tomorrow?"},
]
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 1, "tools": [{"type": "function", "function": TOOL}]},
    "/tokenize": {"messages": MESSAGES},
    "/v1/messages": {
        "model": "fake",
        "max_tokens": 1,
        **BLOCKS,
        "tools": [{"name": "weather", "input_schema": {"type": "object"}}],
    },
    "/v1/messages/count_tokens": {"model": "fake", **BLOCKS},
    "/v1/responses": {"input": ITEMS, "max_output_tokens": 1, "tools": [{"type": "function", **TOOL}]},
    "/v1/responses/input_tokens": {"input": ITEMS},
}


@pytest.mark.parametrize("route", ROUTES)
def test_every_route_renders_equal_prompt(running: Running, template: Template, route: str) -> None:
    template.prompt = ""
    with running.http() as http:
        response = http.post(route, json=ROUTES[route])
    assert response.status_code == 200, response.text
    assert template.prompt == PROMPT


def test_offline_chat_renders_equal_prompt() -> None:
    engine = make_engine(chat_template=ChatTemplate(STRICT))
    assert engine.input_processor.chat_prompt(MESSAGES)["prompt"] == PROMPT


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"content": [{"type": "refusal", "refusal": "No."}]}, "No."),
        ({"content": [*text_parts("Well."), {"type": "refusal", "refusal": "No."}]}, "Well.\nNo."),
        ({"content": None, "refusal": "No."}, "No."),
        ({"content": "Well.", "refusal": "No."}, "Well.\nNo."),
        ({"content": text_parts("Well."), "refusal": None}, "Well."),
    ],
)
def test_refusal_content_is_rendered_as_text(
    running: Running, template: Template, message: dict[str, Any], said: str
) -> None:
    user = {"role": "user", "content": "a"}
    messages = [user, {"role": "assistant", **message}, user]
    with running.http() as http:
        assert http.post("/tokenize", json={"messages": messages}).status_code == 200
        assert template.prompt == f"<user>a<assistant>{said}<user>a<answer>"
        if "refusal" not in message:
            kinds = {"text": "output_text", "refusal": "refusal"}
            parts = [{**part, "type": kinds[part["type"]]} for part in message["content"]]
            items = [user, {"type": "message", "role": "assistant", "content": parts}, user]
            assert http.post("/v1/responses/input_tokens", json={"input": items}).status_code == 200
            assert template.prompt == f"<user>a<assistant>{said.replace(chr(10), '')}<user>a<answer>"


@pytest.mark.parametrize(
    ("message", "parameter"),
    [
        ({"role": "user", "content": [{"type": "refusal", "refusal": "No."}]}, "messages[0].content[0]"),
        ({"role": "assistant", "content": [{"type": "refusal"}]}, "messages[0].content[0].refusal"),
        ({"role": "assistant", "content": None, "refusal": 7}, "messages[0].refusal"),
        ({"role": "assistant", "content": None, "audio": {"id": "a"}}, "messages[0].audio"),
        ({"role": "assistant", "content": None, "function_call": {"name": "f"}}, "messages[0].function_call"),
        (
            {"role": "assistant", "tool_calls": [{"type": "custom", "id": "a", "custom": {"name": "f", "input": ""}}]},
            "messages[0].tool_calls[0]",
        ),
        ({"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "file", "file": {}}]}, "messages[0].content[0]"),
    ],
)
def test_non_text_content_is_refused_by_parameter_path(
    running: Running, message: dict[str, Any], parameter: str
) -> None:
    with running.http() as http:
        for route in ("/v1/chat/completions", "/tokenize"):
            response = http.post(route, json={"messages": [message]})
            assert response.status_code == 400
            assert response.json()["error"]["param"] == parameter
