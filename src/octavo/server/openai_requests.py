"""What clients may send: the OpenAI API's fields and vLLM's extra ones. Types are strict; None means "the default"."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from octavo.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Iterable

logger = logging.getLogger(__name__)

# A list stops being checked at its first bad element: a body of millions of them must not become millions of errors.
TokenIds = Annotated[list[int], Field(fail_fast=True)]
Strings = Annotated[list[str], Field(fail_fast=True)]
Priority = Annotated[int, Field(ge=-(2**63), lt=2**63)]


class StreamOptions(BaseModel):
    """What a stream tells besides text."""

    model_config = ConfigDict(strict=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


# Fields of the APIs that never change an answer here, whatever they say, and why.
_WHO = "says who asks: here a key does"
_CACHE = "advice to a prompt cache: here every prefix is cached, and no token depends on it"
_PLACE = "says where, how fast or at what price: there is one server"
_KEPT = "is kept with a stored answer: nothing is stored"
_MEDIA = "says how to read pictures and sound: here there are none"
HARMLESS = {
    "media_io_kwargs": _MEDIA,
    "max_tool_calls": "a limit of calls to the server's own tools: here there are none",
    "metadata": _KEPT,
    "mm_payload": _MEDIA,
    "mm_processor_kwargs": _MEDIA,
    "prediction": "a guess that may save time",
    "prompt_cache_key": _CACHE,
    "prompt_cache_options": _CACHE,
    "prompt_cache_retention": _CACHE,
    "request_id": "names the request: here the header X-Request-Id does",
    "return_mm_kwargs": _MEDIA,
    "safety_identifier": _WHO,
    "service_tier": _PLACE,
    "session_id": _WHO,
    "store": _KEPT,
    "stream_interval": "collects tokens before they are told: each is told at once",
    "truncation_side": "says which end truncate_prompt_tokens cuts off: that is refused",
    "user": _WHO,
}
ANTHROPIC_HARMLESS = {
    "billing_policy": _PLACE,
    "betas": "names of what may be asked for: what is asked for stands in fields of its own",
    "cache_control": _CACHE,
    "context_management": "takes old turns out to save tokens: all of them are read",
    "diagnostics": "asks why a cache was missed",
    "fallback_credit_token": _PLACE,
    "inference_geo": _PLACE,
    "metadata": _WHO,
    "service_tier": _PLACE,
    "speed": _PLACE,
    "user_profile_id": _WHO,
    "workspace_id": _WHO,
}


def check_extra(
    extra: dict[str, Any] | None, unsupported: dict[str, tuple[Any, ...]], harmless: Iterable[str] = ()
) -> None:
    """Look at the fields that a route does not know.

    Raises `RequestError` for one that would change the answer (unsupported: name -> the values that change nothing);
    those that are not harmless either are ignored and logged.
    """
    if not extra:
        return
    for name, neutral in unsupported.items():
        if name in extra and not any(extra[name] == each for each in neutral):
            raise RequestError(f"{name} is not supported by this server", parameter=name)
    if unknown := extra.keys() - unsupported.keys() - set(harmless):
        shown = ", ".join(f"{name:.40}" for name in sorted(unknown)[:5])
        logger.info("%d fields of the request are unknown and ignored: %r", len(unknown), shown)


class SamplingControls(BaseModel):
    """How tokens are chosen: each means what the field of `SamplingParams` with its name does, under every route."""

    model_config = ConfigDict(strict=True, extra="allow")

    seed: int | None = None
    stop: str | Strings | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    # vLLM's
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    allowed_token_ids: TokenIds | None = None
    typical_p: float | None = None  # TGI's


class SamplingFields(SamplingControls):
    """Fields of chat completions and completions. Those named like a field of `SamplingParams` mean the same."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    n: int | None = None
    prompt_logprobs: int | None = None
    priority: Priority | None = None
    cache_salt: str | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None

    # Fields that would change the answer and that nothing here serves yet, with the values that change nothing.
    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {
        "guided_json": (None,),
        "guided_regex": (None,),
        "guided_choice": (None,),
        "guided_grammar": (None,),
        "use_beam_search": (None, False),
        "truncate_prompt_tokens": (None,),
        "logits_processors": (None, []),
        "bad_words": (None, []),
        "logprob_token_ids": (None, []),
        "length_penalty": (None, 1.0),
        "return_token_ids": (None, False),
        "return_tokens_as_token_ids": (None, False),
        "return_token_offsets": (None, False),
        "repetition_detection": (None,),
        "routed_experts_prompt_start": (None, 0),
        "spaces_between_special_tokens": (None, True),
        "thinking_token_budget": (None, -1),
        "vllm_xargs": (None, {}),
        "watermarking": (None, False),
    }

    def refuse_unsupported(self) -> None:
        """Raise `RequestError` for a field that would be ignored though it changes the answer; log the other extras."""
        check_extra(self.model_extra, self.unsupported, HARMLESS)
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options needs stream: true", parameter="stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise RequestError("prompt_logprobs needs stream: false", parameter="prompt_logprobs")


class CompletionRequest(SamplingFields):
    """POST /v1/completions. `prompt` is checked by its route: text, texts, token ids or lists of those."""

    prompt: Any = None
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {
        **SamplingFields.unsupported,
        "suffix": (None, ""),
        "add_special_tokens": (None, True),
        "prompt_embeds": (None,),
    }


class ChatCompletionRequest(SamplingFields):
    """POST /v1/chat/completions. `messages` is checked by its route."""

    messages: Any = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None  # vLLM's: false leaves it out of the answer

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {
        **SamplingFields.unsupported,
        "functions": (None, []),
        "function_call": (None, "none", "auto"),
        "modalities": (None, [], ["text"]),
        "moderation": (None,),
        "verbosity": (None, "medium"),
        "audio": (None,),
        "web_search_options": (None,),
        "chat_template": (None,),
        "documents": (None, []),
        "echo": (None, False),
        "return_prompt_text": (None, False),
        "add_special_tokens": (None, False),
    }
