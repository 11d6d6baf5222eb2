"""Tokenization, as in vLLM and llama.cpp's server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from msgspec import UNSET
from starlette.responses import Response

from octavo.errors import RequestError
from octavo.runtime.text_work import progress
from octavo.server.answers.jobs import encoder
from octavo.server.answers.tools import read_chat_tools
from octavo.server.api.conversation import effort_options, read_messages, template_options
from octavo.server.api.extra_fields import ALIASES, OF_ANSWERS, OF_PROMPTS, As, Off, each
from octavo.server.api.openai.replies import Detokenized, Tokenized, TokenizedContent, TokenPiece
from octavo.server.api.openai.requests import Aliased, Body, ChatFields, TokenIds
from octavo.server.api.request_types import ChatMessages, Shown, TokenId
from octavo.server.endpoints import endpoint

if TYPE_CHECKING:
    from collections.abc import Callable

    from msgspec import Struct
    from starlette.requests import Request

    from octavo.server.service import Service


_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    **OF_PROMPTS,
    "chat_template": Off(),
    **each(Off([]), "documents", "functions"),
    "parse_special": Off(True),
    "suffix": Off(""),
}
_UNSUPPORTED_BACK: dict[str, tuple[Any, ...]] = {
    "clean_up_tokenization_spaces": Off(False),
    "spaces_between_special_tokens": Off(True),
}


class TokenizeRequest(ChatFields, Aliased, Body):
    """A text, or messages for the chat template. Fields that do not change the prompt are ignored.

    prompt: A text. By default, special tokens are added.
    content: llama.cpp's name for a text. Special tokens are added only if add_special is true.
    """

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[Any, Shown(ChatMessages | None)] = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    content: str | None = None
    add_special: bool | None = None
    with_pieces: bool | None = None

    aliases: ClassVar[dict[str, As]] = {"enable_thinking": ALIASES["enable_thinking"]}


class DetokenizeRequest(Body):
    """Token ids. skip_special_tokens: SGLang's field, False by default."""

    model: str | None = None
    tokens: Annotated[TokenIds, Shown(list[TokenId])]
    skip_special_tokens: bool | None = None


@endpoint(body=TokenizeRequest, answer=Tokenized)
async def tokenize(service: Service, http_request: Request, request: TokenizeRequest) -> Response:
    """Tokenize a prompt."""
    service.check_model(request.model)
    service.extra_fields.check(request.model_extra, _UNSUPPORTED, OF_ANSWERS)
    request.take_aliases()
    if [request.prompt, request.messages, request.content].count(None) != 2:
        raise RequestError("give exactly one of prompt, messages and content", parameter="prompt")
    if request.messages is not None and request.add_special_tokens:
        raise RequestError("the chat template adds the special tokens itself", parameter="add_special_tokens")
    if request.with_pieces and request.content is None:
        raise RequestError(
            "with_pieces needs content; with prompt or messages use return_token_strs", parameter="with_pieces"
        )
    return await _in_thread(service, http_request, lambda: _tokenized(service, request))


@endpoint(body=DetokenizeRequest, answer=Detokenized)
async def detokenize(service: Service, http_request: Request, request: DetokenizeRequest) -> Response:
    """Decode token ids."""
    service.check_model(request.model)
    service.extra_fields.check(request.model_extra, _UNSUPPORTED_BACK, OF_ANSWERS)
    return await _in_thread(service, http_request, lambda: _detokenized(service, request))


async def _in_thread(service: Service, http_request: Request, work: Callable[[], Struct]) -> Response:
    with service.enter(http_request, 1) as place:
        content = await service.read(http_request, place, lambda: encoder.encode(work()))
    return Response(content, media_type="application/json")


def _tokenized(service: Service, request: TokenizeRequest) -> Tokenized | TokenizedContent:
    inputs = service.engine.input_processor
    if request.content is not None:
        ids = inputs.encode(request.content, add_special_tokens=request.add_special is True)
        piece = service.engine.output_processor.piece
        return TokenizedContent([_piece(each, piece(each)) for each in ids] if request.with_pieces else [*ids])
    if request.prompt is not None:
        token_ids = inputs.encode(request.prompt, add_special_tokens=request.add_special_tokens is not False)
    else:
        tool_format = service.answer_style.tools
        toolbox = read_chat_tools(request.tools, request.tool_choice, None, tool_format)
        messages, given = toolbox.template_input(read_messages(request.messages), tool_format)
        options = effort_options(request.reasoning_effort, "reasoning_effort") | template_options(request)
        token_ids = inputs.encode(inputs.chat_text(messages, tools=given, **options), add_special_tokens=False)
    token_name = inputs.tokenizer.token
    texts = [token_name(token_id) for token_id in token_ids] if request.return_token_strs else UNSET
    return Tokenized(len(token_ids), service.model_info.max_model_len, token_ids, texts)


def _piece(token_id: int, piece: str | bytes) -> TokenPiece:
    if isinstance(piece, str):
        return TokenPiece(token_id, piece)
    try:
        return TokenPiece(token_id, piece.decode())  # in some vocabularies, a line break is a byte token
    except UnicodeDecodeError:
        return TokenPiece(token_id, list(piece))


def _detokenized(service: Service, request: DetokenizeRequest) -> Detokenized:
    vocab_size = service.model_info.vocab_size
    progress(len(request.tokens))
    for index, token_id in enumerate(request.tokens):
        if not 0 <= token_id < vocab_size:
            message = f"tokens[{index}]: token id {token_id} is outside the vocabulary of {vocab_size}"
            raise RequestError(message, parameter=f"tokens[{index}]")
    tokenizer = service.engine.input_processor.tokenizer
    text = tokenizer.decode(request.tokens, skip_special_tokens=request.skip_special_tokens is True)
    return Detokenized(text, text)
