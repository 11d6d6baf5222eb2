"""The grammars of calls let pass what the parsers read as calls, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import tokenizers

from octavo import assets
from octavo.errors import RequestError
from octavo.grammars import GrammarCompiler, GrammarError, lark_json
from octavo.sampling_params import StructuredOutputsParams
from octavo.server.parts import joined
from octavo.server.tool_formats import Function, HermesFormat, LlamaFormat, MistralFormat, NamedMistralFormat
from octavo.server.tools import Toolbox, read_function

if TYPE_CHECKING:
    from octavo.server.tool_formats import ToolFormat

EOS = 2
CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
FUNCTIONS = [Function("weather", CITY), Function("now", NOTHING)]
NAMES = frozenset({"weather", "now"})
SPECIAL = ["[TOOL_CALLS]", "[ARGS]", "<|python_tag|>"]


class Grammars:
    """The vocabulary of the built-in model, with or without the special tokens that families have."""

    def __init__(self, special: list[str]) -> None:
        fields = json.loads((Path(assets.__file__).parent / "demo" / "tokenizer.json").read_text(encoding="utf-8"))
        self.tokenizer = tokenizers.Tokenizer.from_str(json.dumps(fields))
        self.tokenizer.add_special_tokens(special)
        self._special = special
        size = self.tokenizer.get_vocab_size()
        self._compiler = GrammarCompiler(lambda: (self.tokenizer.to_str(), [EOS]), size)

    def spell(self, text: str) -> str | None:
        return f"<[{self.tokenizer.token_to_id(text)}]>" if text in self._special else None

    def accepts(self, structure: StructuredOutputsParams, text: str) -> bool:
        matcher = self._compiler.compile(structure)
        try:
            matcher.advance(self.tokenizer.encode(text, add_special_tokens=False).ids)
        except GrammarError:
            return False
        return bool(matcher.allowed()[EOS])


@pytest.fixture(scope="module", params=["plain", "special"])
def grammars(request: pytest.FixtureRequest) -> Grammars:
    return Grammars([] if request.param == "plain" else SPECIAL)


ROME, NOW = '{"name": "weather", "arguments": {"city": "Röme"}}', '{"name": "now", "arguments": {}}'
LLAMA_ROME, LLAMA_NOW = ROME.replace("arguments", "parameters"), NOW.replace("arguments", "parameters")
WRONG = '{"name": "weather", "arguments": {"town": "Rome"}}'
# one call, two calls, a call that keeps to no schema
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
def test_forced_calls(grammars: Grammars, family: type[ToolFormat]) -> None:
    one, two, wrong = FAMILIES[family]
    for only_one in (False, True):
        structure = StructuredOutputsParams(grammar=family(grammars.spell).forced(FUNCTIONS, only_one=only_one))
        assert grammars.accepts(structure, one)
        assert grammars.accepts(structure, two) is not only_one
        for text in ("", "Hello.", wrong, "x" + one, one[:-1]):
            assert not grammars.accepts(structure, text), text


@each_family
def test_optional_calls(grammars: Grammars, family: type[ToolFormat]) -> None:
    one, two, wrong = FAMILIES[family]
    for only_one in (False, True):
        structure = StructuredOutputsParams(grammar=family(grammars.spell).optional(FUNCTIONS, only_one=only_one))
        for text in (one, "", "Hello.", "a < b [c]\n"):
            assert grammars.accepts(structure, text), text
        assert grammars.accepts(structure, two) is not only_one
        assert not grammars.accepts(structure, wrong)
        if family is not LlamaFormat:  # whose calls are the whole answer
            assert grammars.accepts(structure, "I look.\n" + one)
            assert not grammars.accepts(structure, "I look.\n" + wrong)


def test_only_strict_tools_keep_to_their_schemas(grammars: Grammars) -> None:
    """OpenAI's strict is a tool's own: one of them does not make the others so, whose schemas may be no grammar."""
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    odd = {"type": "object", "properties": {"zone": {"type": "string", "pattern": "(?<=a)b"}}, "required": ["zone"]}
    strict, free = Function("weather", parameters, strict=True), Function("now", odd)
    tool_format = HermesFormat(grammars.spell)

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
def test_calls_or_json(grammars: Grammars, family: type[ToolFormat]) -> None:
    one, _, wrong = FAMILIES[family]
    schema = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'
    structure = StructuredOutputsParams(grammar=family(grammars.spell).or_content(FUNCTIONS, schema, only_one=False))
    assert grammars.accepts(structure, one)
    assert grammars.accepts(structure, '{"a": 1}')
    for text in ("Hello.", wrong, '{"a": "b"}'):
        assert not grammars.accepts(structure, text), text


@each_family
def test_parsers_read_what_grammars_let_pass(family: type[ToolFormat]) -> None:
    one, two, _ = FAMILIES[family]
    for text, names in ((one, ["weather"]), (two, ["weather", "now"])):
        parser = family().parser(NAMES)
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
def test_a_structure_that_starts_after_a_text(grammars: Grammars, structure: dict[str, Any], text: str) -> None:
    behind = StructuredOutputsParams(**structure, starts_after="</think>")
    for free in ("</think>", "Hm, {<th\n\n狐</think>\n\n", "a </thi </think> "):
        assert grammars.accepts(behind, free + text), free
    for wrong in (text, "Hm.", "Hm.</think>", "Hm.</think>!" + text):
        assert not grammars.accepts(behind, wrong), wrong


@each_family
def test_reasoning_before_calls(grammars: Grammars, family: type[ToolFormat]) -> None:
    """A model that may think first may name a call in its thoughts."""
    one, _, wrong = FAMILIES[family]
    style = family(grammars.spell)
    thought = "<think>\nI could write " + one[:14].replace("[TOOL_CALLS]", "[TOOL") + " now.\n</think>\n\n"
    for grammar in (style.forced(FUNCTIONS, only_one=False), style.optional(FUNCTIONS, only_one=False)):
        structure = StructuredOutputsParams(grammar=grammar, starts_after="</think>", free_from="<think>")
        assert grammars.accepts(structure, one)
        assert grammars.accepts(structure, thought + one)
        assert not grammars.accepts(structure, thought + wrong)
        assert not grammars.accepts(structure, "<think>" + one)


@pytest.mark.parametrize("parameters", [{"properties": {}}, {"description": "anything"}, {}])
def test_arguments_are_an_object_whatever_a_schema_leaves_out(grammars: Grammars, parameters: dict[str, Any]) -> None:
    function, _ = read_function({"name": "weather", "parameters": parameters}, "tools[0]")
    structure = StructuredOutputsParams(grammar=HermesFormat(grammars.spell).forced([function], only_one=True))
    call = '<tool_call>\n{"name": "weather", "arguments": ARGUMENTS}\n</tool_call>'
    assert grammars.accepts(structure, call.replace("ARGUMENTS", '{"city": 1}'))
    for wrong in ("[1]", "5", '"x"', "null"):
        assert not grammars.accepts(structure, call.replace("ARGUMENTS", wrong))


def test_what_only_people_read_is_no_part_of_a_grammar() -> None:
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


def test_where_a_structure_starts_is_checked() -> None:
    with pytest.raises(RequestError, match="free_from"):
        StructuredOutputsParams(regex="a", free_from="<think>")
    with pytest.raises(RequestError, match="starts_after"):
        StructuredOutputsParams(regex="a", starts_after="")
    with pytest.raises(RequestError, match="exactly one"):
        StructuredOutputsParams(starts_after="</think>")


def test_ids_that_mistrals_templates_take() -> None:
    assert len(MistralFormat().new_call_id()) == 9
    assert MistralFormat().new_call_id().isalnum()
