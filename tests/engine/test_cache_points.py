"""Cache points of chats are where later prompts begin to differ."""

from __future__ import annotations

import pytest
from fakes import ByteTokenizer, make_engine

from octavo.engine.cache_points import shared_offsets, token_position
from octavo.engine.chat_template import ChatTemplate
from octavo.engine.input_processor import InputProcessor
from octavo.errors import RequestError

# Like Qwen3.5: an answer's prompt begins reasoning, and the next turn drops it.
REASONING = """\
{%- set ns = namespace(last=0) -%}
{%- for m in messages if m.role == 'user' -%}{%- set ns.last = messages.index(m) -%}{%- endfor -%}
{%- if tools -%}<tools>{{ tools | tojson }}</tools>{%- endif -%}
{%- for m in messages -%}
    <{{ m.role }}>
    {%- if m.role == 'assistant' and loop.index0 > ns.last -%}<think>{{ m.reasoning_content }}</think>{%- endif -%}
    {{- m.content }}{% if m.tool_calls %}<call>{% endif %}</s>
{%- endfor -%}
{%- if add_generation_prompt -%}<assistant><think>{%- endif -%}
"""
SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "How is Rome?"}
ANSWER = {"role": "assistant", "content": "Sunny.", "reasoning_content": "It is summer."}
CALL = {"function": {"name": "look", "arguments": {}}, "type": "function", "id": "call00001"}
CALLING = {**ANSWER, "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "sunny", "tool_call_id": "call00001"}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]


@pytest.fixture(scope="module")
def template():
    return ChatTemplate(REASONING)


def prefixes(template, messages, **options):
    text = template.render(messages, **options)
    offsets = shared_offsets(lambda others: template.render(others, **options), messages, text)
    return [text[:offset] for offset in offsets]


def test_points_are_end_of_system_prompt_and_of_last_user_turn(template):
    system = "<system>Be brief.</s><user>"
    last = "<system>Be brief.</s><user>How is Rome?</s><assistant>"
    assert prefixes(template, [SYSTEM, USER]) == [system, last]
    told = [SYSTEM, USER, ANSWER, {**USER, "content": "And now?"}]
    assert prefixes(template, told) == [system, f"{last}Sunny.</s><user>And now?</s><assistant>"]


def test_tools_belong_to_system_prompt(template):
    first, _ = prefixes(template, [SYSTEM, USER], tools=TOOLS)
    assert first.startswith("<tools>")
    assert first.endswith("</tools><system>Be brief.</s><user>")


def test_tool_results_have_points_for_next_turn_and_for_this_turn(template):
    system, user, result = prefixes(template, [SYSTEM, USER, CALLING, RESULT])
    assert (system, user) == ("<system>Be brief.</s><user>", "<system>Be brief.</s><user>How is Rome?</s><assistant>")
    assert result == f"{user}<think>It is summer.</think>Sunny.<call></s><tool>sunny"


def test_prompt_that_the_next_turn_keeps_has_its_end_as_point():
    template = ChatTemplate("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>")
    assert prefixes(template, [USER])[-1] == "<user>How is Rome?<assistant>"


def test_begun_answer_has_points_for_next_turn_and_at_its_end(template):
    begun = [USER, {"role": "assistant", "content": "Sun", "reasoning_content": ""}]
    text = template.render(begun, add_generation_prompt=False, continue_final_message=True)
    user = "<user>How is Rome?</s><assistant>"
    assert [text[:offset] for offset in shared_offsets(template.render, begun, text)] == [
        "<user>",
        user,
        f"{user}<think></think>Sun",
    ]


def test_refused_comparisons_give_no_points():
    template = ChatTemplate(
        "{% if messages | length > 1 %}{{ raise_exception('no') }}{% endif %}{{ messages[0].role }}"
    )
    assert shared_offsets(template.render, [USER], "user") == [4]
    assert shared_offsets(template.render, [SYSTEM, USER], "user") == []


def test_position_is_counted_from_the_nearer_end():
    encoded = []

    def encode(text):
        encoded.append(text)
        return [*text]

    assert token_position("abcdefgh", 2, 8, encode) == 1
    assert token_position("abcdefgh", 7, 8, encode) == 6
    assert token_position("abcdefgh", 0, 8, encode) == 0
    assert encoded == ["ab", "h", ""]


def test_only_models_with_recurrent_layers_have_points(template, monkeypatch):
    rendered = []
    monkeypatch.setattr(template, "render", lambda *_args, **_options: rendered.append(1) or "text")
    engine = make_engine(chat_template=template)
    assert engine.input_processor.chat_prompt([USER])["cache_points"] == ()
    assert len(rendered) == 1
    engine = make_engine(chat_template=template, model_info={"has_recurrent_layers": True})
    assert engine.input_processor.chat_prompt([USER])["cache_points"]
    assert len(rendered) == 1 + 3


def test_points_reach_the_core_and_do_not_change_tokens(template):
    engine = make_engine(chat_template=template, model_info={"has_recurrent_layers": True})
    prompt = engine.input_processor.chat_prompt([SYSTEM, USER], tools=TOOLS)
    processed = engine.input_processor.process("r", prompt)
    assert processed.prompt_token_ids == ByteTokenizer().encode(prompt["prompt"])
    assert [stream.cache_points for stream in processed.streams] == [prompt["cache_points"]]
    ends = [prompt["prompt"][:point] + prompt["prompt"][point] for point in prompt["cache_points"]]
    assert ends == prefixes(template, [SYSTEM, USER], tools=TOOLS)


def test_untokenizable_parts_give_no_points(template, monkeypatch):
    engine = make_engine(chat_template=template, model_info={"has_recurrent_layers": True})
    encode, whole = InputProcessor.encode, template.render([USER])

    def refuse(self, text, **options):
        if text != whole:
            raise RequestError("no place to cut it")
        return encode(self, text, **options)

    monkeypatch.setattr(InputProcessor, "encode", refuse)
    assert engine.input_processor.chat_prompt([USER])["cache_points"] == ()
