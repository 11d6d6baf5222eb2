"""Request bodies of Ollama's API. None means the default value."""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, model_validator

from octavo.errors import RequestError
from octavo.http.apis import OLLAMA_TAG
from octavo.http.errors import ModelNotFoundError, client_field_names
from octavo.sampling_params import StructuredOutputsParams
from octavo.server.api import request_types as types
from octavo.server.api.extra_fields import (
    HARMLESS,
    OF_ANSWERS,
    OF_PROMPTS,
    UNSUPPORTED_OR_ALIAS,
    Off,
    each,
    refuse,
)
from octavo.server.api.openai.requests import Body, SamplingControls, Strings
from octavo.server.api.request_types import Shown, within
from octavo.server.api.sampling import read_response_format, sampling_params, token_limit

if TYPE_CHECKING:
    from octavo.sampling_params import SamplingParams
    from octavo.server.service import Service

_LOADING = "configures the loading of a model: it is already loaded"
_HARMLESS_OPTIONS = {
    **each(HARMLESS["mirostat_eta"], "mirostat_eta", "mirostat_tau"),
    **each(_LOADING, "embedding_only", "f16_kv", "logits_all", "low_vram", "main_gpu", "num_batch", "num_gpu"),
    **each(_LOADING, "num_thread", "numa", "use_mlock", "use_mmap", "vocab_only"),
    "num_keep": HARMLESS["n_keep"],
}
_UNSUPPORTED_OPTIONS: dict[str, tuple[Any, ...]] = {
    "mirostat": UNSUPPORTED_OR_ALIAS["mirostat"],
    "penalize_newline": Off(True),
    "tfs_z": UNSUPPORTED_OR_ALIAS["tfs_z"],
}
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    **UNSUPPORTED_OR_ALIAS,
    **each(Off(False, True), "shift", "truncate"),  # no effect, because too long prompts are refused
    "_debug_render_only": Off(False),
    "chat_template": Off(),
    "chat_template_kwargs": Off({}),
    **each(Off(0), "height", "steps", "width"),
    **each(Off([]), "messages", "tools"),
    **each(Off(""), "prompt", "suffix"),
}
_LAST_N = 64
_PENALTY_RANGE: dict[str, tuple[Any, ...]] = {"repeat_last_n": Off(-1, 0, _LAST_N)}
_NO_PENALTIES = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}
_NO_LIMIT = (-2, 0)  # like -1, no limit except the context length
# A duration of zero in Go's syntax.
_ZERO_TIME = re.compile(r"[+-]?(?:0|(?:(?:0++(?:\.0*+)?|\.0++)(?:ns|us|\u00b5s|\u03bcs|ms|s|m|h))+)")
_CLIENT_NAMES = {"max_tokens": "num_predict", "repetition_penalty": "repeat_penalty", "logprobs": "top_logprobs"}


_WHOLE = {"min_tokens", "num_ctx", "num_predict", "repeat_last_n", "seed", "top_k"}


class Options(SamplingControls):
    """Sampling options with Ollama's names or vLLM's names. Options for loading a model are ignored."""

    num_predict: Annotated[int, within("max_tokens", 0, -1, -2)] | None = None
    stop: Annotated[str | Strings, Shown(types.StopText | list[types.StopText])] | None = None
    repeat_penalty: types.RepetitionPenalty | None = None
    repeat_last_n: int | None = None
    num_ctx: int | None = None

    @model_validator(mode="before")
    @classmethod
    def _take_whole_floats(cls, given: Any) -> Any:
        """Accept 40.0 for 40, and drop empty stop strings, as Ollama does."""
        if not isinstance(given, dict):
            return given
        taken = {name: _whole(value) if name in _WHOLE else value for name, value in given.items()}
        stop = taken.get("stop")
        if stop == "":
            taken["stop"] = []
        elif isinstance(stop, list):
            taken["stop"] = [text for text in stop if text != ""]
        return taken


class AnswerRequest(Body):
    """Fields that /api/chat and /api/generate share."""

    model: str
    stream: bool | None = None
    format: Annotated[Any, Shown(str | types.Object | None)] = None
    options: Options | None = None
    think: bool | str | None = None
    logprobs: bool | None = None
    top_logprobs: types.NumLogprobs | None = None
    num_predict: Annotated[int, within("max_tokens", 0, -1, -2)] | None = None  # Open WebUI sends num_predict here
    keep_alive: Annotated[Any, Shown(float | str | None)] = None
    cache_salt: types.CacheSalt | None = None  # vLLM's

    def settle(self, service: Service) -> str:
        """Check the fields. Return the served model name. Raises `ModelNotFoundError`, `RequestError`."""
        name = served_name(service, self.model)
        given, options = self.model_extra or {}, self.options or Options()
        if misplaced := next((field for field in Options.model_fields if given.get(field) is not None), None):
            raise RequestError(f"{misplaced} must be in options, not next to it", parameter=misplaced)
        service.extra_fields.check(given, _UNSUPPORTED, HARMLESS)
        service.extra_fields.check(options.model_extra, _UNSUPPORTED_OPTIONS, _HARMLESS_OPTIONS, level=logging.WARNING)
        longest = service.model_info.max_model_len
        if options.num_ctx is not None and options.num_ctx > longest:
            service.extra_fields.warn_once("num_ctx", f"num_ctx {options.num_ctx} is more than max_model_len {longest}")
        return name

    def params(self, service: Service) -> SamplingParams:
        """Return sampling parameters. The default of num_predict is in generation_config.json."""
        options, defaults = self.options or Options(), service.default_params
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs: true", parameter="top_logprobs")
        penalty = options.repetition_penalty if options.repeat_penalty is None else options.repeat_penalty
        if options.presence_penalty or options.frequency_penalty or penalty not in (None, 1):
            refuse({"repeat_last_n": options.repeat_last_n}, _PENALTY_RANGE)
            if options.repeat_last_n == _LAST_N:
                message = f"penalties cover all tokens, not only the last {_LAST_N} (repeat_last_n)"
                service.extra_fields.warn_once("repeat_last_n", message)
        repetition = {"repetition_penalty": defaults.repetition_penalty if penalty is None else penalty}
        limit = self.num_predict if options.num_predict is None else options.num_predict
        default_limit = service.model_info.generation_defaults.get("max_tokens")
        with client_field_names(_CLIENT_NAMES, in_text=True):
            return sampling_params(
                options,
                defaults,
                max_tokens=token_limit(-1 if limit in _NO_LIMIT else limit, default_limit),
                logprobs=(self.top_logprobs or 0) if self.logprobs else None,
                structured_outputs=_read_format(self.format),
                **(_NO_PENALTIES if options.repeat_last_n == 0 else repetition),
            )

    @property
    def is_unloading(self) -> bool:
        """True if keep_alive is 0, which means "unload the model"."""
        given = self.keep_alive
        if isinstance(given, str):
            return _ZERO_TIME.fullmatch(given) is not None
        return isinstance(given, (int, float)) and not isinstance(given, bool) and given == 0

    def template_options(self, service: Service) -> dict[str, Any]:
        """Return template arguments for `think`."""
        if self.think is None or self.think == "":
            return {}
        if self.think and not service.answer_style.has_reasoning:
            raise RequestError(f"{self.model[:100]!r} does not support thinking", parameter="think")
        effort = {"reasoning_effort": self.think} if isinstance(self.think, str) else {}
        return {"enable_thinking": bool(self.think), **effort}


class ChatRequest(AnswerRequest):
    """POST /api/chat. A request without messages only asks to load the model."""

    messages: Annotated[list[Any], Shown(list[types.OllamaMessage])] | None = None
    tools: Annotated[list[Any], Shown(types.Tools[types.ChatTool])] | None = None


class PromptRequest(AnswerRequest):
    """POST /api/generate. A request without a prompt only asks to load the model.

    raw: True to omit the chat template.
    """

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None


class _VectorsRequest(Body):
    model: str
    options: dict[str, Any] | None = None

    def settle(self, service: Service) -> str:
        """Check the fields. Return the served model name. Raises `ModelNotFoundError`, `RequestError`."""
        service.extra_fields.check(self.model_extra, OF_PROMPTS, OF_ANSWERS)
        return served_name(service, self.model)


class EmbedRequest(_VectorsRequest):
    """POST /api/embed.

    truncate: False to refuse an input that is too long. Otherwise the end of the input is cut off.
    """

    input: Annotated[Any, Shown(str | list[str])] = None
    truncate: bool | None = None
    dimensions: Annotated[int, Shown(Annotated[int, Field(ge=0)])] | None = None  # 0 means all


class EmbeddingsRequest(_VectorsRequest):
    """POST /api/embeddings, an older route for one text."""

    prompt: str | None = None


class ShowRequest(Body):
    """POST /api/show. name: Older clients send this field instead of `model`."""

    model: str | None = None
    name: str | None = None


def served_name(service: Service, name: str) -> str:
    """Return the served name for a client's name, which may end with `:latest`. Raises `ModelNotFoundError`."""
    try:
        return service.check_model(name if name in service.model_names else name.removesuffix(OLLAMA_TAG), aliases=())
    except ModelNotFoundError:
        served = ", ".join(service.model_names)
        message = f"model '{name:.100}' not found, try pulling it first (this server pulls none; it serves: {served})"
        raise ModelNotFoundError(message, parameter="model") from None


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _read_format(given: Any) -> StructuredOutputsParams | None:
    if given in (None, ""):
        return None
    if given == "json":
        return StructuredOutputsParams(json_object=True)
    if not isinstance(given, dict):
        raise RequestError('format must be "json" or a JSON schema', parameter="format")
    return read_response_format({"type": "json_schema", "json_schema": {"schema": given}}, "format")
