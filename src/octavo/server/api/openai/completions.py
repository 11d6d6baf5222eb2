"""POST /v1/completions."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from msgspec import UNSET

from octavo.errors import RequestError
from octavo.runtime.ids import new_id
from octavo.server.answers.answering import answer
from octavo.server.answers.jobs import ChoiceUpdate, Job
from octavo.server.api.openai.chunks import OpenAIReply, openai_options
from octavo.server.api.openai.logprobs import PlacedLogprobs, completion_logprobs, prompt_logprobs
from octavo.server.api.openai.replies import Completion, CompletionChoice, CompletionLogprobs
from octavo.server.api.openai.requests import CompletionRequest
from octavo.server.api.openai.token_places import TokenPlaces, places_in_prompt
from octavo.server.api.sampling import read_structure, sampling_params, token_limit
from octavo.server.api.truncation import Truncation
from octavo.server.bodies import look_at
from octavo.server.endpoints import endpoint

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.requests import Request
    from starlette.responses import Response

    from octavo.data.model_output import TokenLogprobs
    from octavo.engine.output_processor import OutputProcessor
    from octavo.http.limiter import Permit
    from octavo.outputs import CompletionOutput, RequestOutput
    from octavo.sampling_params import SamplingParams
    from octavo.server.answers.usage import Usage
    from octavo.server.api.openai.logprobs import Position
    from octavo.server.api.openai.token_places import TokenPlace
    from octavo.server.service import Service

MAX_CHOICES = 1024


@endpoint(body=CompletionRequest, answer=Completion, is_streamed=True)
async def create_completion(service: Service, http_request: Request, request: CompletionRequest) -> Response:
    """Continue prompts."""
    model = service.check_model(request.model)
    request.settle(service.extra_fields)

    def read() -> tuple[list[Any], SamplingParams]:
        prompts = read_prompts(request.prompt)
        with request.named_as_sent():
            return prompts, _params(request, service.default_params)

    prompts, params = await look_at(http_request, read)
    if len(prompts) * params.n > MAX_CHOICES:
        raise RequestError(
            f"{len(prompts)} prompts with n = {params.n} are {len(prompts) * params.n} choices; the limit is "
            f"{MAX_CHOICES}: send fewer prompts or a smaller n",
            parameter="n",
        )
    texts = service.engine.output_processor
    echo = Echo(bool(request.echo), bool(request.echo) and request.max_tokens == 0, texts, params.skip_special_tokens)
    truncation = Truncation.of(request, params.max_tokens or 1, service.model_info.max_model_len)
    with service.enter(http_request, len(prompts) * params.n, at_least=params.n) as place:
        prompts = await truncated(service, http_request, place, prompts, truncation)
        job = Job(
            request_id=f"cmpl-{new_id()}",
            model=model,
            prompts=prompts,
            params=params,
            place=place,
            counts_completions=not echo.is_alone,
            deadline=http_request.state.deadline,
            **openai_options(request, "prompt"),
        )
        if request.prompt_logprobs is None:  # then only an echo with logprobs sets prompt_logprobs
            job.client_names["prompt_logprobs"] = job.client_names.get("logprobs", "logprobs")
        return await answer(service, http_request, job, CompletionReply(job, echo, request))


async def truncated(
    service: Service, http_request: Request, place: Permit, prompts: list[Any], truncation: Truncation
) -> list[Any]:
    """Truncate prompts."""
    if truncation.num_tokens is None:
        return prompts
    inputs = service.engine.input_processor
    return await service.read(
        http_request, place, lambda: [truncation.applied_to(prompt, inputs) for prompt in prompts]
    )


def _params(request: CompletionRequest, defaults: SamplingParams) -> SamplingParams:
    if request.best_of not in (None, request.n or 1):
        raise RequestError(f"best_of must equal n ({request.n or 1}) or be left out", parameter="best_of")
    max_tokens = token_limit(request.max_tokens, defaults.max_tokens)
    if request.echo and max_tokens == 0:
        max_tokens = 1  # the engine samples at least one token, which the reply omits
    params = sampling_params(request, defaults, max_tokens=max_tokens, structured_outputs=read_structure(request))
    if request.echo and request.logprobs is not None:
        params = replace(params, prompt_logprobs=max(request.logprobs, params.prompt_logprobs or 0))
    return params


def read_prompts(prompt: Any, name: str = "prompt", limit: int = MAX_CHOICES) -> list[Any]:
    """Return a list of prompts. prompt: A text, a list of texts, a list of token ids, or a list of such lists."""
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise RequestError(f"{name} must be a string, token ids, or a non-empty list of those", parameter=name)
    if _is_token_ids(prompt):
        return [{"prompt_token_ids": prompt}]
    if len(prompt) > limit:
        raise RequestError(f"{name} holds {len(prompt)} prompts; the limit is {limit}", parameter=name)
    if all(isinstance(item, str) for item in prompt):
        return list(prompt)
    if all(isinstance(item, list) and _is_token_ids(item) for item in prompt):
        return [{"prompt_token_ids": item} for item in prompt]
    raise RequestError(f"{name} must hold strings only, or integers, or lists of integers", parameter=name)


def _is_token_ids(items: list[Any]) -> bool:
    return all(type(item) is int for item in items)


@dataclass(frozen=True, slots=True)
class Echo:
    """Repeats prompts in answers, if requested. is_alone: True if answers are only the repeated prompts."""

    is_wanted: bool
    is_alone: bool
    processor: OutputProcessor
    skip_special_tokens: bool
    texts: dict[str, str] = field(default_factory=dict)
    places: dict[str, list[TokenPlace]] = field(default_factory=dict)

    def prompt_text(self, output: RequestOutput) -> str:
        """Return the prompt's text, or "" without echo."""
        if not self.is_wanted:
            return ""
        if output.prompt is not None:
            return output.prompt
        if output.request_id not in self.texts:
            text = self.processor.decode(output.prompt_token_ids, skip_special_tokens=self.skip_special_tokens)
            self.texts[output.request_id] = text
        return self.texts[output.request_id]

    def prompt_places(self, output: RequestOutput) -> list[TokenPlace]:
        """Return the prompt tokens' places."""
        if output.request_id not in self.places:
            tokenizer, token_ids = self.processor.tokenizer, output.prompt_token_ids
            if output.prompt is not None:
                found = places_in_prompt(tokenizer, output.prompt, token_ids)
            else:
                places = TokenPlaces(tokenizer, [], 0, skip_special_tokens=self.skip_special_tokens)
                found = [*places.add(token_ids), *places.finish()]
            self.places[output.request_id] = found
        return self.places[output.request_id]

    def places_after(self, output: RequestOutput) -> TokenPlaces:
        """Return `TokenPlaces` for generated text."""
        offset, skip = len(self.prompt_text(output)), self.skip_special_tokens
        return TokenPlaces(self.processor.tokenizer, output.prompt_token_ids, offset, skip_special_tokens=skip)


class CompletionReply(OpenAIReply[CompletionChoice, Completion]):
    """Formats completions."""

    def __init__(self, job: Job, echo: Echo, request: CompletionRequest) -> None:
        super().__init__(job)
        self._echo = echo
        self._request = request
        self._scored: dict[int, PlacedLogprobs] = {}

    def _grown(self, update: ChoiceUpdate) -> CompletionChoice | None:
        choice = self._choice(update.choice, update.completion, update.output, with_prompt=update.is_first)
        has_tokens = choice.token_ids or (choice.logprobs is not None and choice.logprobs.tokens)
        return choice if choice.text or has_tokens or not update.completion.finished else None

    def _ended(self, update: ChoiceUpdate) -> CompletionChoice:
        logprobs = None if update.completion.logprobs is None else CompletionLogprobs([], [], [], [])
        token_ids: list[int] | None = [] if self._request.return_token_ids else None
        return _with_reason(CompletionChoice(update.choice, "", logprobs, token_ids=token_ids), update.completion)

    def _event(self, choices: list[CompletionChoice], usage: Usage | None) -> Completion:
        shown = usage if self._job.include_usage else UNSET
        return Completion(self._job.request_id, self._job.created, self._job.model, choices, usage=shown)

    def whole(self, outputs: Sequence[RequestOutput], usage: Usage) -> Completion:
        """Return n choices for each prompt, in order."""
        choices = [
            self._whole_choice(index * self._job.params.n + completion.index, completion, output)
            for index, output in enumerate(outputs)
            for completion in output.outputs
        ]
        names = self._job.request_id, self._job.created, self._job.model
        return Completion(*names, choices, usage=usage, service_tier=None, kv_transfer_params=None)

    def _whole_choice(self, index: int, completion: CompletionOutput, output: RequestOutput) -> CompletionChoice:
        choice = _with_reason(self._choice(index, completion, output, with_prompt=True), completion)
        entries = None if self._request.prompt_logprobs is None else output.prompt_logprobs
        choice.prompt_logprobs = None if entries is None else prompt_logprobs(entries)
        return choice

    def _choice(
        self, index: int, completion: CompletionOutput, output: RequestOutput, *, with_prompt: bool
    ) -> CompletionChoice:
        prompt = self._echo.prompt_text(output) if with_prompt else ""
        text = prompt if self._echo.is_alone else prompt + completion.text
        choice = CompletionChoice(index, text, self._logprobs(index, completion, output, with_prompt=with_prompt))
        if self._request.return_token_ids:
            choice.token_ids = [] if self._echo.is_alone else completion.token_ids
            choice.prompt_token_ids = output.prompt_token_ids if with_prompt else None
        return choice

    def _logprobs(
        self, index: int, completion: CompletionOutput, output: RequestOutput, *, with_prompt: bool
    ) -> CompletionLogprobs | None:
        if completion.logprobs is None:
            return None
        positions: list[Position | TokenLogprobs | None] = []
        places: list[TokenPlace] = []
        if self._echo.is_wanted and with_prompt and output.prompt_logprobs is not None:
            positions += [None, *output.prompt_logprobs.entries]
            places += self._echo.prompt_places(output)
        if not self._echo.is_alone:
            if index not in self._scored:
                self._scored[index] = PlacedLogprobs(self._echo.places_after(output))
            more = self._scored[index].add(completion.token_ids, completion.logprobs, is_over=completion.finished)
            positions += [position for _, position in more]
            places = places + [place for place, _ in more]
        as_ids = bool(self._request.return_tokens_as_token_ids)
        return completion_logprobs(positions, places, self._echo.processor.piece, as_ids=as_ids)


def _with_reason(choice: CompletionChoice, completion: CompletionOutput) -> CompletionChoice:
    choice.finish_reason, choice.stop_reason = completion.finish_reason, completion.stop_reason
    return choice
