"""The state of a server."""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from octavo.config import ServerConfig
from octavo.errors import (
    ConfigError,
    DeadlineError,
    EngineDeadError,
    EngineRestartingError,
    OctavoError,
)
from octavo.http.errors import ModelNotFoundError, client_field_names
from octavo.http.service import HttpService, key_removed, server_closing
from octavo.outputs import ErrorCode
from octavo.server.answers.answer_form import AnswerStyle
from octavo.server.answers.answering import unless_disconnected
from octavo.server.answers.job_outputs import error_of
from octavo.server.api.extra_fields import ExtraFields
from octavo.server.telemetry.metrics import engine_collector

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Mapping, Sequence

    from starlette.requests import Request

    from octavo.config import ModelInfo
    from octavo.data.request_options import RequestOptions
    from octavo.engine.async_llm import AsyncEngine
    from octavo.engine.input_processor import ProcessedInput
    from octavo.http.limiter import Permit
    from octavo.http.tenants import Tenant
    from octavo.outputs import RequestOutput
    from octavo.sampling_params import SamplingParams
    from octavo.server.answers.jobs import Job
    from octavo.server.telemetry.tracing import Tracing

T = TypeVar("T")
logger = logging.getLogger(__name__)
MAX_FAILED_STARTS = 5  # consecutive engine processes that ended before they were ready
_NO_NAMES = ("tgi", "dummy")  # TGI's clients send these names
_ENGINE_GRACE_S = 1.0  # time for the engine to end aborted requests
_BODIES = 16  # request bodies of the largest size


@dataclass(slots=True)
class _Open:
    """An open request. cut_off: Error to raise if the request is aborted."""

    tenant: Tenant
    cut_off: OctavoError | None = None

    def error(self, output: RequestOutput) -> OctavoError | None:
        for completion in output.outputs:
            if completion.finish_reason == "abort":
                assert self.cut_off is not None, "an open request was aborted without a reason"
                return self.cut_off
        return error_of(output)


class Service(HttpService):
    """Serves one engine with API keys and limits.

    settings: Shown by GET /server_info, so they must not contain secrets.

    Raises `ConfigError` if the file of keys is unusable, or if packages for a requested feature are missing.
    """

    config: ServerConfig

    def __init__(
        self, engine: AsyncEngine, config: ServerConfig | None = None, settings: Mapping[str, Any] | None = None
    ) -> None:
        self.engine = engine
        self.settings = dict(settings or {})
        config = config or ServerConfig()
        super().__init__(
            config,
            engine_collector(self, config.metrics_prefix),
            num_bodies=_BODIES,
            max_waiting_tokens=config.max_num_waiting_tokens,
        )
        self.model_names = self.config.served_model_names or (self.model_info.name,)
        self.extra_fields = ExtraFields()
        self.tracing = _make_tracing(self.config.otlp_traces_endpoint)
        inputs = engine.input_processor
        self.default_params: SamplingParams = inputs.default_sampling_params()
        self.answer_style = AnswerStyle.find(self.config.tool_call_parser, self.config.reasoning_parser, inputs)
        logger.info("%s", self.answer_style.summary)
        self._is_ending = False
        self._open: dict[str, _Open] = {}
        self._endings: set[asyncio.Task[None]] = set()

    @property
    def is_dead(self) -> bool:
        """True if the engine will not be restarted."""
        return self.engine.is_dead

    @property
    def model_info(self) -> ModelInfo:
        """The model's description."""
        return self.engine.input_processor.model_info

    def check_model(self, name: str | None, aliases: Sequence[str] = _NO_NAMES) -> str:
        """Return the served model name for a name that a client sent. Raises `ModelNotFoundError`.

        None and the unserved names in `aliases` mean the first served name.
        """
        if name is None or (name in aliases and name not in self.model_names):
            return self.model_names[0]
        if name not in self.model_names:
            known = ", ".join(self.model_names)
            raise ModelNotFoundError(f"the model {name!r} does not exist; served: {known}", parameter="model")
        return name

    def check_alive(self) -> None:
        """Raise `EngineDeadError` if this process must be restarted."""
        if self.engine.is_dead or self.engine.client.num_failed_starts >= MAX_FAILED_STARTS:
            raise EngineDeadError("dead", retry_after_s=self.engine.client.retry_after_s)

    def check_engine(self) -> None:
        """Raise `EngineDeadError` or `EngineRestartingError` unless the engine is ready."""
        self.check_alive()
        if not self.engine.is_alive:
            raise EngineRestartingError("not ready", retry_after_s=self.engine.client.retry_after_s)

    def _keys_changed(self) -> None:
        gone = [name for name, opened in self._open.items() if self.present(opened.tenant) is None]
        self._cut_off(gone, key_removed)
        ending = asyncio.get_running_loop().create_task(self._end(gone))
        self._endings.add(ending)
        ending.add_done_callback(self._endings.discard)

    def enter(self, request: Request, num_streams: int, *, at_least: int | None = None) -> Permit:
        """Return a permit for a request's streams. Call this before any work for the request.

        For arguments, see `RequestLimiter.enter`. Raises `QueueFullError`, `RequestError`, or the errors of
        `check_ready`.
        """
        self.check_ready()
        return self.limiter.enter(request.state.tenant, num_streams, at_least=at_least)

    async def read(self, http_request: Request, place: Permit, work: Callable[[], T]) -> T:
        """Return the result of `work`, which tokenizes or decodes texts. See `TextWork.do`.

        The deadline or a disconnect stops the work. The tenant is charged for the tokens that `work` read, even if the
        request fails.
        """
        state = http_request.state
        reading = self.engine.text.do(
            work,
            num_chars=state.num_body_bytes,
            tenant=place.tenant.name,
            deadline=state.deadline,
            on_read=place.charge,
            is_count=state.is_count,
        )
        return await unless_disconnected(http_request, reading)

    async def _read_prompt(self, job: Job, index: int) -> Any:
        prompt = job.prompts[index]
        if not isinstance(prompt, str):
            return prompt
        least = job.params.least_output_tokens
        token_ids = await self.engine.text.do(
            partial(self.engine.input_processor.encode, prompt, is_prompt=True, least_output_tokens=least),
            num_chars=len(prompt),
            tenant=job.place.tenant.name,
            deadline=job.deadline,
            on_read=job.place.charge,
        )
        return {"prompt": prompt, "prompt_token_ids": token_ids}

    async def generate(
        self,
        job: Job,
        index: int,
        *,
        check: Callable[[ProcessedInput], None],
        unsent: Callable[[RequestOutput], None],
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the outputs for one prompt of a job. Closing the generator aborts the prompt's request.

        check: Called with the tokenized prompt. May raise an error to refuse the request.
        unsent: Called with the last output of a failed request.

        For errors, see `outputs_of`.
        """
        place, request_id = job.place, job.request_ids[index]
        tenant, num_waiting = place.tenant, 0

        async def reserve_prompt(processed: ProcessedInput) -> None:
            nonlocal num_waiting
            check(processed)
            num_tokens = len(processed.prompt_token_ids) + len(processed.streams[0].predicted_token_ids or ())
            try:
                async with asyncio.timeout_at(job.deadline):
                    await place.hold_tokens(num_tokens)
            except TimeoutError:
                raise DeadlineError(ErrorCode.DEADLINE_PASSED.text) from None
            num_waiting = num_tokens
            if "prompt" not in prompt:
                place.charge(num_tokens)
            if opened.cut_off is not None:  # aborted while the prompt waited
                raise opened.cut_off

        with client_field_names(job.client_names):
            self._check_may_begin(tenant)
            prompt = await self._read_prompt(job, index)
            self._check_may_begin(tenant)
            options = self._options(job)
            opened = self._open[request_id] = _Open(tenant)
            try:
                outputs = self.engine.generate(
                    prompt,
                    job.params,
                    request_id,
                    options=options,
                    on_processed=reserve_prompt,
                    on_unread=lambda output: place.charge(_num_tokens(output)),  # unread tokens were also computed
                )
                async with aclosing(outputs) as stream:  # type: ignore[type-var]
                    async for output in stream:
                        place.charge(_num_tokens(output))
                        if (error := opened.error(output)) is not None:
                            unsent(output)
                            raise error
                        if num_waiting:
                            place.release_tokens(num_waiting)
                            num_waiting = 0
                        yield output
            finally:
                place.release_tokens(num_waiting)
                self._open.pop(request_id, None)

    def _check_may_begin(self, tenant: Tenant) -> None:
        if self._is_ending:
            raise server_closing()
        self.check_engine()
        if self.present(tenant) is None:
            raise key_removed()

    @staticmethod
    def _options(job: Job) -> RequestOptions:
        tenant, timeout_s = job.place.tenant, job.deadline - asyncio.get_running_loop().time()
        if timeout_s <= 0:
            raise DeadlineError(ErrorCode.DEADLINE_PASSED.text)
        return replace(
            job.options,
            cache_salt=tenant.cache_salt(job.options.cache_salt),
            tenant=tenant.name,
            tenant_weight=tenant.weight,
            timeout_s=timeout_s,
        )

    async def _idle(self) -> None:
        while self.limiter.streams.num_held:
            await self.limiter.streams.change()

    async def _end_open(self, why: Callable[[], OctavoError]) -> None:
        self._is_ending = True
        still_open = list(self._open)
        self._cut_off(still_open, why)
        await self._end(still_open)

    def _cut_off(self, open_ids: list[str], why: Callable[[], OctavoError]) -> None:
        for request_id in open_ids:
            opened = self._open[request_id]
            opened.cut_off = opened.cut_off or why()

    async def _end(self, open_ids: list[str]) -> None:
        if not open_ids:
            return
        logger.warning("aborting %d open requests", len(open_ids))
        asyncio.get_running_loop().call_later(_ENGINE_GRACE_S, self._announce, open_ids)
        try:
            await self.engine.abort(open_ids)
        except EngineDeadError:
            logger.warning("the engine is already dead; its requests have failed")

    def _announce(self, open_ids: list[str]) -> None:
        """Fail open requests without waiting for the engine, which may be in a long step."""
        for request_id in open_ids:
            opened = self._open.get(request_id)
            if opened is not None and opened.cut_off is not None:
                self.engine.fail(request_id, opened.cut_off)


def _make_tracing(endpoint: str | None) -> Tracing | None:
    if endpoint is None:
        return None
    try:
        from octavo.server.telemetry.tracing import Tracing  # noqa: PLC0415 - optional packages
    except ImportError as error:
        raise ConfigError(f"OpenTelemetry needs {error.name}: pip install 'octavo[otel]'") from error
    return Tracing(endpoint)


def _num_tokens(output: RequestOutput) -> int:
    return sum([len(completion.token_ids) for completion in output.outputs])
