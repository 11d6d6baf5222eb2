"""Turns prompts into core requests."""

from __future__ import annotations

import contextlib
import itertools
import operator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from octavo.data.request import Request
from octavo.data.request_options import NO_OPTIONS
from octavo.engine.cache_points import shared_offsets, token_position
from octavo.errors import PromptTooLongError, RequestError
from octavo.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from octavo.config import ModelInfo
    from octavo.data.request_options import RequestOptions

_PREDICTED = "predicted_token_ids"
_ORDINARY_CHARS = 16  # per token

Prompt: TypeAlias = "str | Sequence[int] | Mapping[str, Any]"
"""Text, token ids, {"prompt": text} or {"prompt_token_ids": ids}.

A dictionary may have "predicted_token_ids", the expected answer, and "cache_points" (see `RequestOptions`). They only
speed up the request, or later ones.
"""


class TextCodec(Protocol):
    """Tokenizes prompts."""

    @property
    def longest_token_chars(self) -> int:
        """Number of characters in the longest token."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = True, most: int | None = None) -> list[int]:
        """Return token ids. If the text begins with BOS, adds no second BOS.

        If the text has more than `most` ids, the last ids may be missing.
        """
        ...

    def encode_end(self, text: str, num_tokens: int, *, add_special_tokens: bool = True) -> list[int]:
        """Return the text's last `num_tokens` ids."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text. Unknown ids are skipped."""
        ...

    def is_special(self, token_id: int) -> bool:
        """Return True for a control token, such as EOS."""
        ...

    def token_id(self, text: str) -> int | None:
        """Return a token's id."""
        ...

    def token(self, token_id: int) -> str:
        """Return a token's spelling, or "" for an unknown id."""
        ...


class ChatRenderer(Protocol):
    """Renders chat templates."""

    @property
    def templates(self) -> Mapping[str, str]:
        """Templates by name."""
        ...

    def render(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """Render a prompt."""
        ...


@dataclass(frozen=True, slots=True)
class ProcessedInput:
    """A checked request."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    streams: list[Request]


class InputProcessor:
    """Checks requests and translates them for the core. Without a seed, a request gets one from its arrival number."""

    def __init__(
        self, tokenizer: TextCodec | None, model_info: ModelInfo, seed: int, chat_template: ChatRenderer | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self.model_info = model_info
        self._seed = seed
        self._arrivals = itertools.count()  # `next` is thread-safe

    @property
    def has_chat_template(self) -> bool:
        """True if `chat_prompt` works."""
        return self._tokenizer is not None and self._chat_template is not None

    @property
    def chat_templates(self) -> list[str]:
        """The templates' texts."""
        return [] if self._chat_template is None else list(self._chat_template.templates.values())

    @property
    def tokenizer(self) -> TextCodec:
        """The tokenizer. Raises `RequestError` if there is none."""
        if self._tokenizer is None:
            raise RequestError("this engine was built without a tokenizer", parameter="tokenizer")
        return self._tokenizer

    def default_sampling_params(self, **overrides: Any) -> SamplingParams:
        """Return the checkpoint's default sampling parameters. Other parameters have vLLM's defaults."""
        return SamplingParams(**{**self.model_info.generation_defaults, **overrides})

    def encode(
        self, text: str, *, add_special_tokens: bool = True, is_prompt: bool = False, least_output_tokens: int = 1
    ) -> list[int]:
        """Return a text's token ids.

        is_prompt: If True, raises `PromptTooLongError` for more than `max_model_len` - `least_output_tokens` ids. If
        False, raises it only if the text has so many characters that it must have more than `max_model_len` ids.

        Also raises `RequestError`.
        """
        num_tokens = self.model_info.max_model_len
        if len(text) > _ORDINARY_CHARS * num_tokens:
            most = self.tokenizer.longest_token_chars * num_tokens
            if len(text) > most:
                raise PromptTooLongError(
                    f"prompt is too long: {len(text)} characters, and {num_tokens} tokens are {most} at most; this "
                    f"model's maximum context length is {num_tokens} tokens (max_model_len)",
                    parameter="prompt",
                )
        if not is_prompt:
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        token_ids = self.tokenizer.encode(text, add_special_tokens=add_special_tokens, most=num_tokens)
        PromptTooLongError.check(
            len(token_ids),
            num_tokens,
            is_all=len(token_ids) <= num_tokens,
            least_output_tokens=least_output_tokens,
        )
        return token_ids

    def encode_end(self, text: str, num_tokens: int, *, add_special_tokens: bool = True) -> list[int]:
        """Return a text's last `num_tokens` ids, at most `max_model_len`."""
        most = min(num_tokens, self.model_info.max_model_len)
        return self.tokenizer.encode_end(text, most, add_special_tokens=add_special_tokens)

    def encode_start(self, text: str, num_tokens: int, *, add_special_tokens: bool = True) -> list[int]:
        """Return a text's first `num_tokens` ids, at most `max_model_len`."""
        most = min(num_tokens, self.model_info.max_model_len)
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens, most=most)[:most]

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> dict[str, Any]:
        """Render and tokenize a conversation."""
        text = self.chat_text(messages, **options)
        token_ids = self.encode(text, add_special_tokens=False)
        points = self.cache_points(messages, text, len(token_ids), **options)
        return {"prompt": text, "prompt_token_ids": token_ids, "cache_points": points}

    def chat_text(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """Render a conversation."""
        if self._tokenizer is None or self._chat_template is None:
            raise RequestError("chat needs a tokenizer and a chat template; this model has none", parameter="messages")
        if "chat_template" in options:  # a template is a program, so clients may not send one
            raise RequestError("a request cannot bring a chat template of its own", parameter="chat_template")
        return self._chat_template.render(messages, **options)

    def cache_points(
        self, messages: Sequence[Mapping[str, Any]], text: str, num_tokens: int, **options: Any
    ) -> tuple[int, ...]:
        """Return a chat's cache points: see `RequestOptions`. Only models with recurrent layers have them.

        text, num_tokens: The rendered conversation. options: With which it was rendered.
        """
        if not self.model_info.has_recurrent_layers:
            return ()
        options |= {"add_generation_prompt": True, "continue_final_message": False}
        encode = partial(self.encode, add_special_tokens=False)
        with contextlib.suppress(RequestError):
            offsets = shared_offsets(lambda others: self.chat_text(others, **options), messages, text)
            return tuple(token_position(text, offset, num_tokens, encode) for offset in offsets)
        return ()

    def process(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        options: RequestOptions = NO_OPTIONS,
        arrival_time: float = 0.0,
    ) -> ProcessedInput:
        """Check a request and split it into streams. Raises `RequestError`."""
        params = replace(params) if params is not None else self.default_sampling_params()
        if params.pooling is None and not self.model_info.has_head:
            raise RequestError("this checkpoint has no lm_head.weight: it gives embeddings, and no tokens")
        if not isinstance(request_id, str):
            raise RequestError(f"request_id must be a text, got {request_id!r:.100}", parameter="request_id")
        self._check_structure(params)
        least = params.least_output_tokens
        text, token_ids = self._read_prompt(prompt, least)
        # The scheduler's check would be later, after the prompt is copied or sent.
        PromptTooLongError.check(len(token_ids), self.model_info.max_model_len, least_output_tokens=least)
        predicted = self._read_predicted(prompt)
        if points := _get(prompt, "cache_points"):
            options = replace(options, cache_points=points)
        self._check_token_ids(token_ids, params, predicted)
        arrival = next(self._arrivals)
        seed = params.seed if params.seed is not None else draw_seed(self._seed, arrival)
        further = params if params.n == 1 else replace(params, prompt_logprobs=None)  # only from the first stream
        eos_ids = frozenset[int]() if params.ignore_eos else self.model_info.eos_token_ids
        streams = [
            Request(
                request_id if params.n == 1 else f"{request_id}#{index}",
                token_ids,
                params if index == 0 else further,
                options=options,
                arrival_time=arrival_time,
                seed=seed,
                sample_index=index,
                stop_token_ids=eos_ids | frozenset(params.stop_token_ids),
                deadline=None if options.timeout_s is None else arrival_time + options.timeout_s,
                predicted_token_ids=predicted or None,
            )
            for index in range(params.n)
        ]
        return ProcessedInput(request_id, text, token_ids, params, streams)

    def _check_structure(self, params: SamplingParams) -> None:
        if params.structured_outputs is not None and self._tokenizer is None:
            raise RequestError(
                "structured_outputs need a tokenizer, and this engine has none", parameter="structured_outputs"
            )

    def _read_prompt(self, prompt: Prompt, least_output_tokens: int) -> tuple[str | None, list[int]]:
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise RequestError("a text prompt needs a tokenizer; send prompt_token_ids", parameter="prompt")
            return prompt, self.encode(prompt, is_prompt=True, least_output_tokens=least_output_tokens)
        if hasattr(prompt, "keys"):
            mapping: Mapping[str, Any] = prompt  # type: ignore[assignment]
            if mapping.get("prompt_token_ids") is not None:
                _, token_ids = self._read_prompt(mapping["prompt_token_ids"], least_output_tokens)
                return mapping.get("prompt"), token_ids
            if isinstance(mapping.get("prompt"), str):
                return self._read_prompt(mapping["prompt"], least_output_tokens)
            raise RequestError('a prompt needs "prompt" or "prompt_token_ids"', parameter="prompt")
        if isinstance(prompt, bytes) or not hasattr(prompt, "__iter__"):
            raise RequestError(f"a prompt is text or token ids, got {type(prompt).__name__}", parameter="prompt")
        return None, [_token_id(each) for each in prompt]

    def _read_predicted(self, prompt: Prompt) -> list[int]:
        given = _get(prompt, _PREDICTED)
        if given is None:
            return []
        if isinstance(given, (str, bytes)) or not hasattr(given, "__iter__"):
            raise RequestError(f"{_PREDICTED} must be token ids, got {given!r:.100}", parameter=_PREDICTED)
        token_ids, most = [_token_id(each, _PREDICTED) for each in given], self.model_info.max_model_len
        if len(token_ids) >= most:
            message = f"{_PREDICTED}: {len(token_ids)} tokens > {most - 1} maximum, as max_model_len is {most}"
            raise RequestError(message, parameter=_PREDICTED)
        return token_ids

    def _check_token_ids(self, token_ids: list[int], params: SamplingParams, predicted: list[int]) -> None:
        vocab_size = self.model_info.vocab_size
        if not token_ids:
            raise RequestError("the prompt is empty: at least one token is needed", parameter="prompt")
        for name, ids in (
            ("prompt", token_ids),
            ("logit_bias", params.logit_bias or ()),
            ("allowed_token_ids", params.allowed_token_ids or ()),
            ("stop_token_ids", params.stop_token_ids),
            (_PREDICTED, predicted),
        ):
            for token_id in ids:
                if not 0 <= token_id < vocab_size:
                    raise RequestError(
                        f"{name}: token id {token_id} is outside the vocabulary of {vocab_size}", parameter=name
                    )


def _get(prompt: Any, key: str) -> Any:
    """Return a value of a prompt that is a dictionary, or None."""
    return prompt.get(key) if hasattr(prompt, "keys") else None


def _token_id(value: Any, parameter: str = "prompt") -> int:
    try:
        token_id = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        token_id = None
    if token_id is None:
        name = parameter.removesuffix("_token_ids")
        raise RequestError(f"{name} token ids must be integers, got {value!r:.100}", parameter=parameter)
    return token_id


def draw_seed(engine_seed: int, arrival: int) -> int:
    """Return the seed for an arrival number, by splitmix64 (Steele, Lea, Flood 2014)."""
    mask = 2**64 - 1
    z = (engine_seed * 0xD1342543DE82EF95 + (arrival + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)
