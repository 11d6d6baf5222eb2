"""The API of text-generation-inference (TGI), which `huggingface_hub.InferenceClient` uses."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET, Struct, UnsetType
from pydantic import BaseModel, ConfigDict
from starlette.responses import JSONResponse

from octavo import __version__
from octavo.errors import RequestError
from octavo.http.apis import TGI
from octavo.http.errors import client_field_names
from octavo.runtime.ids import new_id
from octavo.sampling_params import MAX_STOP_STRINGS, SamplingParams, StructuredOutputsParams
from octavo.server.answers.answering import answer
from octavo.server.answers.jobs import ChoiceUpdate, Job, event
from octavo.server.answers.usage import Receipt
from octavo.server.api.extra_fields import HARMLESS, UNSUPPORTED_OR_ALIAS, Off
from octavo.server.api.openai.requests import Body, Strings
from octavo.server.api.sampling import sampling_params
from octavo.server.api.tgi_tokens import PrefillToken, Token, TokenTexts
from octavo.server.bodies import look_at
from octavo.server.endpoints import endpoint

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.requests import Request
    from starlette.responses import Response

    from octavo.engine.input_processor import ProcessedInput
    from octavo.http.errors import HttpError
    from octavo.outputs import CompletionOutput, Logprob, RequestOutput
    from octavo.server.answers.usage import Usage
    from octavo.server.service import Service

DEFAULT_MAX_NEW_TOKENS = 100
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {**UNSUPPORTED_OR_ALIAS, "best_of": Off(1)}
# `options` next to `inputs` is for Hugging Face's service.
_UNSUPPORTED_BESIDE = {name: neutral for name, neutral in UNSUPPORTED_OR_ALIAS.items() if name != "options"}
_HARMLESS_BESIDE = {*HARMLESS, "options"}
_CLIENT_NAMES = {
    "prompt": "inputs",
    "structured_outputs": "grammar",
    "max_tokens": "max_new_tokens",
    "logprobs": "top_n_tokens",
    "prompt_logprobs": "decoder_input_details",
}


class Grammar(BaseModel):
    """The structure of the answer, a JSON schema or a regular expression."""

    model_config = ConfigDict(strict=True)

    type: str
    value: Any


class GenerateParameters(Body):
    """Generation is greedy unless do_sample, temperature, top_k, top_p or typical_p requests sampling."""

    decoder_input_details: bool | None = None
    details: bool | None = None
    do_sample: bool | None = None
    frequency_penalty: float | None = None
    grammar: Grammar | None = None
    max_new_tokens: int | None = None
    repetition_penalty: float | None = None
    return_full_text: bool | None = None
    seed: int | None = None
    stop: Strings | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_n_tokens: int | None = None
    top_p: float | None = None
    truncate: int | None = None
    typical_p: float | None = None


class GenerateRequest(Body):
    """A prompt to continue."""

    inputs: str
    parameters: GenerateParameters | None = None
    stream: bool | None = None


class Details(Struct):
    """Details of a whole answer."""

    finish_reason: str
    generated_tokens: int
    seed: int | None
    prefill: list[PrefillToken]
    tokens: list[Token]
    top_tokens: list[list[Token]] | UnsetType = UNSET
    receipt: Receipt | UnsetType = UNSET


class Generated(Struct):
    """POST /generate."""

    generated_text: str
    details: Details | UnsetType = UNSET


class StreamDetails(Struct):
    """Details in a stream's last event."""

    finish_reason: str
    generated_tokens: int
    input_length: int
    seed: int | None
    receipt: Receipt | UnsetType = UNSET


class StreamEvent(Struct):
    """The event for one token. The last event also has the whole text."""

    index: int
    token: Token
    generated_text: str | None = None
    details: StreamDetails | None = None
    top_tokens: list[Token] | UnsetType = UNSET


@endpoint(body=GenerateRequest, answer=Generated)
async def generate(service: Service, http_request: Request, request: GenerateRequest) -> Response:
    """Continue a prompt."""
    return await _generate(service, http_request, request, stream=False)


@endpoint(body=GenerateRequest, is_streamed=True)
async def generate_stream(service: Service, http_request: Request, request: GenerateRequest) -> Response:
    """Continue a prompt."""
    return await _generate(service, http_request, request, stream=True)


@endpoint(body=GenerateRequest, answer=list[Generated], is_streamed=True)
async def generate_either(service: Service, http_request: Request, request: GenerateRequest) -> Response:
    """Continue a prompt."""
    return await _generate(service, http_request, request, stream=bool(request.stream), in_list=True)  # as TGI does


async def _generate(
    service: Service, http_request: Request, request: GenerateRequest, *, stream: bool, in_list: bool = False
) -> Response:
    wanted = request.parameters or GenerateParameters()
    service.extra_fields.check(request.model_extra, _UNSUPPORTED_BESIDE, _HARMLESS_BESIDE)
    service.extra_fields.check(wanted.model_extra, _UNSUPPORTED, HARMLESS)
    with client_field_names(_CLIENT_NAMES, in_text=True):
        params = await look_at(http_request, lambda: _params(wanted, stream=stream))
    with service.enter(http_request, 1) as place:
        prompt: Any = request.inputs
        if wanted.truncate is not None:
            prompt = await service.read(http_request, place, partial(_end, service, prompt, wanted.truncate))
        limit = service.model_info.max_model_len
        job = Job(
            request_id=f"gen-{new_id()}",
            model=service.model_names[0],
            prompts=[prompt],
            params=params,
            place=place,
            deadline=http_request.state.deadline,
            stream=stream,
            client_names=_CLIENT_NAMES,
            check=partial(_check_total, num_new_tokens=wanted.max_new_tokens or 0, max_total_tokens=limit),
        )
        return await answer(service, http_request, job, GenerateReply(service, wanted, request.inputs, in_list=in_list))


@endpoint(answer=dict[str, Any])
async def info(service: Service, _http_request: Request) -> Response:
    """Describe the model and its limits."""
    length, limits, capacity = service.model_info.max_model_len, service.config, service.engine.client.capacity
    return JSONResponse(
        {
            "model_id": service.model_names[0],
            "model_sha": None,
            "model_pipeline_tag": "text-generation",
            "max_concurrent_requests": limits.max_open_requests,
            "max_best_of": 1,
            "max_stop_sequences": MAX_STOP_STRINGS,
            "max_input_tokens": length - 1,
            "max_total_tokens": length,
            "max_batch_prefill_tokens": capacity.max_batch_prefill_tokens,
            "max_batch_total_tokens": capacity.max_batch_total_tokens,
            "kv_cache_tokens": capacity.kv_cache_tokens,
            "validation_workers": 1,
            "max_client_batch_size": 1,
            "router": "octavo",
            "version": __version__,
            "sha": None,
            "docker_label": None,
        }
    )


def _params(wanted: GenerateParameters, *, stream: bool) -> SamplingParams:
    if wanted.decoder_input_details and stream:
        raise RequestError("decoder_input_details is not supported with streaming", parameter="decoder_input_details")
    if wanted.temperature is not None and wanted.temperature <= 0:
        raise RequestError(
            "temperature must be above 0; for greedy sampling leave it and do_sample out", parameter="temperature"
        )
    filters = (wanted.temperature, wanted.top_p, wanted.typical_p)
    samples = wanted.do_sample or wanted.top_k or any(value not in (None, 1.0) for value in filters)
    temperature = 1.0 if wanted.temperature is None else wanted.temperature
    return sampling_params(
        wanted,
        SamplingParams(),
        temperature=temperature if samples else 0.0,
        max_tokens=DEFAULT_MAX_NEW_TOKENS if wanted.max_new_tokens is None else wanted.max_new_tokens,
        include_stop_str_in_output=True,
        logprobs=wanted.top_n_tokens or 0,
        prompt_logprobs=0 if wanted.decoder_input_details else None,
        structured_outputs=_structure(wanted.grammar),
    )


def _check_total(processed: ProcessedInput, *, num_new_tokens: int, max_total_tokens: int) -> None:
    num_tokens = len(processed.prompt_token_ids)
    if num_new_tokens and num_tokens + num_new_tokens > max_total_tokens:
        raise RequestError(
            f"Input validation error: `inputs` tokens + `max_new_tokens` must be <= {max_total_tokens}. "
            f"Given: {num_tokens} `inputs` tokens and {num_new_tokens} `max_new_tokens`",
            parameter="max_new_tokens",
        )


def _structure(grammar: Grammar | None) -> StructuredOutputsParams | None:
    if grammar is None:
        return None
    kind = {"json": "json", "json_schema": "json", "regex": "regex"}.get(grammar.type)
    value = grammar.value
    if kind == "json" and isinstance(value, str):
        value = _parsed(value)
    if grammar.type == "json_schema" and isinstance(value, dict):  # with name and schema, as in OpenAI's API
        value = value.get("schema")
    if kind is None or (kind == "json" and not isinstance(value, dict)):
        raise RequestError("grammar must be {type: json, value: a schema} or {type: regex, ...}", parameter="grammar")
    return StructuredOutputsParams(**{kind: value})


def _parsed(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError) as error:
        message = f"grammar.value is a string but not valid JSON: {error}"
        raise RequestError(message, parameter="grammar") from None


def _end(service: Service, text: str, num_kept: int) -> dict[str, Any]:
    if num_kept < 1:
        raise RequestError("truncate must be at least 1", parameter="truncate")
    return {"prompt": text, "prompt_token_ids": service.engine.input_processor.encode_end(text, num_kept)}


class GenerateReply:
    """Formats TGI's answers."""

    def __init__(self, service: Service, wanted: GenerateParameters, inputs: str, *, in_list: bool = False) -> None:
        self._is_special = service.engine.input_processor.tokenizer.is_special
        self._texts = service.engine.output_processor
        self._in_list = in_list
        self._wanted = wanted
        self._prefix = inputs if wanted.return_full_text else ""
        self._text = ""
        self._token_texts: TokenTexts | None = None
        self._num_tokens = 0

    def update(self, update: ChoiceUpdate, _usage: Usage | None) -> bytes:
        """Return one event per token, and at least one event."""
        completion = update.completion
        self._text += completion.text
        tokens = self._tokens(completion)
        for token in tokens:
            token.text = ""
        rest = self._share_text(tokens, update.output, whole=self._text if completion.finished else None)
        tokens = tokens or [Token(0, "", None, special=True)]  # an aborted request may have no token
        tokens[-1].text += rest
        events = []
        for position, token in enumerate(tokens):
            events.append(StreamEvent(self._num_tokens + min(position + 1, len(completion.token_ids)), token))
            if self._wanted.top_n_tokens and completion.logprobs:
                events[-1].top_tokens = self._best(completion.logprobs[position])
        self._num_tokens += len(completion.token_ids)
        if completion.finished:
            self._finish(events[-1], update)
        return b"".join(map(event, events))

    def _share_text(self, tokens: list[Token], output: RequestOutput, *, whole: str | None) -> str:
        if self._token_texts is None:
            detokenizer = self._texts.tokenizer.incremental_detokenizer(
                output.prompt_token_ids, skip_special_tokens=True
            )
            self._token_texts = TokenTexts(detokenizer)
        return self._token_texts.share(tokens, whole)

    def _finish(self, last: StreamEvent, update: ChoiceUpdate) -> None:
        last.generated_text = self._prefix + self._text
        last.details = StreamDetails(
            _finish_reason(update.completion), self._num_tokens, len(update.output.prompt_token_ids), self._wanted.seed
        )
        if update.output.metrics is not None:
            last.details.receipt = Receipt.of([update.output.metrics])

    def end(self, _usage: Usage) -> bytes:
        """Return b"", because `update` returned the last event."""
        return b""

    def whole(self, outputs: Sequence[RequestOutput], usage: Usage) -> Generated | list[Generated]:
        """Return the answer."""
        (output,) = outputs
        (completion,) = output.outputs
        generated = Generated(self._prefix + completion.text)
        if self._wanted.details or self._wanted.decoder_input_details:
            tokens = self._tokens(completion)
            self._share_text(tokens, output, whole=completion.text)
            generated.details = Details(
                _finish_reason(completion),
                len(completion.token_ids),
                self._wanted.seed,
                self._prefill(output),
                tokens,
                receipt=usage.receipt,
            )
            if self._wanted.top_n_tokens:
                generated.details.top_tokens = [self._best(entry) for entry in completion.logprobs or []]
        return [generated] if self._in_list else generated

    def error(self, error: HttpError) -> bytes:
        """Encode an error."""
        return TGI.event(error)

    def _tokens(self, completion: CompletionOutput) -> list[Token]:
        entries: Sequence[dict[int, Logprob] | None] = completion.logprobs or [None] * len(completion.token_ids)
        return [
            self._token(token_id, None if entry is None else entry[token_id])
            for token_id, entry in zip(completion.token_ids, entries, strict=True)
        ]

    def _best(self, entry: dict[int, Logprob]) -> list[Token]:
        ranked = sorted(entry.items(), key=lambda item: item[1].rank or 0)
        return [self._token(token_id, logprob) for token_id, logprob in ranked[: self._wanted.top_n_tokens]]

    def _token(self, token_id: int, logprob: Logprob | None) -> Token:
        text = "" if logprob is None else logprob.decoded_token or ""
        return Token(token_id, text, None if logprob is None else logprob.logprob, self._is_special(token_id))

    def _prefill(self, output: RequestOutput) -> list[PrefillToken]:
        entries: Sequence[dict[int, Logprob] | None] = output.prompt_logprobs or []
        return [
            self._prefill_token(token_id, entry[token_id] if entry else None)
            for token_id, entry in zip(output.prompt_token_ids, entries, strict=False)
        ]

    def _prefill_token(self, token_id: int, logprob: Logprob | None) -> PrefillToken:
        if logprob is None:  # the first token
            return PrefillToken(token_id, self._texts.tokenizer.decode_token(token_id) or "", None)
        return PrefillToken(token_id, logprob.decoded_token or "", logprob.logprob)


def _finish_reason(completion: CompletionOutput) -> str:
    if completion.finish_reason == "stop":
        return "stop_sequence" if isinstance(completion.stop_reason, str) else "eos_token"
    return "length"
