"""The grammars accept exactly the texts that the parsers read as calls."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from call_grammars import EOS, Grammars

from octavo.errors import RequestError
from octavo.sampling_params import StructuredOutputsParams
from octavo.server.answers.parts import joined
from octavo.server.answers.tool_format import Function
from octavo.server.answers.tool_formats import HermesFormat, LlamaFormat, MistralFormat, NamedMistralFormat
from octavo.server.answers.tools import Toolbox, read_function
from octavo.structured_output.lark import lark_json

if TYPE_CHECKING:
    from octavo.server.answers.tool_format import ToolFormat

CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
FUNCTIONS = [Function("weather", CITY), Function("now", NOTHING)]
MARKERS = ["[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<tool_call>", "</tool_call>", "<think>", "</think>", "<more>"]


@pytest.fixture(scope="module", params=["plain", "special", "added"])
def grammars(request: pytest.FixtureRequest) -> Grammars:
    return Grammars(request.param, MARKERS)


ROME, NOW = '{"name": "weather", "arguments": {"city": "Röme"}}', '{"name": "now", "arguments": {}}'
LLAMA_ROME, LLAMA_NOW = ROME.replace("arguments", "parameters"), NOW.replace("arguments", "parameters")
WRONG = '{"name": "weather", "arguments": {"town": "Rome"}}'
# one call, two calls, a call that violates the schema
FAMILIES: dict[type[ToolFormat], tuple[str, str, str]] = {
    HermesFormat: (
        f"<tool_call>\n{ROME}\n</tool_call>",
        f"<tool_call>\n{ROME}\n</tool_call>\n<tool_call>\n{NOW}\n</tool_call>",
        f"<tool_call>\n{WRONG}\n</tool_call>",
    ),
    LlamaFormat: (LLAMA_ROME, f"{LLAMA_ROME}; {LLAMA_NOW}", WRONG.replace("arguments", "parameters")),
    MistralFormat: (f"[TOOL_CALLS][{ROME}]", f"[TOOL_CALLS][{ROME}, {NOW}]", f"[TOOL_CALLS][{WRONG}]"),
    NamedMistralFormat: (
        '[TOOL_CALLS]weather[ARGS]{"city": "Röme"}',
        '[TOOL_CALLS]weather[ARGS]{"city": "Röme"}[TOOL_CALLS]now[ARGS]{}',
        '[TOOL_CALLS]weather[ARGS]{"town": "Rome"}',
    ),
}
each_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__)


@each_family
def test_forced_grammar_accepts_only_valid_calls(grammars: Grammars, family: type[ToolFormat]) -> None:
    one, two, wrong = FAMILIES[family]
    for only_one in (False, True):
        structure = StructuredOutputsParams(grammar=family(grammars.token_name).forced(FUNCTIONS, only_one=only_one))
        assert grammars.accepts(structure, one)
        assert grammars.accepts(structure, two) is not only_one
        for text in ("", "Hello.", wrong, "x" + one, one[:-1]):
            assert not grammars.accepts(structure, text), text


@each_family
def test_optional_grammar_accepts_text_or_valid_calls(grammars: Grammars, family: type[ToolFormat]) -> None:
    one, two, wrong = FAMILIES[family]
    for only_one in (False, True):
        structure = StructuredOutputsParams(grammar=family(grammars.token_name).optional(FUNCTIONS, only_one=only_one))
        for text in (one, "", "Hello.", "a < b [c]\n"):
            assert grammars.accepts(structure, text), text
        assert grammars.accepts(structure, two) is not only_one
        assert not grammars.accepts(structure, wrong)
        assert grammars.accepts(structure, "I look.\n" + one)
        assert not grammars.accepts(structure, "I look.\n" + wrong)


def test_only_strict_tools_are_limited_to_their_schemas(grammars: Grammars) -> None:
    """OpenAI's `strict` applies to one tool only: the schemas of the other tools may have no grammar."""
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    odd = {"type": "object", "properties": {"zone": {"type": "string", "pattern": "(?<=a)b"}}, "required": ["zone"]}
    strict, free = Function("weather", parameters, strict=True), Function("now", odd)
    tool_format = HermesFormat(grammars.token_name)

    def call(name: str, arguments: str) -> str:
        return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'

    structure = Toolbox.make([(strict, ""), (free, "")], tool_format).structure(None)
    assert structure is not None
    for text in (call("weather", '{"city": "Rome"}'), call("now", '{"zone": 7}'), call("now", "{}"), "Hello."):
        assert grammars.accepts(structure, text), text
    for text in (call("weather", '{"city": 7}'), call("weather", "{}"), call("now", "7"), call("then", "{}")):
        assert not grammars.accepts(structure, text), text
    assert Toolbox.make([(free, "")], tool_format).structure(None) is None


@each_family
def test_grammar_accepts_call_or_json_content(grammars: Grammars, family: type[ToolFormat]) -> None:
    one, _, wrong = FAMILIES[family]
    schema = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'
    structure = StructuredOutputsParams(
        grammar=family(grammars.token_name).or_content(FUNCTIONS, schema, only_one=False)
    )
    assert grammars.accepts(structure, one)
    assert grammars.accepts(structure, '{"a": 1}')
    for text in ("Hello.", wrong, '{"a": "b"}'):
        assert not grammars.accepts(structure, text), text


@each_family
def test_parsers_read_calls_that_grammars_accept(family: type[ToolFormat]) -> None:
    one, two, _ = FAMILIES[family]
    for text, names in ((one, ["weather"]), (two, ["weather", "now"])):
        parser = family().parser(FUNCTIONS)
        parts = joined(parser.feed(text) + parser.finish())
        assert [part.text for part in parts if part.kind == "call"] == names
        assert next(json.loads(part.text) for part in parts if part.kind == "arguments") == {"city": "Röme"}
        assert {part.kind for part in parts} == {"call", "arguments"}


@pytest.mark.parametrize(
    ("structure", "text"),
    [
        ({"json": CITY}, '{"city": "Rome"}'),
        ({"json_object": True}, "{}"),
        ({"regex": "[a-c]+"}, "abc"),
        ({"choice": ["yes", "no"]}, "no"),
        ({"grammar": 'start: "a" other\nother: "b"'}, "ab"),
        ({"grammar": 'root ::= "a" "b"'}, "ab"),
    ],
)
def test_structure_applies_only_after_starts_after_text(
    grammars: Grammars, structure: dict[str, Any], text: str
) -> None:
    behind = StructuredOutputsParams(**structure, starts_after="</think>")
    for free in ("</think>", "Hm, {<th\n\n狐</think>\n\n", "a </thi </think> "):
        assert grammars.accepts(behind, free + text), free
    for wrong in (text, "Hm.", "Hm.</think>", "Hm.</think>!" + text):
        assert not grammars.accepts(behind, wrong), wrong


@each_family
def test_grammar_accepts_reasoning_before_calls(grammars: Grammars, family: type[ToolFormat]) -> None:
    """A call within the reasoning is text."""
    one, _, wrong = FAMILIES[family]
    style = family(grammars.token_name)
    thought = "<think>\nI could write " + one[:14].replace("[TOOL_CALLS]", "[TOOL") + " now.\n</think>\n\n"
    for grammar in (style.forced(FUNCTIONS, only_one=False), style.optional(FUNCTIONS, only_one=False)):
        structure = StructuredOutputsParams(grammar=grammar, starts_after="</think>", free_from="<think>")
        assert grammars.accepts(structure, one)
        assert grammars.accepts(structure, thought + one)
        assert not grammars.accepts(structure, thought + wrong)
        assert not grammars.accepts(structure, "<think>" + one)


@each_family
def test_markers_with_token_are_refused_as_letters(grammars: Grammars, family: type[ToolFormat]) -> None:
    """Parsers read text, so a marker in letters would begin a call that no grammar has checked."""
    one, _, wrong = FAMILIES[family]
    style = family(grammars.token_name)
    has_token = grammars.kind != "plain" and family is not LlamaFormat  # Llama's calls need no marker
    forced = StructuredOutputsParams(grammar=style.forced(FUNCTIONS, only_one=False))
    optional = StructuredOutputsParams(grammar=style.optional(FUNCTIONS, only_one=False))
    for structure in (forced, optional):
        assert grammars.accepts(structure, one)
        assert grammars.accepts(structure, one, in_letters=True) is not has_token
        assert not grammars.accepts(structure, wrong, in_letters=True)
    assert grammars.accepts(optional, one[:5], in_letters=True) is (family is not LlamaFormat)
    thought = StructuredOutputsParams(regex="a", starts_after="</think>")
    assert grammars.accepts(thought, "<th</think>a")
    assert grammars.accepts(thought, "<th</think>a", in_letters=True) is (grammars.kind == "plain")
    assert not grammars.accepts(thought, "<th</think>b</think>a")


def test_llama_python_tag_token_may_precede_call(grammars: Grammars) -> None:
    style = LlamaFormat(grammars.token_name)
    for grammar in (style.forced(FUNCTIONS, only_one=True), style.optional(FUNCTIONS, only_one=True)):
        structure = StructuredOutputsParams(grammar=grammar)
        assert grammars.accepts(structure, "<|python_tag|>" + LLAMA_ROME) is (grammars.kind != "plain")
        for begin in ("\t", "\r\n", "<|python_tag|>", " <|python_tag|>"):  # skipped by the parser
            assert not grammars.accepts(structure, begin + WRONG.replace("arguments", "parameters"), in_letters=True)


def test_llama_grammar_accepts_tool_description_objects_as_text(grammars: Grammars) -> None:
    structure = StructuredOutputsParams(grammar=LlamaFormat(grammars.token_name).optional(FUNCTIONS, only_one=False))
    for text in ('{"name": "weather", "cost": 1}', '{"name": "now", "description": "tells", "parameters": {"a": 1}}'):
        assert grammars.accepts(structure, "They are: " + text), text
    for arguments in ('"parameters": {"city": "Rome"}', '"arguments" :{"city": "Rome"}'):
        assert grammars.accepts(structure, f'I look: {{"name": "weather", {arguments}}}'), arguments
        assert not grammars.accepts(structure, f'I look: {{"name": "now", {arguments}}}'), arguments


def test_schema_may_contain_marker_text_in_letters_only(grammars: Grammars) -> None:
    """It is allowed in letters only. The grammar must not offer the marker's token, which is not part of any text."""
    for marker in ("<think>", "<tool_call>", "<|endoftext|>"):
        quoted = json.dumps(marker)
        for structure in (
            {"json": {"const": marker}},
            {"choice": [quoted]},
            {"grammar": f"start: {json.dumps(quoted)}"},
        ):
            matcher = grammars.compile(StructuredOutputsParams(**structure))
            for token_id in grammars.plain.encode(quoted, add_special_tokens=False).ids:
                assert matcher.allowed()[token_id], structure
                matcher.advance([token_id])
            assert matcher.allowed()[EOS]
            if grammars.kind != "plain" and marker in MARKERS:
                assert not grammars.accepts(StructuredOutputsParams(**structure), quoted)


def test_reasoning_may_contain_every_token_except_eos(grammars: Grammars) -> None:
    structure = StructuredOutputsParams(regex="a", starts_after="</think>", free_from="<think>")
    assert grammars.accepts(structure, "<think>I <more> <tool_call> </tool_call><think>!\n</think>a")
    assert grammars.accepts(structure, "\n<think></think>\n\na")
    matcher = grammars.compile(structure)
    matcher.advance(grammars.tokenizer.encode("<think>I", add_special_tokens=False).ids)
    assert not matcher.allowed()[EOS]


@pytest.mark.parametrize("free_from", [None, "<think>"])
def test_grammar_limits_blanks_before_structure(grammars: Grammars, free_from: str | None) -> None:
    """Otherwise a small model fills its answer with blanks up to the token limit."""
    structure = StructuredOutputsParams(json=CITY, starts_after="</think>", free_from=free_from)
    begin = f"{free_from or ''}Hm.</think>"
    for count in range(7):
        assert grammars.accepts(structure, begin + "\n" * count + '{"city": "Rome"}') is (count < 5)
        assert grammars.accepts(structure, begin + "\u3000" * count + '{"city": "Rome"}') is (count == 0), "no JSON"
        assert grammars.accepts(structure, begin.replace("Hm", " " * count + "Hm") + '{"city": "Rome"}') is (count < 5)
        if free_from is not None:
            assert grammars.accepts(structure, "\n" * count + '{"city": "Rome"}') is (count < 5)


@pytest.mark.parametrize(
    "wanted", [{"choice": ["yes", "no"]}, {"regex": "yes|no"}, {"grammar": 'root ::= "yes" | "no"'}], ids=str
)
def test_structure_without_reasoning_allows_no_surrounding_blanks(grammars: Grammars, wanted: dict[str, Any]) -> None:
    """A client compares the content with its choices, so blanks around it would be wrong."""
    structure = StructuredOutputsParams(**wanted, starts_after="</think>", free_from="<think>")
    assert grammars.accepts(structure, "yes")
    assert grammars.accepts(structure, "<think>Hm.</think>\n\nno")  # the blanks belong to the reasoning
    assert grammars.accepts(structure, "\n<think>Hm.</think>no")
    for wrong in ("\nyes", "    no", " yes", "\n\n"):
        assert not grammars.accepts(structure, wrong), wrong


@each_family
def test_optional_grammar_limits_leading_blank_lines(grammars: Grammars, family: type[ToolFormat]) -> None:
    structure = StructuredOutputsParams(grammar=family(grammars.token_name).optional(FUNCTIONS, only_one=False))
    for count in range(1, 7):
        is_accepted = grammars.accepts(structure, "\n" * count + "Hello.\n\n\n\n\n\nYes.")
        assert is_accepted is (count < 5 and family is not LlamaFormat)
    assert grammars.accepts(structure, "Hello.\n\n\n\n\n\nYes.")


def test_grammar_mask_works_if_vocabulary_and_logit_sizes_differ(grammars: Grammars) -> None:
    """Some tokenizers have ids without a row in the model, and most models have rows without an id."""
    structures = [
        StructuredOutputsParams(json=CITY),
        StructuredOutputsParams(json=CITY, starts_after="</think>", free_from="<think>"),
    ]
    for num_rows in (grammars.size - len(MARKERS) - 1, grammars.size - 1, grammars.size + 40):
        compiler = grammars.compiler(num_rows)
        for structure in structures:
            matcher = compiler.compile(structure)
            matcher.advance(grammars.plain.encode('{"city": "Rome"}', add_special_tokens=False).ids)
            allowed = matcher.allowed()
            assert allowed.shape == (num_rows,)
            assert allowed.nonzero()[0].tolist() == [EOS]
    has_no_row = grammars.compiler(grammars.size - len(MARKERS) - 1).compile(structures[1])
    has_no_row.advance(grammars.plain.encode('<think>Hm.</think>{"city": "Rome"}', add_special_tokens=False).ids)
    assert has_no_row.allowed()[EOS]


@pytest.mark.parametrize(
    "parameters", [{"properties": {"days": {}}, "additionalProperties": True}, {"description": "anything"}, {}]
)
def test_arguments_must_be_object_if_schema_omits_type(grammars: Grammars, parameters: dict[str, Any]) -> None:
    function, _ = read_function({"name": "weather", "parameters": parameters}, "tools[0]")
    structure = StructuredOutputsParams(grammar=HermesFormat(grammars.token_name).forced([function], only_one=True))
    call = '<tool_call>\n{"name": "weather", "arguments": ARGUMENTS}\n</tool_call>'
    assert grammars.accepts(structure, call.replace("ARGUMENTS", '{"city": 1}'))
    for wrong in ("[1]", "5", '"x"', "null"):
        assert not grammars.accepts(structure, call.replace("ARGUMENTS", wrong))


def test_grammar_omits_titles_descriptions_defaults_and_examples() -> None:
    schema = {
        "type": "object",
        "description": "hush " * 99,
        "properties": {
            "description": {"type": "string", "description": "hush", "title": "hush"},
            "title": {"const": {"title": "kept"}},
            "default": {"enum": [{"description": "kept"}], "default": "hush", "examples": ["hush"]},
        },
        "dependentSchemas": {"title": {"description": "hush", "required": ["default"]}},
        "required": ["description", "title"],
    }
    text = lark_json(schema)
    assert "hush" not in text
    fields = json.loads(text.removeprefix("%json "))
    assert fields["properties"] == {
        "description": {"type": "string"},
        "title": {"const": {"title": "kept"}},
        "default": {"enum": [{"description": "kept"}]},
    }
    assert fields["dependentSchemas"] == {"title": {"required": ["default"]}}
    assert fields["required"] == ["description", "title"]


def test_free_from_and_starts_after_are_validated() -> None:
    with pytest.raises(RequestError, match="free_from"):
        StructuredOutputsParams(regex="a", free_from="<think>")
    with pytest.raises(RequestError, match="starts_after"):
        StructuredOutputsParams(regex="a", starts_after="")
    with pytest.raises(RequestError, match="exactly one"):
        StructuredOutputsParams(starts_after="</think>")


def test_mistral_call_ids_have_nine_alphanumeric_characters() -> None:
    assert len(MistralFormat().new_call_id()) == 9
    assert MistralFormat().new_call_id().isalnum()
