"""Chat templates: the text of every conversation equals that of `apply_chat_template` in transformers."""

import itertools
import json
import sys
from datetime import datetime

import pytest
from sdks import transformers
from tokenizers import Tokenizer, models

from octavo.engine.chat_template import ChatTemplate
from octavo.errors import ModelError, RequestError

CHATML = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0]['role'] == 'system' %}
        {{- messages[0]['content'] }}
    {%- else %}
        {{- 'You are helpful.' }}
    {%- endif %}
    {{- "\\n\\n# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0]['role'] != 'system' %}
    {{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "tool" %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
        {%- continue %}
    {%- endif %}
    {{- '<|im_start|>' + message.role }}
    {%- if message.reasoning_content is defined and enable_thinking is not false %}
        {{- '\\n<think>' + message.reasoning_content + '</think>' }}
    {%- endif %}
    {%- if message.content %}
        {{- '\\n' + message.content }}
    {%- endif %}
    {%- for tool_call in message.tool_calls or [] %}
        {{- '\\n<tool_call>\\n{"name": "' }}
        {{- tool_call.function.name }}
        {{- '", "arguments": ' }}
        {{- tool_call.function.arguments | tojson(indent=1) }}
        {{- '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

LLAMA3 = """\
{{- bos_token }}
{%- set date_string = strftime_now("%d %b %Y") if not date_string is defined else date_string %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: " + date_string + "\\n\\n" }}
{{- system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

MISTRAL = """\
{{ bos_token }}{% for message in messages %}
{% if message['role'] == 'system' %}
    {% if not loop.first %}
        {{ raise_exception('Only the first message may be a system message') }}
    {% endif %}
    {% set ns = namespace(system=message['content']) %}
{% elif message['role'] == 'user' %}
{{ '[INST] ' + message['content'] + ' [/INST]' }}
{% elif message['role'] == 'assistant' %}
{% generation %}{{ ' ' + message['content'] + eos_token }}{% endgeneration %}
{% else %}
    {{ raise_exception('Only system, user and assistant roles are supported!') }}
{% endif %}
{% endfor %}
"""

# Iterates over the parts of a message itself.
PARTS = """\
{%- for message in messages %}
    {{- '<' + message.role + '>' }}
    {%- if message.content is string %}
        {{- message.content }}
    {%- else %}
        {%- for part in message['content'] %}
            {%- if part.type == 'text' %}{{- '[' + part.text + ']' }}{%- endif %}
        {%- endfor %}
    {%- endif %}
{%- endfor %}
"""

TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "mistral": MISTRAL, "parts": PARTS}
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
USER = {"role": "user", "content": "  Was heißt <b>\"naïve\"</b> & 'so'?  "}
CONVERSATIONS = {
    "one": [USER],
    "system": [{"role": "system", "content": "Be brief. "}, USER],
    "turns": [USER, {"role": "assistant", "content": "Well: "}, {"role": "user", "content": "Go on"}],
    "nulls": [USER | {"name": None}, {"role": "assistant", "content": "x", "tool_calls": None}],
    "reasoning": [USER, {"role": "assistant", "content": "2", "reasoning": "1 + 1"}],
    "calls": [
        USER,
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": "f", "arguments": {"ü": [1, 2.5, None]}}}],
        },
        {"role": "tool", "content": "<ok>"},
    ],
}
TOOLS = [{"type": "function", "function": {"name": "f", "description": "ä <x>", "parameters": {"b": 1, "a": [True]}}}]


@pytest.fixture(scope="module")
def oracle():
    backend = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1}, unk_token="<s>"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **SPECIAL)


def both(oracle, template, messages, **options):
    """Return our text after checking that it equals that of transformers."""
    text = ChatTemplate(template, SPECIAL).render(messages, **options)
    options = {"add_generation_prompt": True} | options
    assert text == oracle.apply_chat_template(messages, chat_template=template, tokenize=False, **options)
    return text


@pytest.mark.sweep(16)
@pytest.mark.parametrize(
    ("name", "conversation"),
    # Mistral's template refuses tools: see test_template_errors_become_request_errors.
    [pair for pair in itertools.product(TEMPLATES, CONVERSATIONS) if pair != ("mistral", "calls")],
)
def test_rendered_conversations_equal_transformers(name, conversation, oracle):
    messages = CONVERSATIONS[conversation]
    options = {"date_string": "26 Jul 2024"}
    both(oracle, TEMPLATES[name], messages, **options)
    both(oracle, TEMPLATES[name], messages, add_generation_prompt=False, **options)


def test_tools_render_as_in_transformers(oracle):
    text = both(oracle, CHATML, CONVERSATIONS["system"], tools=TOOLS)
    assert '{"type": "function", "function": {"name": "f", "description": "ä <x>"' in text


def test_enable_thinking_reaches_template_as_in_transformers(oracle):
    with_thoughts = both(oracle, CHATML, CONVERSATIONS["reasoning"])
    without = both(oracle, CHATML, CONVERSATIONS["reasoning"], enable_thinking=False)
    assert "<think>1 + 1</think>" in with_thoughts
    assert "<think>" not in without


def test_template_gets_bos_token_of_tokenizer():
    assert ChatTemplate(LLAMA3, SPECIAL).render([USER], date_string="x").startswith("<s><|start")
    assert ChatTemplate(LLAMA3, SPECIAL).render([USER], date_string="x", bos_token="<B>").startswith("<B><|start")
    assert ChatTemplate(LLAMA3).render([USER], date_string="x").startswith("<|start")


def test_strftime_now_uses_injected_clock():
    template = ChatTemplate(LLAMA3, SPECIAL, now=lambda: datetime(2024, 7, 26))  # noqa: DTZ001 - local time, as shown
    assert "Today Date: 26 Jul 2024" in template.render([USER])


@pytest.mark.parametrize("content", ["It begins", "It begins ", "  "])
@pytest.mark.parametrize("name", ["chatml", "llama3"])
def test_continue_final_message_equals_transformers(name, content, oracle):
    messages = [USER, {"role": "assistant", "content": content}]
    options = {"continue_final_message": True, "add_generation_prompt": False, "date_string": "x"}
    text = both(oracle, TEMPLATES[name], messages, **options)
    assert text.rstrip().endswith(content.strip())


def test_continue_final_message_supports_text_parts(oracle):
    messages = [USER, {"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    text = both(oracle, PARTS, messages, continue_final_message=True, add_generation_prompt=False)
    assert text.endswith("<assistant>[a][b")


def test_final_message_that_cannot_be_continued_is_refused():
    chatml = ChatTemplate(CHATML, SPECIAL)
    for messages, options, words in (
        ([USER], {}, "exclude each other"),
        ([{"role": "assistant"}], {"add_generation_prompt": False}, "last message with text"),
    ):
        with pytest.raises(RequestError, match=words):
            chatml.render(messages, continue_final_message=True, **options)
    with pytest.raises(RequestError, match="does not show the last message"):
        ChatTemplate("{{ messages[0].role }}").render([USER], continue_final_message=True, add_generation_prompt=False)


def test_text_parts_are_rendered_and_image_parts_refused(oracle):
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [{"role": "user", "content": parts}]
    assert both(oracle, PARTS, messages) == "<user>[one][two]"
    assert "user\none\ntwo<|im_end|>" in ChatTemplate(CHATML, SPECIAL).render(messages)
    assert parts == [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    with pytest.raises(RequestError, match="image_url"):
        ChatTemplate(PARTS).render([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "at least one message"),
        ("hello", "must be a list"),
        ({"role": "user"}, "must be a list"),
        (["hello"], r"messages\[0\] must be an object"),
        ([USER, {"content": "x"}], r"messages\[1\] must be an object with a role"),
        ([{"role": "user", "content": 5}], r"messages\[0\]\.content must be text"),
        ([{"role": "user", "content": "x", "extra": object()}], "only, got object"),
        ([{"role": "user", "content": b"x"}], "only, got bytes"),
    ],
)
def test_malformed_messages_are_refused(messages, words):
    with pytest.raises(RequestError, match=words) as caught:
        ChatTemplate(CHATML).render(messages)
    assert caught.value.parameter == "messages"


@pytest.mark.sweep(12)
@pytest.mark.parametrize(
    ("template", "words"),
    [
        (MISTRAL, "Only system, user and assistant roles are supported!"),
        ("{{ messages[7].role.x }}", "refused the conversation"),
        ("{{ 1 / 0 }}", "division"),
        ("{{ messages + 1 }}", "refused"),
        ("{{ messages[0].nothing.more }}", "no attribute 'nothing'"),
        ("{% set a = [] %}{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ range(999999999) }}", "Range too big"),
        ("{% include 'x' %}", "refused"),
    ],
)
def test_template_errors_become_request_errors(template, words):
    with pytest.raises(RequestError, match=words) as caught:
        ChatTemplate(template, SPECIAL).render([{"role": "ipython", "content": "x"}])
    assert caught.value.parameter == "messages"


def test_broken_chat_template_is_refused():
    with pytest.raises(RequestError, match="the chat template is broken") as caught:
        ChatTemplate("{% for %}").render([USER])
    assert caught.value.parameter == "chat_template"


def test_request_may_name_or_supply_chat_template():
    template = ChatTemplate({"default": "D", "other": "O"})
    assert template.render([USER]) == "D"
    assert template.render([USER], chat_template="other") == "O"
    assert template.render([USER], chat_template="{{ messages[0].role }}") == "user"


def write(directory, config=None, **files):
    if config is not None:
        (directory / "tokenizer_config.json").write_text(json.dumps(config))
    for name, text in files.items():
        path = directory / name.replace("__", "/")
        path.parent.mkdir(exist_ok=True)
        path.with_suffix(".jinja").write_text(text, encoding="utf-8")
    return directory


def test_from_directory_finds_templates_in_config_and_files(tmp_path):
    assert ChatTemplate.from_directory(tmp_path) is None
    write(tmp_path, {"bos_token": "<s>"})
    assert ChatTemplate.from_directory(tmp_path) is None
    write(tmp_path, {"chat_template": "config ü"})
    assert ChatTemplate.from_directory(tmp_path).render([USER]) == "config ü"
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    write(tmp_path, {"chat_template": named})
    assert ChatTemplate.from_directory(tmp_path).render([USER]) == "plain"
    assert ChatTemplate.from_directory(tmp_path).render([USER], tools=TOOLS) == "tools"
    write(tmp_path, chat_template="file ü", additional_chat_templates__rag="rag")
    template = ChatTemplate.from_directory(tmp_path)
    assert template.templates == {"default": "file ü", "rag": "rag"}
    assert template.render([USER], chat_template="rag") == "rag"
    write(tmp_path, {"chat_template": [{"name": "rag", "template": "x"}]})
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(RequestError, match="name one of rag") as caught:
        ChatTemplate.from_directory(tmp_path).render([USER])
    assert caught.value.parameter == "chat_template"


@pytest.mark.parametrize("value", [5, [1], [{"name": "default"}], [{"name": "default", "template": 1}]])
def test_invalid_chat_template_entry_is_refused(value, tmp_path):
    write(tmp_path, {"chat_template": value})
    with pytest.raises(ModelError, match="chat_template must be a string or a list"):
        ChatTemplate.from_directory(tmp_path)


def test_template_file_that_is_not_utf8_is_refused(tmp_path):
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ModelError, match=r"chat_template\.jinja is not UTF-8"):
        ChatTemplate.from_directory(tmp_path)


def test_message_nested_too_deep_is_refused(tmp_path):
    deep = []
    for _ in range(sys.getrecursionlimit()):
        deep = [deep]
    write(tmp_path, {"chat_template": "{{ messages[0].content }}"})
    with pytest.raises(RequestError, match="nested too deep"):
        ChatTemplate.from_directory(tmp_path).render([{**USER, "x": deep}])


LOOPS_OVER_TOOLS = "<tools>{% for tool in tools %}{{ tool.function.name }}{% endfor %}</tools>{{ messages[0].content }}"


@pytest.mark.parametrize(
    ("source", "plain"),
    [
        (LOOPS_OVER_TOOLS, "<tools></tools>Hello"),  # like the tool templates of Hermes and Command R
        ("{{ tools is none }}{{ messages[0].content }}", "TrueHello"),  # as in transformers
        ("{% if tools is defined %}{{ tools | length }}{% endif %}{{ messages[0].content }}", "0Hello"),
    ],
)
def test_template_that_rejects_null_tools_gets_empty_list(source: str, plain: str) -> None:
    template = ChatTemplate(source)
    message = {"role": "user", "content": "Hello"}
    assert template.render([message]) == plain
    assert "look" in ChatTemplate(LOOPS_OVER_TOOLS).render([message], tools=[{"function": {"name": "look"}}])


def test_empty_tools_do_not_bypass_refusal_by_template() -> None:
    refuses = "{{ raise_exception('Tools, please') if not tools }}{{ messages[0].content }}"
    with pytest.raises(RequestError, match="Tools, please"):
        ChatTemplate(refuses).render([{"role": "user", "content": "Hello"}])
