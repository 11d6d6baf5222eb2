"""Every type of block, part and item that the SDKs of OpenAI and Anthropic allow is read, or refused by name.

The same holds for each field of the types that are read. New types of a later SDK fail these tests until they are
handled.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    NamedTuple,
    NotRequired,
    Required,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import pytest
from pydantic import BaseModel
from sdks import anthropic, openai
from typing_extensions import is_typeddict

from octavo.errors import RequestError
from octavo.server.api import conversation
from octavo.server.api.anthropic import message_blocks, messages
from octavo.server.api.anthropic.message_blocks import read_conversation
from octavo.server.api.anthropic.messages import CountTokensRequest
from octavo.server.api.block_types import BlockTypes, Fields
from octavo.server.api.conversation import read_messages
from octavo.server.api.openai import response_items
from octavo.server.api.openai.response_items import read_items
from octavo.server.api.openai.responses import _NESTED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def members(annotation: Any) -> Iterator[Any]:
    """Yield the classes that an SDK type allows, including those inside lists."""
    origin = get_origin(annotation)
    if origin in {Annotated, Required, NotRequired}:
        yield from members(get_args(annotation)[0])
    elif origin in {Union, types.UnionType, list, Iterable}:
        for each in get_args(annotation):
            yield from members(each)
    elif is_typeddict(annotation) or (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
        yield annotation


def hints(cls: Any) -> dict[str, Any]:
    """Return the types of a class's fields."""
    if isinstance(cls, type) and issubclass(cls, BaseModel):
        return {name: field.annotation for name, field in cls.model_fields.items()}
    return get_type_hints(cls, include_extras=True)


def kinds_of(cls: Any, default: str | None) -> set[str]:
    """Return the allowed values of the field `type` of a class. default: the value if the field may be absent."""
    annotation = hints(cls).get("type")
    kinds = {default} if default and get_origin(annotation) is not Required else set()
    left = [annotation]
    while left:
        each = left.pop()
        if get_origin(each) is Literal:
            kinds |= {*get_args(each)}
        else:
            left += get_args(each)
    return kinds - {None}


class Place(NamedTuple):
    """A place in a conversation: the types that the SDK allows, and those that the server reads or refuses."""

    allowed: Any
    known: BlockTypes
    read: Callable[[dict[str, Any]], Any]  # reads a conversation with the block in this place
    default: str | None = None


def user(block: Any) -> Any:
    return read_conversation(None, [{"role": "user", "content": [block]}])


def answer(block: Any) -> Any:
    return read_conversation(None, [{"role": "assistant", "content": [block]}])


def document(source: Any) -> Any:
    return user({"type": "document", "source": source})


def thinking(config: Any) -> Any:
    request = CountTokensRequest(model="m", messages=[], thinking=config)
    return messages._template_options(request, [{"role": "user"}])


def of_anthropic(sdk: Any, prefix: str = "") -> dict[str, Place]:
    params = sdk.message_create_params

    def hint(name: str, field: str) -> Any:
        return hints(getattr(sdk, prefix + name))[field]

    document_param = "DocumentBlockParam" if not prefix else "RequestDocumentBlockParam"
    search = {"type": "search_result", "source": "s", "title": "t"}
    return {
        "system": Place(
            hints(params.MessageCreateParamsNonStreaming)["system"],
            message_blocks.SYSTEM_BLOCKS,
            lambda block: read_conversation([block], [{"role": "user", "content": "a"}]),
        ),
        "user": Place(hint("UserMessageParam", "content"), message_blocks.USER_BLOCKS, user),
        "assistant": Place(hint("AssistantMessageParam", "content"), message_blocks.ANSWER_BLOCKS, answer),
        "system message": Place(
            hint("SystemMessageParam", "content"),
            message_blocks.SYSTEM_BLOCKS,
            lambda block: read_conversation(None, [{"role": "system", "content": [block]}]),
        ),
        "tool_result": Place(
            hint("ToolResultBlockParam", "content"),
            message_blocks.RESULT_BLOCKS,
            lambda block: user({"type": "tool_result", "tool_use_id": "a", "content": [block]}),
        ),
        "document": Place(hint(document_param, "source"), message_blocks.SOURCES, document),
        "document's content": Place(
            hint("ContentBlockSourceParam", "content"),
            message_blocks.SOURCE_BLOCKS,
            lambda block: document({"type": "content", "content": [block]}),
        ),
        "search_result": Place(
            hint("SearchResultBlockParam", "content"),
            message_blocks.SEARCH_BLOCKS,
            lambda block: user({**search, "content": [block]}),
        ),
        "thinking": Place(hints(params.MessageCreateParamsNonStreaming)["thinking"], messages._THINKING, thinking),
    }


def in_chat(role: str) -> Callable[[dict[str, Any]], Any]:
    return lambda part: read_messages([{"role": role, "content": [part]}])


def of_chat() -> dict[str, Place]:
    chat = openai.types.chat
    roles = {
        "developer": chat.ChatCompletionDeveloperMessageParam,
        "system": chat.ChatCompletionSystemMessageParam,
        "user": chat.ChatCompletionUserMessageParam,
        "assistant": chat.ChatCompletionAssistantMessageParam,
        "tool": chat.ChatCompletionToolMessageParam,
    }
    parts = {
        role: Place(
            hints(message)["content"],
            conversation.ANSWER_PARTS if role == "assistant" else conversation.TEXT_PARTS,
            in_chat(role),
        )
        for role, message in roles.items()
    }
    calls = Place(
        hints(chat.ChatCompletionAssistantMessageParam)["tool_calls"],
        conversation.CALLS,
        lambda call: read_messages([{"role": "assistant", "content": None, "tool_calls": [call]}]),
    )
    return {**parts, "tool_calls": calls}


def in_input(**item: Any) -> Callable[[dict[str, Any]], Any]:
    """Return a function that puts a part into the field of `item` that is None, and reads the item."""
    (name,) = [name for name, value in item.items() if value is None]
    return lambda part: read_items(None, [{**item, name: [part]}])


def of_responses() -> dict[str, Place]:
    responses = openai.types.responses
    reasoning = hints(responses.response_reasoning_item_param.ResponseReasoningItemParam)
    message = in_input(role="user", content=None)
    return {
        "input": Place(
            hints(responses.response_create_params.ResponseCreateParamsNonStreaming)["input"],
            response_items.ITEMS,
            lambda item: read_items(None, [item]),
            default="message",
        ),
        "a message": Place(hints(responses.EasyInputMessageParam)["content"], response_items.MESSAGE_PARTS, message),
        "a strict message": Place(
            hints(responses.response_input_param.Message)["content"], response_items.MESSAGE_PARTS, message
        ),
        "an answer": Place(
            hints(responses.ResponseOutputMessageParam)["content"],
            response_items.ANSWER_PARTS,
            in_input(role="assistant", content=None),
        ),
        "a result": Place(
            hints(responses.response_input_param.FunctionCallOutput)["output"],
            response_items.MESSAGE_PARTS,
            in_input(type="function_call_output", call_id="a", output=None),
        ),
        "thoughts": Place(reasoning["content"], response_items.THOUGHTS, in_input(type="reasoning", content=None)),
        "a summary": Place(reasoning["summary"], response_items.SUMMARIES, in_input(type="reasoning", summary=None)),
    }


@functools.cache
def places(api: str) -> dict[str, Place]:
    """Return the places of an API, by name."""
    if api == "messages":
        return of_anthropic(anthropic.types)
    if api == "beta":
        return of_anthropic(anthropic.types.beta, "Beta")
    return of_chat() if api == "chat" else of_responses()


APIS = ("messages", "beta", "chat", "responses")


@pytest.mark.parametrize("api", APIS)
def test_every_sdk_block_type_is_read_or_refused_by_name(api: str) -> None:
    for name, (allowed, known, read, default) in places(api).items():
        kinds = {kind for cls in members(allowed) for kind in kinds_of(cls, default)}
        assert kinds, name
        assert kinds - known.taken.keys() - known.refused.keys() == set(), name
        assert not known.taken.keys() & known.refused.keys(), name
        for kind in known.refused:
            with pytest.raises(RequestError, match=f"'{kind}', which is not supported by this server: ") as caught:
                read({"type": kind})
            assert caught.value.parameter, name
        with pytest.raises(RequestError, match=r"must be an object of type \w.*, got type 'sonnet'"):
            read({"type": "sonnet"})


def unanswered(cls: Any, known: Fields) -> set[str]:
    return hints(cls).keys() - known.read - known.harmless.keys() - known.unsupported.keys()


@pytest.mark.parametrize("api", APIS)
def test_every_field_of_read_sdk_types_is_handled(api: str) -> None:
    for name, (allowed, known, read, default) in places(api).items():
        for cls in members(allowed):
            for kind in kinds_of(cls, default) & known.taken.keys():
                assert unanswered(cls, known.taken[kind]) == set(), f"{name}: {cls.__name__} of type {kind}"
        for kind, fields in known.taken.items():
            assert not fields.read & (fields.harmless.keys() | fields.unsupported.keys()), name
            for field in fields.unsupported:
                with pytest.raises(RequestError, match=f"{field} is not supported by this server"):
                    read({"type": kind, field: "changes something"})


def around() -> list[tuple[Any, Fields]]:
    """Return the classes that contain blocks, parts or items, each with the known fields."""
    plain, beta, chat, responses = (
        anthropic.types,
        anthropic.types.beta,
        openai.types.chat,
        openai.types.responses,
    )
    create = responses.response_create_params
    return [
        (plain.UserMessageParam, message_blocks.MESSAGE),
        (plain.AssistantMessageParam, message_blocks.MESSAGE),
        (beta.BetaUserMessageParam, message_blocks.MESSAGE),
        (beta.BetaAssistantMessageParam, message_blocks.MESSAGE),
        (beta.BetaSystemMessageParam, message_blocks.MESSAGE),
        (chat.ChatCompletionSystemMessageParam, conversation.MESSAGE_FIELDS),
        (chat.ChatCompletionUserMessageParam, conversation.MESSAGE_FIELDS),
        (chat.ChatCompletionAssistantMessageParam, conversation.MESSAGE_FIELDS),
        (chat.ChatCompletionToolMessageParam, conversation.MESSAGE_FIELDS),
        (chat.ChatCompletionFunctionMessageParam, conversation.MESSAGE_FIELDS),
        (create.PromptCacheOptions, _NESTED["prompt_cache_options"]),
        *((cls, _NESTED["reasoning"]) for cls in members(hints(create.ResponseCreateParamsBase)["reasoning"])),
        (responses.ResponseTextConfigParam, _NESTED["text"]),
    ]


def test_every_field_of_sdk_containers_is_handled() -> None:
    for sent, known in around():
        assert hints(sent)
        assert unanswered(sent, known) == set(), sent.__name__


def test_anthropic_output_config_and_tool_choice_fields_are_handled() -> None:
    for params in (anthropic.types.message_create_params, anthropic.types.beta.message_create_params):
        fields = hints(params.MessageCreateParamsNonStreaming)
        for config in members(fields["output_config"]):
            for name in hints(config).keys() - messages._OUTPUT_CONFIG:
                with pytest.raises(RequestError, match=f"output_config.{name} is not supported"):
                    messages._read_format({name: {"type": "tokens", "total": 1}})
        for choice in members(fields["tool_choice"]):
            assert hints(choice).keys() <= {"type", "name", "disable_parallel_tool_use"}
            assert kinds_of(choice, None) <= {*messages._CHOICES, "tool"}


def test_refused_block_types_exist_in_sdks() -> None:
    """Types that no SDK has any more need no error message of their own."""
    all_places = [place for api in APIS for place in places(api).values()]
    kinds = {kind for place in all_places for cls in members(place.allowed) for kind in kinds_of(cls, None)}
    for place in all_places:
        assert place.known.refused.keys() <= kinds
