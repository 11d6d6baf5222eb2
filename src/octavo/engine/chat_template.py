"""Render conversations with Jinja templates in a sandbox, because templates are untrusted programs."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols

from octavo.engine.call_arguments import read_arguments
from octavo.engine.generation_config import read_json_object
from octavo.engine.template_environment import BoundedSandbox
from octavo.engine.template_traits import TOOL, TemplateTraits
from octavo.errors import ModelError, RequestError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

_ROLES = {"developer": "system"}  # OpenAI's newer name for "system"
_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
_TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


class ChatTemplate:
    """The chat templates of a checkpoint.

    templates: Text of the default template, or texts by name. "tool_use" is for requests with tools.
    special_tokens: Variables of the templates, such as "bos_token".
    """

    def __init__(
        self,
        templates: str | Mapping[str, str],
        special_tokens: Mapping[str, str] | None = None,
        *,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self.templates = {"default": templates} if isinstance(templates, str) else dict(templates)
        self._special_tokens = dict(special_tokens or {})
        self._environment = _make_environment(now)
        self._compiled: dict[str, _Compiled] = {}

    @classmethod
    def from_directory(cls, directory: Path, special_tokens: Mapping[str, str] | None = None) -> ChatTemplate | None:
        """Read a checkpoint's templates, if any. Raises `ModelError`.

        chat_template.jinja replaces the templates of tokenizer_config.json. additional_chat_templates/NAME.jinja adds
        template NAME.
        """
        templates = _read_config_templates(directory / "tokenizer_config.json")
        single = directory / "chat_template.jinja"
        if single.is_file():
            templates = {"default": _read_template(single)}
        for path in sorted((directory / "additional_chat_templates").glob("*.jinja")):
            templates[path.stem] = _read_template(path)
        return cls(templates, special_tokens) if templates else None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        **chat_template_kwargs: Any,
    ) -> str:
        """Render a conversation as a prompt, like transformers' `apply_chat_template`. Raises `RequestError`.

        continue_final_message: True to let the model continue the last message.
        chat_template: Name or text of a template. Other keyword arguments become its variables.
        """
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt exclude each other",
                parameter="continue_final_message",
            )
        compiled = self._find(chat_template, has_tools=tools is not None)
        chat = _read_messages(messages)
        if continue_final_message:
            _tag_final_message(chat)
        variables = {
            **self._special_tokens,
            **_plain(chat_template_kwargs),
            "tools": _plain(tools),
            "documents": _plain(documents),
            "add_generation_prompt": add_generation_prompt,
        }
        text = compiled.render(chat, variables)
        return _cut_at_tag(text) if continue_final_message else text

    def _find(self, chosen: str | None, *, has_tools: bool) -> _Compiled:
        if chosen is not None:
            source = self.templates.get(chosen, chosen)
        elif has_tools and "tool_use" in self.templates:
            source = self.templates["tool_use"]
        elif "default" in self.templates:
            source = self.templates["default"]
        else:
            names = ", ".join(sorted(self.templates))
            raise RequestError(
                f"this model has no default chat template; name one of {names}", parameter="chat_template"
            )
        compiled = self._compiled.get(source)
        if compiled is None:
            try:
                compiled = _Compiled(self._environment, source, self._special_tokens)
            except _TEMPLATE_ERRORS as error:
                raise RequestError(f"the chat template is broken: {error}", parameter="chat_template") from error
            if source in self.templates.values():  # a caller's own text is not cached
                self._compiled[source] = compiled
        return compiled


class _Compiled:
    def __init__(self, environment: ImmutableSandboxedEnvironment, source: str, special: Mapping[str, str]) -> None:
        self.template = environment.from_string(source)
        self.traits = TemplateTraits.find(lambda messages: self._try(messages, special, None, [TOOL]))
        question = [{"role": "user", "content": "Question"}]
        takes_null = self._try(question, special, None) is not None
        self.no_tools: list[Any] | None = None if takes_null or self._try(question, special, []) is None else []

    def render(self, chat: list[dict[str, Any]], variables: dict[str, Any]) -> str:
        """Render the first form of `chat` that the template accepts."""
        refusal: Exception | None = None
        if variables["tools"] is None:
            variables = {**variables, "tools": self.no_tools}
        for messages in self.traits.shapes(chat):
            try:
                return self.template.render(variables, messages=messages)
            except _TEMPLATE_ERRORS as error:
                refusal = refusal or error
        raise RequestError(f"the chat template refused the conversation: {refusal}", parameter="messages") from refusal

    def _try(
        self, messages: list[dict[str, Any]], special: Mapping[str, str], *choices: list[Any] | None
    ) -> str | None:
        for tools in choices:
            with contextlib.suppress(*_TEMPLATE_ERRORS):
                return self.template.render(
                    special, messages=messages, tools=tools, documents=None, add_generation_prompt=True
                )
        return None


class _GenerationBlock(Extension):
    tags = {"generation"}  # noqa: RUF012 - as jinja declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _make_environment(now: Callable[[], datetime]) -> ImmutableSandboxedEnvironment:

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def strftime_now(pattern: str) -> str:
        return now().strftime(pattern)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        # Jinja's built-in filter would escape HTML
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = BoundedSandbox(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock])
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment


def _read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ModelError(f"{path} is not UTF-8 text; download it again") from error


def _read_config_templates(path: Path) -> dict[str, str]:
    value = read_json_object(path).get("chat_template")
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    try:
        templates = {entry["name"]: entry["template"] for entry in value}
    except (TypeError, KeyError) as error:
        raise ModelError(f"{path}: chat_template must be a string or a list of names and templates") from error
    if not all(isinstance(text, str) for text in (*templates, *templates.values())):
        raise ModelError(f"{path}: chat_template must be a string or a list of names and templates")
    return templates


def _read_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    if not messages or isinstance(messages, str | Mapping):
        raise RequestError("messages must be a list of at least one message", parameter="messages")
    chat = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RequestError(f"messages[{index}] must be an object with a role", parameter="messages")
        plain = {key: _plain(value) for key, value in message.items() if value is not None or key == "content"}
        plain["role"] = template_role(message["role"])
        content = plain.get("content")
        if isinstance(content, list):
            plain["content"] = [{"type": "text", "text": _part_text(part, index)} for part in content]
        elif content is not None and not isinstance(content, str):
            raise RequestError(f"messages[{index}].content must be text or a list of text parts", parameter="messages")
        for call in plain["tool_calls"] if isinstance(plain.get("tool_calls"), list) else ():
            function = call.get("function") if isinstance(call, dict) else None
            if isinstance(function, dict) and isinstance(function.get("arguments"), str):
                function["arguments"] = read_arguments(function["arguments"])
        reasoning = next((plain[key] for key in _REASONING_KEYS if key in plain), None)
        if reasoning is not None:
            plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
        chat.append(plain)
    return chat


def template_role(role: str) -> str:
    """Return a role's name in templates."""
    return _ROLES.get(role, role)


def _part_text(part: Any, index: int) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise RequestError(
        f"messages[{index}].content holds a part of type {kind!r}; octavo reads text", parameter="messages"
    )


def _plain(value: Any) -> Any:
    """Copy data as JSON types, because a template could call methods of other objects."""
    try:
        return _rebuilt(value)
    except RecursionError:
        raise RequestError("the conversation holds data that is nested too deep", parameter="messages") from None


def _rebuilt(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): _rebuilt(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [_rebuilt(item) for item in value]
    raise RequestError(f"messages may contain JSON types only, got {type(value).__name__}", parameter="messages")


def _tag_final_message(chat: list[dict[str, Any]]) -> None:
    content = chat[-1].get("content")
    if isinstance(content, str):
        chat[-1]["content"] = content + _CONTINUE_TAG
    elif content:
        content[-1]["text"] += _CONTINUE_TAG
    else:
        raise RequestError("continue_final_message needs a last message with text", parameter="messages")


def _cut_at_tag(text: str) -> str:
    position = text.rfind(_CONTINUE_TAG.strip())
    if position < 0:
        raise RequestError(
            "the chat template does not show the last message, so it cannot be continued", parameter="messages"
        )
    kept = text.startswith(_CONTINUE_TAG, position)
    return text[:position] if kept else text[:position].rstrip()
