"""POST /tokenize and POST /detokenize, as vLLM has them, and as llama.cpp's server has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from msgspec import UNSET
from pydantic import BaseModel, ConfigDict
from starlette.responses import Response

from octavo.errors import RequestError
from octavo.runtime.text_work import progress
from octavo.server.answers.answering import encoder
from octavo.server.answers.tools import read_chat_tools
from octavo.server.api.conversation import read_messages, template_options
from octavo.server.api.extra_fields import HARMLESS
from octavo.server.api.openai.replies import Detokenized, Tokenized, TokenizedContent
from octavo.server.api.openai.requests import TokenIds  # noqa: TC001 - pydantic reads the types of fields
from octavo.server.api.request_types import ChatMessages, ChatTool, Shown, TokenId, Tools

if TYPE_CHECKING:
    from collections.abc import Callable

    from msgspec import Struct
    from starlette.requests import Request

    from octavo.server.service import Service


# What would change the tokens, and the values that change nothing: the template is the server's.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "chat_template": (None,),
    "parse_special": (None, True),
    "with_pieces": (None, False),
}


class TokenizeRequest(BaseModel):
    """A text, or a conversation as the chat template spells it. Text gets the tokenizer's special tokens by default.

    content: the text as llama.cpp's clients name it; without add_special it gets none.
    """

    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[Any, Shown(ChatMessages | None)] = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Annotated[list[Any], Shown(Tools[ChatTool])] | None = None
    content: str | None = None
    add_special: bool | None = None


class DetokenizeRequest(BaseModel):
    """Token ids."""

    model_config = ConfigDict(strict=True, extra="ignore")

    model: str | None = None
    tokens: Annotated[TokenIds, Shown(list[TokenId])]


async def tokenize(service: Service, http_request: Request, request: TokenizeRequest) -> Response:
    """Return the token ids of a text or a conversation."""
    service.check_model(request.model)
    service.extra_fields.check(request.model_extra, _UNSUPPORTED, HARMLESS)
    if [request.prompt, request.messages, request.content].count(None) != 2:
        raise RequestError("give prompt, messages or content, one of them", parameter="prompt")
    if request.messages is not None and request.add_special_tokens:
        raise RequestError("the chat template adds the special tokens itself", parameter="add_special_tokens")
    return await _in_thread(service, http_request, lambda: _tokenized(service, request))


async def detokenize(service: Service, http_request: Request, request: DetokenizeRequest) -> Response:
    """Return the text of token ids, special tokens included."""
    service.check_model(request.model)
    return await _in_thread(service, http_request, lambda: _detokenized(service, request))


async def _in_thread(service: Service, http_request: Request, work: Callable[[], Struct]) -> Response:
    """Do the work, and spell its result, beside the event loop; it takes a place like any other request."""
    with service.enter(http_request, 1) as place:
        content = await service.read(http_request, place, lambda: encoder.encode(work()), is_count=True)
    return Response(content, media_type="application/json")


def _tokenized(service: Service, request: TokenizeRequest) -> Tokenized | TokenizedContent:
    inputs = service.engine.input_processor
    if request.content is not None:
        return TokenizedContent(inputs.encode(request.content, add_special_tokens=request.add_special is True))
    if request.prompt is not None:
        token_ids = inputs.encode(request.prompt, add_special_tokens=request.add_special_tokens is not False)
    else:
        given = list(read_chat_tools(request.tools, None, None, service.answer_style.tools).given) or None
        messages, options = read_messages(request.messages), template_options(request)
        token_ids = inputs.chat_prompt(messages, tools=given, **options)["prompt_token_ids"]
    spell = inputs.tokenizer.token
    texts = [spell(token_id) for token_id in token_ids] if request.return_token_strs else UNSET
    return Tokenized(len(token_ids), service.model_info.max_model_len, token_ids, texts)


def _detokenized(service: Service, request: DetokenizeRequest) -> Detokenized:
    vocab_size = service.model_info.vocab_size
    progress(len(request.tokens))
    for index, token_id in enumerate(request.tokens):
        if not 0 <= token_id < vocab_size:
            message = f"tokens[{index}]: token id {token_id} is outside the vocabulary of {vocab_size}"
            raise RequestError(message, parameter=f"tokens[{index}]")
    tokenizer = service.engine.input_processor.tokenizer
    text = tokenizer.decode(request.tokens, skip_special_tokens=False)
    return Detokenized(text, text)
