"""Small rendered messages show what form a template needs, and conversations are brought into that form."""

import pytest

from octavo.engine.chat_template import ChatTemplate
from octavo.engine.template_traits import TemplateTraits
from octavo.errors import RequestError

PARTS = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
USER = {"role": "user", "content": "hi"}
CALL = {"id": "abcdef123", "type": "function", "function": {"name": "f", "arguments": '{"city": "Röme"}'}}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "abcdef123", "content": "sunny"}

PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
# Like Kimi K2's: a macro iterates over the parts, with names of its own.
MACRO = """\
{%- macro render(body) -%}
    {%- if body is string -%}{{ body }}{%- else -%}
        {%- for each in body -%}{{ each['text'] if each['type'] == 'text' }}{%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- for m in messages -%}<{{ m.role }}>{{ render(m['content']) }}{%- endfor -%}"""
# Like Llama Guard's: text that is not a part is lost.
GUARD = """\
{%- for m in messages -%}
<{{ m.role }}>{{ m.content | selectattr('type', 'equalto', 'text') | map(attribute='text') | join(' ') }}
{%- endfor -%}"""
JSON = "{% for m in messages %}<{{ m.role }}>{{ m.content | tojson }}{% endfor %}"
# Reads only the parts of users, and does not show parts in their text.
USERS = """\
{%- for m in messages -%}
<{{ m.role }}>{% if m.role == 'user' and m.content is not string %}{{ m.content | map(attribute='text') | join('+') }}
{%- else %}{{ '' + m.content }}{% endif %}
{%- endfor -%}"""


def render(template, messages, **options):
    return ChatTemplate(template).render(messages, **options)


@pytest.mark.parametrize(
    ("template", "user", "system"),
    [
        (PLAIN, "<user>one\ntwo", "<system>one\ntwo"),
        (MACRO, "<user>onetwo", "<system>onetwo"),
        (GUARD, "<user>one two", "<system>one two"),
        (JSON, '<user>"one\\ntwo"', '<system>"one\\ntwo"'),
        (USERS, "<user>one+two", "<system>one\ntwo"),
    ],
)
def test_content_parts_follow_form_that_template_reads(template, user, system):
    assert render(template, [{"role": "user", "content": PARTS}]) == user
    assert render(template, [{"role": "system", "content": PARTS}, USER]).startswith(system)
    nobody_knows = render(template, [USER, {"role": "critic", "content": PARTS}])
    assert ("one\ntwo" in nobody_knows or "one\\ntwo" in nobody_knows) == (template != GUARD)


@pytest.mark.parametrize("template", [PLAIN, MACRO, GUARD, JSON, USERS])
def test_plain_text_content_is_never_lost(template):
    messages = [{"role": "system", "content": "rules"}, USER, {"role": "assistant", "content": "well"}, USER]
    text = render(template, messages)
    for said in ("rules", "hi", "well"):
        assert said in text
    assert render(template, [{"role": "user", "content": []}]) == render(template, [{"role": "user", "content": ""}])


CALLS = "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}"
LOOP = "{% for m in messages %}<{{ m.role }}>BODY{% endfor %}"


@pytest.mark.parametrize(
    ("body", "from_null", "from_empty"),
    [
        ("{{ m.content if m.content is not none else '-' }}CALLS", "-", ""),  # null has a form of its own
        ("{{ m.content }}CALLS", "", ""),  # prints None
        ("{{ m.content | tojson }}CALLS", '""', '""'),  # prints null
        ("{{ m['content'] + '' }}CALLS", "", ""),  # refuses null and missing content
        ("{% if m.content is none %}CALLS{% else %}{{ m.content + '' }}{% endif %}", "", ""),  # loses others' calls
        ("{% if 'content' in m %}{{ m.content + '' }}{% else %}CALLS{% endif %}", "", ""),
    ],
)
def test_tool_call_without_text_gets_content_that_template_accepts(body, from_null, from_empty):
    template = LOOP.replace("BODY", body.replace("CALLS", CALLS))
    called = '[f {"city": "Röme"}]'
    for content, spelled in ((None, from_null), ("", from_empty)):
        text = render(template, [USER, {**CALLING, "content": content}, RESULT])
        assert f"<assistant>{spelled}{called}<tool>" in text
    without = {key: value for key, value in CALLING.items() if key != "content"}
    assert f"<assistant>{from_null}{called}<tool>" in render(template, [USER, without, RESULT])


def test_null_content_without_tool_calls_becomes_empty():
    template = "{% for m in messages %}<{{ m.content + '' }}>{% endfor %}"
    for content in ({}, {"content": None}, {"content": []}):
        assert render(template, [USER, {"role": "assistant", **content}]) == "<hi><>"


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ("c.function.arguments | tojson", '{"city": "Röme"}'),
        ("c.function.arguments.city or c.function.arguments.items() | list | string", "Röme"),
        ("'' + c.function.arguments", '{"city": "Röme"}'),  # an object cannot be added to text
        ("c.function.arguments", '{"city": "Röme"}'),  # an object would be printed in Python's form
    ],
)
def test_tool_arguments_have_form_that_template_reads(arguments, shown):
    template = "{% for m in messages %}{% for c in m.tool_calls or [] %}[{{ ARGS }}]{% endfor %}{% endfor %}"
    as_object = {**CALLING, "tool_calls": [{**CALL, "function": {"name": "f", "arguments": {"city": "Röme"}}}]}
    for message in (CALLING, as_object):
        assert render(template.replace("ARGS", arguments), [USER, message, RESULT]) == f"[{shown}]"


# Like Mistral's: messages that are neither calls nor results alternate.
ALTERNATING = """\
{%- set ns = namespace(index=0) -%}
{%- for m in messages -%}
    {%- if m.role == 'user' or (m.role == 'assistant' and m.tool_calls is undefined) -%}
        {%- if (m.role == 'user') != (ns.index % 2 == 0) -%}
            {{- raise_exception('conversation roles must alternate') -}}
        {%- endif -%}
        {%- set ns.index = ns.index + 1 -%}
    {%- endif -%}
    <{{ m.role }}>{{ m.content or '' }}
{%- endfor -%}"""
# Like Gemma's: users and assistants, and no other roles.
TWO_ROLES = """\
{%- for m in messages -%}
    {%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}
        {{- raise_exception('conversation roles must alternate') -}}
    {%- endif -%}
    <{{ m.role }}>{{ m.content }}
{%- endfor -%}"""


def test_consecutive_turns_are_joined_if_template_requires_it():
    twice = [USER, {"role": "user", "content": PARTS}, {"role": "assistant", "content": "a"}]
    twice += [{"role": "assistant", "content": "b", "reasoning": "Hm."}, USER]
    for template in (ALTERNATING, TWO_ROLES):
        assert render(template, twice) == "<user>hi\n\none\ntwo<assistant>a\n\nb<user>hi"
    assert render(PLAIN, twice) == "<user>hi<user>one\ntwo<assistant>a<assistant>b<user>hi"
    assert twice[0] == USER
    thoughts = "{{ messages | map(attribute='reasoning_content', default='') | join }}"
    assert render(ALTERNATING + thoughts, twice).endswith("Hm.")


def test_turn_with_tool_calls_is_not_joined():
    said = {"role": "assistant", "content": "I look."}
    template = ALTERNATING.replace("or '' }}", "or '' }}" + CALLS)
    text = render(template, [USER, said, CALLING, RESULT, USER])
    assert text == '<user>hi<assistant>I look.<assistant>[f {"city": "Röme"}]<tool>sunny<user>hi'


def test_user_text_after_tool_result_is_joined_if_template_requires_it():
    messages = [USER, CALLING, RESULT, RESULT, {"role": "user", "content": PARTS}, USER]
    assert render(ALTERNATING, messages) == "<user>hi<assistant><tool>sunny<tool>sunny\n\none\ntwo\n\nhi"
    loop = [*messages, {"role": "assistant", "content": "ok"}, USER]
    assert render(ALTERNATING, loop).endswith("hi<assistant>ok<user>hi")
    assert render(PLAIN, messages).endswith("<tool>sunny<user>one\ntwo<user>hi")
    with pytest.raises(RequestError, match="must alternate"):  # this template does not know results at all
        render(TWO_ROLES, messages)


def test_continue_final_message_works_after_joined_turns():
    messages = [USER, {"role": "assistant", "content": "It"}, {"role": "assistant", "content": "is"}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert render(ALTERNATING, messages, **options) == "<user>hi<assistant>It\n\nis"


@pytest.mark.sweep(12)
@pytest.mark.parametrize(
    "template",
    [
        "{{ 1 / 0 }}",
        "{{ messages.append(1) }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ messages[9].content }}",
        "{{ tools[0] + 1 }}",
        "{{ raise_exception('no') }}",
        "{% include 'x' %}",
        "{{ range(999999999) }}",
        "",
    ],
)
def test_template_that_renders_nothing_has_default_traits(template):
    compiled = ChatTemplate(template)._find(None, has_tools=False)
    assert compiled.traits == TemplateTraits(null_content="null" if template == "" else "empty")


def test_finding_traits_renders_few_conversations():
    looked_at = []
    TemplateTraits.find(looked_at.append)
    assert 10 < len(looked_at) < 30


def test_traits_are_computed_once(monkeypatch):
    found = []
    find = TemplateTraits.find
    monkeypatch.setattr(TemplateTraits, "find", lambda render: found.append(find(render)) or found[-1])
    chat = ChatTemplate(PLAIN)
    assert not found
    for _ in range(3):
        chat.render([USER])
    assert len(found) == 1


def test_template_that_needs_tools_is_probed_with_one():
    template = "{{ tools | length }}" + MACRO
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    assert render(template, [{"role": "user", "content": PARTS}], tools=[tool]) == "1<user>onetwo"
    assert render(template, [USER]).startswith("0<user>")  # an empty list counts as no tools


def test_literal_text_of_template_does_not_affect_traits():
    template = "None null {'" + LOOP.replace("BODY", "{{ m.content if m.content is not none else '-' }}" + CALLS)
    assert "<assistant>-[f" in render(template, [USER, CALLING, RESULT])
