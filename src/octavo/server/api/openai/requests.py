"""Request bodies of OpenAI's API, with vLLM's fields. None means the default value."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr

from octavo.errors import RequestError
from octavo.http.errors import client_field_names
from octavo.server.api import request_types as types
from octavo.server.api.extra_fields import ALIASES, HARMLESS, PENALTY_RANGE, UNSUPPORTED, As, Off, each, refuse
from octavo.server.api.request_types import Shown, within

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from octavo.server.api.extra_fields import ExtraFields

# `fail_fast`, because millions of errors would take too long.
TokenIds = Annotated[list[int], Field(fail_fast=True)]
Strings = Annotated[list[str], Field(fail_fast=True)]
Priority = Annotated[int, Field(ge=-(2**63), lt=2**63)]


class Body(BaseModel):
    """Base of request bodies. Types are strict. The route checks unknown fields."""

    model_config = ConfigDict(strict=True, extra="allow")


class StreamOptions(BaseModel):
    """Options that add token counts to a stream's last event, or to each event."""

    model_config = ConfigDict(strict=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingControls(Body):
    """Each field means the same as the equally named field of `SamplingParams`."""

    seed: Annotated[int, within("seed")] | None = None
    stop: Annotated[str | Strings, Shown(types.StopText | types.StopTexts)] | None = None
    temperature: types.Temperature | None = None
    top_p: types.TopP | None = None
    presence_penalty: Annotated[float, within("presence_penalty")] | None = None
    frequency_penalty: Annotated[float, within("frequency_penalty")] | None = None
    logit_bias: types.LogitBias | None = None
    # vLLM's
    top_k: types.TopK | None = None
    min_p: Annotated[float, within("min_p")] | None = None
    repetition_penalty: types.RepetitionPenalty | None = None
    min_tokens: Annotated[int, within("min_tokens")] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[TokenIds, Shown(list[types.TokenId])] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    allowed_token_ids: Annotated[TokenIds, Shown(types.Some[types.TokenId])] | None = None
    typical_p: Annotated[float, within("typical_p")] | None = None  # TGI's
    num_speculative_tokens: Annotated[int, within("num_speculative_tokens")] | None = None  # octavo's


class OtherNames(BaseModel):
    """Other servers' names, see `extra_fields.ALIASES`."""

    n_cmpl: types.NumChoices | None = None
    n_predict: types.MaxTokens | None = None
    num_predict: types.MaxTokens | None = None
    max_new_tokens: types.MaxTokens | None = None
    n_probs: types.NumLogprobs | None = None
    repeat_penalty: types.RepetitionPenalty | None = None
    repeat_last_n: int | None = None
    penalize_nl: bool | None = None
    grammar: str | None = None
    ebnf: str | None = None
    json_schema: dict[str, Any] | str | None = None
    regex: str | None = None
    guided_choice: Strings | None = None
    guided_grammar: str | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None


class Aliased(BaseModel):
    """Base of requests with field aliases."""

    aliases: ClassVar[dict[str, As]]
    _sent_as: dict[str, str] = PrivateAttr(default_factory=dict)

    def take_aliases(self) -> None:
        """Copy each alias's value to the real field. Raises `RequestError` if the real field has another value."""
        for name, alias in self.aliases.items():
            value = getattr(self, name, None)
            if value in (None, *alias.nothing):
                continue
            field, _, part = alias.name.partition(".")
            current = getattr(self, field)
            held = (current or {}).get(part) if part else current
            if held is not None and held != value:
                raise RequestError(f"{name} and {alias.name} have different values", parameter=name)
            setattr(self, field, {**(current or {}), part: value} if part else value)
            self._sent_as[field] = name


class TruncationFields(BaseModel):
    """vLLM's fields that truncate a prompt."""

    truncate_prompt_tokens: Annotated[int, Shown(Annotated[int, Field(ge=1)] | Literal[-1])] | None = None
    truncation_side: Literal["left", "right"] | None = None

    def check_truncation(self) -> None:
        """Raise `RequestError` unless truncate_prompt_tokens is None, -1 or at least 1."""
        num_kept = self.truncate_prompt_tokens
        if num_kept is not None and num_kept != -1 and num_kept < 1:
            message = "truncate_prompt_tokens must be at least 1, or -1 for as many as fit"
            raise RequestError(message, parameter="truncate_prompt_tokens")


class SamplingFields(SamplingControls, OtherNames, Aliased, TruncationFields):
    """Fields of chat completions and completions."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: types.MaxTokens | None = None
    n: types.NumChoices | None = None
    prompt_logprobs: types.NumLogprobs | None = None
    priority: Priority | None = None
    cache_salt: types.CacheSalt | None = None
    response_format: Annotated[dict[str, Any], Shown(types.ResponseFormat)] | None = None
    structured_outputs: Annotated[dict[str, Any], Shown(types.StructuredOutputs)] | None = None
    # vLLM's
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    aliases: ClassVar[dict[str, As]] = ALIASES
    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = UNSUPPORTED

    def settle(self, extra_fields: ExtraFields) -> None:
        """Apply aliases and check the fields. Raises `RequestError`."""
        extra_fields.check(self.model_extra, self.unsupported, HARMLESS)
        self.take_aliases()
        self._check_penalties()
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options needs stream: true", parameter="stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise RequestError("prompt_logprobs needs stream: false", parameter="prompt_logprobs")
        self.check_truncation()

    def _check_penalties(self) -> None:
        if self.repeat_penalty not in (None, 1) and self.repeat_last_n != -1:
            message = "repeat_penalty needs repeat_last_n: -1, because penalties cover all tokens"
            raise RequestError(message, parameter="repeat_penalty")
        penalties = (self.presence_penalty, self.frequency_penalty, (self.repetition_penalty or 1) - 1)
        if any(penalties):
            refuse({name: getattr(self, name) for name in PENALTY_RANGE}, PENALTY_RANGE)

    def named_as_sent(self) -> AbstractContextManager[None]:
        """Return a context in which errors name fields as the client sent them."""
        return client_field_names(self._sent_as, in_text=True)

    def client_names(self, **names: str) -> dict[str, str]:
        """Map the engine's field names to the names that the client sent.

        names: Maps the engine's field names to the API's field names.
        """
        return {**self._sent_as, **{engine_name: self._sent_as.get(name, name) for engine_name, name in names.items()}}


class ChatFields(BaseModel):
    """Fields that change the prompt, in addition to the messages."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None  # DashScope's
    reasoning_effort: str | None = None
    tools: Annotated[list[Any], Shown(types.Tools[types.ChatTool])] | None = None
    tool_choice: Annotated[Any, Shown(types.ChatChoice | None)] = None


class CompletionRequest(SamplingFields):
    """POST /v1/completions."""

    prompt: Annotated[Any, Shown(types.Prompts)]
    best_of: int | None = None
    echo: bool | None = None
    logprobs: types.NumLogprobs | None = None

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {
        **SamplingFields.unsupported,
        "suffix": Off(""),
        "add_special_tokens": Off(True),
        "prompt_embeds": Off(),
    }


class ChatCompletionRequest(ChatFields, SamplingFields):
    """POST /v1/chat/completions."""

    messages: Annotated[Any, Shown(types.ChatMessages)]
    max_completion_tokens: types.MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: types.NumLogprobs | None = None
    parallel_tool_calls: bool | None = None
    prediction: Annotated[Any, Shown(types.Prediction | None)] = None
    include_reasoning: bool | None = None  # vLLM's field. False omits the reasoning from the answer.

    aliases: ClassVar[dict[str, As]] = {**SamplingFields.aliases, "n_probs": As("top_logprobs", (0,))}
    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {
        **SamplingFields.unsupported,
        **each(Off(), "audio", "chat_template", "moderation", "web_search_options"),
        **each(Off([]), "documents", "functions"),
        **each(Off(False), "add_special_tokens", "echo", "return_prompt_text"),
        "function_call": Off("none", "auto"),
        "modalities": Off([], ["text"]),
        "verbosity": Off("medium"),
    }

    def settle(self, extra_fields: ExtraFields) -> None:
        """Apply aliases and check the fields. n_probs sets logprobs and top_logprobs."""
        super().settle(extra_fields)
        if self.n_probs:
            self.logprobs = True
