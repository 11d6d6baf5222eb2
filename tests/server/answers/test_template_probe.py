"""A chat template is probed by rendering a question and a call."""

from __future__ import annotations

from typing import Any

from octavo.errors import RequestError
from octavo.server.answers.answer_form import AnswerStyle
from octavo.server.answers.parts import THINK
from octavo.server.answers.template_probe import NAME, TemplateProbe
from octavo.server.answers.tool_formats import HermesFormat


def template(*, tells_tools: bool = True, takes_calls: bool = True, takes_any: bool = True) -> Any:
    """Return a function that renders messages as `role: content` lines."""

    def render(messages: list[dict[str, Any]], *, tools: list[dict[str, Any]], add_generation_prompt: bool) -> str:
        if not takes_any or (len(messages) > 1 and not takes_calls):
            raise RequestError("refused")
        text = f"tools: {tools[0]['function']['name']}\n" if tells_tools else ""
        for message in messages:
            for call in message.get("tool_calls", ()):
                text += f"assistant: <{call['function']['name']}>\n"
            text += f"{message['role']}: {message['content']}\n" if message["content"] else ""
        return text + ("assistant: " if add_generation_prompt else "")

    return render


def test_probe_extracts_prompt_and_call_from_template() -> None:
    probe = TemplateProbe.of(template())
    assert probe.prompt == f"tools: {NAME}\nuser: Question\nassistant: "
    assert probe.call == f"assistant: <{NAME}>\n"
    assert probe.texts == [probe.prompt, probe.call]
    assert probe.shows_tools


def test_call_begins_at_first_difference_from_question_alone() -> None:
    """Some templates end the last message, or the whole conversation, with a mark of its own."""

    def render(messages: list[dict[str, Any]], **_: Any) -> str:
        calls = [f"<call {call['function']['name']}>" for each in messages for call in each.get("tool_calls", ())]
        return "Question" + "".join(calls) + "<end of all messages>"

    probe = TemplateProbe.of(render)
    assert probe.call == f"call {NAME}><end of all messages>"  # both go on with the same bracket


def test_template_may_refuse_question_without_answer() -> None:
    def render(messages: list[dict[str, Any]], *, add_generation_prompt: bool = False, **_: Any) -> str:
        if len(messages) == 1 and not add_generation_prompt:
            raise RequestError("refused")
        return "Question"

    probe = TemplateProbe.of(render)
    assert (probe.prompt, probe.call, probe.texts) == ("Question", None, ["Question"])


def test_probe_renders_tool_and_call() -> None:
    """The names and values must be plain, because formats are compared with what templates make of them."""
    asked = []

    def render(messages: list[dict[str, Any]], **options: Any) -> str:
        asked.append((messages, options))
        return ""

    TemplateProbe.of(render)
    (first, second, third) = asked
    assert [options["add_generation_prompt"] for _, options in asked] == [True, False, False]
    assert first[0] == second[0] == third[0][:1] == [{"role": "user", "content": "Question"}]
    (call,) = third[0][1]["tool_calls"]
    assert call["function"] == {"name": "lookup", "arguments": {"city": "Rome", "days": 2}}
    assert len(call["id"]) == 9
    assert call["id"].isalnum()
    for _, options in asked:
        (tool,) = options["tools"]
        assert tool["function"]["parameters"]["required"] == ["city", "days"]


def test_probe_detects_template_without_tools() -> None:
    probe = TemplateProbe.of(template(tells_tools=False))
    assert probe.prompt == "user: Question\nassistant: "
    assert not probe.shows_tools


def test_probe_accepts_template_that_raises() -> None:
    probe = TemplateProbe.of(template(takes_calls=False))
    assert (probe.call, probe.texts) == (None, [probe.prompt])
    assert probe.shows_tools
    probe = TemplateProbe.of(template(takes_any=False))
    assert (probe.prompt, probe.call, probe.texts, probe.shows_tools) == (None, None, [], False)


def test_answer_style_summary_is_one_line() -> None:
    blind = " (the chat template tells the model of no tools)"
    assert AnswerStyle().summary == "tool calls: not known; reasoning: none"
    assert AnswerStyle(HermesFormat()).summary == f"tool calls: {HermesFormat.name}{blind}; reasoning: none"
    assert AnswerStyle(HermesFormat(), shows_tools=True).summary == f"tool calls: {HermesFormat.name}; reasoning: none"
    style = AnswerStyle(HermesFormat(), THINK, shows_tools=True)
    assert style.summary == f"tool calls: {HermesFormat.name}; reasoning: {THINK.name}"
