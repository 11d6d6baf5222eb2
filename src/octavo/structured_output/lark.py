"""Builds grammars in llguidance's dialect of Lark."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from octavo.structured_output.json_schema import NAMED_SCHEMAS, refuse_large_objects
from octavo.structured_output.schema_faults import FIELD, LENIENT
from octavo.structured_output.schema_rewriting import rewritten

if TYPE_CHECKING:
    from collections.abc import Sequence

# JSON is on one line, with an optional space after commas and colons. `oneOf` is treated as `anyOf`, because an
# automaton cannot count matching options.
JSON_OPTIONS = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
    "coerce_one_of": True,
}
# By default, llguidance forces ordinary tokens if only one text can follow. Then an added token with this text, such as
# "<think>", would be refused.
_OPTIONS = '%llguidance {"no_forcing": true}\n'
# Some white space is allowed at the start, because templates put up to two line feeds around reasoning.
_SPACE = "SPACE: /[ \\t\\r\\n]{0,4}/"
FEW_BLANKS = "& ~/\\s{5,}(.|\\n)*/"
_ANY = f"/(.|\\n)*/ {FEW_BLANKS}"
_TEXT_RULE = re.compile(r"^(TEXT|BEFORE): /.*/$", re.MULTILINE)
_COMMENTS = {"description", "title", "examples", "default", "$comment", "deprecated"}
_VALUES = {"const", "enum", "required"}


def lark_json(schema: str | dict[str, Any]) -> str:
    """Return a Lark expression for the JSON of a schema. Raises `RequestError` if the schema is too large."""
    fields = json.loads(schema) if isinstance(schema, str) else schema
    refuse_large_objects(fields, fields.get(FIELD) or "a function's parameters or the answer's schema", None)
    options = {**JSON_OPTIONS, "lenient": True} if LENIENT in fields else JSON_OPTIONS
    return "%json " + json.dumps({**_bare(rewritten(fields)), "x-guidance": options})


def _bare(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_bare(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: {name: _bare(each) for name, each in value.items()}
        if key in NAMED_SCHEMAS and isinstance(value, dict)
        else (value if key in _VALUES else _bare(value))
        for key, value in schema.items()
        if key not in _COMMENTS
    }


def by_id(token_id: int) -> str:
    """Return a token's name in a grammar. Text in a grammar never matches an added token such as <think>."""
    return f"<[{token_id}]>"


def text_up_to(
    marker: str, token: str | None, *, head: str = "head", text: str = "TEXT", between: Sequence[int] = ()
) -> str:
    """Return two rules. `head` matches text up to and including a marker, and `text` matches any text.

    token: Name of the marker's token, or None if the marker has several tokens. With a token, `text` matches only
    text without the marker. between: Ids of added tokens that `head` may contain.
    """
    if token is None:
        return f"{head}[lazy]: {text} {json.dumps(marker, ensure_ascii=False)}\n{text}: {_ANY}"
    more = f" (<[{','.join(map(str, between))}]> {text})*" if between else ""
    return f"{head}: {text}{more} {token}\n{text}: {_ANY} & ~/(.|\\n)*{pattern(marker)}(.|\\n)*/"


def free_start(ends: str, ends_token: str | None, opens: str | None, between: Sequence[int], *, is_exact: bool) -> str:
    """Return rules for free text up to and including the marker `ends`, followed by the answer (`@answer`).

    opens: Marker at the beginning of optional free text, or None if the free text is required. is_exact: True to forbid
    white space before an answer without free text.
    """
    rules = text_up_to(ends, ends_token, head="free", text="ANY", between=between)
    if opens is None:
        start = "free SPACE @answer"
    else:
        start = f"SPACE {opens} free SPACE @answer | {'' if is_exact else 'SPACE '}@answer"
    return f"start: {start}\n{rules}\n{_SPACE}"


def pattern(text: str) -> str:
    """Return a regular expression that matches exactly this text."""
    return "".join(char if char.isalnum() else f"\\x{{{ord(char):x}}}" for char in text)


def whole_grammar(structure: str, rules: str, free_from: str | None) -> str:
    """Return the whole grammar. In `rules`, `@answer` means the structure. free_from: Marker of free text."""
    if free_from is not None:  # an answer must not begin like free text
        begins_so = f"/\\s*{pattern(free_from)}(.|\\n)*/"
        structure = _TEXT_RULE.sub(lambda rule: f"{rule.group()} & ~{begins_so}", structure)
    inner = json.loads(structure)["grammars"] if structure.startswith("{") else [{"lark_grammar": structure}]
    outer = {"name": "all", "lark_grammar": _OPTIONS + rules}
    return json.dumps({"grammars": [outer, {**inner[0], "name": "answer"}, *inner[1:]]})
