"""A server class for Ray Serve LLM: `LLMConfig(server_cls="octavo.ray.serve:OctavoServer")`."""

from __future__ import annotations

import asyncio
import copy
import json
from dataclasses import replace
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, NoReturn

from ray.llm._internal.serve.core.configs.openai_api_models import (
    ChatCompletionResponse,
    CompletionResponse,
    DetokenizeResponse,
    EmbeddingResponse,
    ErrorInfo,
    ErrorResponse,
    TokenizeResponse,
)
from ray.llm._internal.serve.core.protocol import LLMServerProtocol

from octavo.config import DEFAULT_MAX_NUM_WAITING, random_seed
from octavo.engine.async_llm import AsyncEngine
from octavo.errors import ConfigError, EngineDeadError
from octavo.ray.asgi_call import posted
from octavo.ray.serve_arguments import read_arguments
from octavo.server.app import create_app
from octavo.server.service import Service
from octavo.startup.launch import launch_engine

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from pydantic import BaseModel
    from ray.llm._internal.serve.core.protocol import RawRequestInfo
    from ray.serve.llm import LLMConfig
    from starlette.applications import Starlette

    from octavo.config import EngineConfig, ServerConfig

_PASSED_HEADERS = ("authorization", "traceparent", "tracestate", "x-request-id", "x-request-timeout")


class OctavoServer(LLMServerProtocol):  # type: ignore[misc]  # Ray has no types
    """One replica: an octavo engine, and the APIs of `octavo serve`, without a port of their own.

    The engine's core is a child of the replica's process, and uses the CPUs and GPUs that Ray gives to the replica.
    """

    async def __init__(self, llm_config: LLMConfig) -> None:  # type: ignore[misc]  # Ray awaits it
        self._llm_config = llm_config
        self._service: Service | None = None
        self._engine_config, self._server_config = _configurations(llm_config)
        await self.start()

    @classmethod
    def get_deployment_options(cls, llm_config: LLMConfig) -> dict[str, Any]:
        """Return the options of the deployment. Raises `ConfigError` if a configuration is invalid.

        A replica needs what `deployment_config["ray_actor_options"]` says, by default one CPU, and one GPU of
        `accelerator_type` if this is given.
        """
        _configurations(llm_config)  # so that the command which deploys fails, and no replica
        options: dict[str, Any] = copy.deepcopy(llm_config.deployment_config)
        actor: dict[str, Any] = options.setdefault("ray_actor_options", {})
        if llm_config.accelerator_type is not None:
            actor.setdefault("num_gpus", 1)
            actor.setdefault("accelerator_type", llm_config.accelerator_type)
        if llm_config.runtime_env:
            actor["runtime_env"] = {**actor.get("runtime_env", {}), **llm_config.runtime_env}
        return options

    async def start(self) -> None:
        """Load the model. Raises `ConfigError` and `ModelError`."""
        engine = await asyncio.to_thread(launch_engine, self._engine_config)
        limit = engine.capacity.max_num_seqs + DEFAULT_MAX_NUM_WAITING
        config = replace(self._server_config, max_open_requests=limit)
        llm = AsyncEngine(engine, max_unread_outputs=config.max_unread_outputs)
        self._service = Service(llm, config)
        self._app = create_app(self._service)
        await self._service.start()

    async def chat(
        self, request: BaseModel, raw_request_info: RawRequestInfo | None = None
    ) -> AsyncGenerator[str | BaseModel, None]:
        """Yield the events of a streamed answer, or one complete answer, or one error."""
        async for piece in self._answer("/v1/chat/completions", request, raw_request_info, ChatCompletionResponse):
            yield piece

    async def completions(
        self, request: BaseModel, raw_request_info: RawRequestInfo | None = None
    ) -> AsyncGenerator[str | BaseModel, None]:
        """See `chat`."""
        async for piece in self._answer("/v1/completions", request, raw_request_info, CompletionResponse):
            yield piece

    async def embeddings(
        self, request: BaseModel, raw_request_info: RawRequestInfo | None = None
    ) -> AsyncGenerator[str | BaseModel, None]:
        """Yield one answer or one error."""
        async for piece in self._answer("/v1/embeddings", request, raw_request_info, EmbeddingResponse):
            yield piece

    async def tokenize(
        self, request: BaseModel, raw_request_info: RawRequestInfo | None = None
    ) -> AsyncGenerator[str | BaseModel, None]:
        """Yield one answer or one error."""
        async for piece in self._answer("/tokenize", request, raw_request_info, TokenizeResponse):
            yield piece

    async def detokenize(
        self, request: BaseModel, raw_request_info: RawRequestInfo | None = None
    ) -> AsyncGenerator[str | BaseModel, None]:
        """Yield one answer or one error."""
        async for piece in self._answer("/detokenize", request, raw_request_info, DetokenizeResponse):
            yield piece

    async def transcriptions(self, *_: Any) -> AsyncGenerator[BaseModel, None]:
        """Yield an error: octavo serves no audio."""
        yield _error(501, "octavo does not transcribe audio")

    async def score(self, *_: Any) -> AsyncGenerator[BaseModel, None]:
        """Yield an error: octavo has no models that score pairs of texts."""
        yield _error(501, "octavo does not score pairs of texts")

    async def check_health(self) -> None:
        """Raise `EngineDeadError` if Ray must restart the replica. A restart of the engine's core is no such case."""
        self._started().check_alive()

    async def reset_prefix_cache(self) -> None:
        """See `sleep`."""
        _refuse("reset the prefix cache of a running engine: restart the replica")

    async def record_routing_stats(self) -> dict[str, Any]:
        """Return nothing: Ray's router needs no figures of this replica."""
        return {}

    async def is_sleeping(self) -> bool:
        """Return False."""
        return False

    async def is_paused(self) -> bool:
        """Return False."""
        return False

    async def sleep(self, **_: Any) -> None:
        """Raise `NotImplementedError`, as the next methods do."""
        _refuse("sleep: stop the replica")

    async def wakeup(self, **_: Any) -> None:
        """See `sleep`."""
        _refuse("wake up")

    async def pause(self, **_: Any) -> None:
        """See `sleep`."""
        _refuse("pause: stop the replica")

    async def resume(self, **_: Any) -> None:
        """See `sleep`."""
        _refuse("resume")

    async def start_profile(self) -> None:
        """See `sleep`."""
        _refuse("profile: octavo serve --record FILE records the scheduler")

    async def stop_profile(self) -> None:
        """See `sleep`."""
        _refuse("profile")

    async def collective_rpc(self, *_: Any, **__: Any) -> list[Any]:
        """See `sleep`."""
        _refuse("run methods of workers")

    async def llm_config(self) -> LLMConfig:
        """Return the configuration."""
        return self._llm_config

    async def __serve_build_asgi_app__(self) -> Starlette:
        """Return the application of `octavo serve`, for an ingress that sends HTTP requests to replicas directly."""
        self._started()
        return self._app

    def __del__(self) -> None:
        """End the engine. Ray calls this when the requests of the replica have ended, or its time for them has."""
        service, self._service = self._service, None
        if service is not None:
            service.engine.shutdown()
            service.close()

    def _started(self) -> Service:
        if self._service is None:
            raise EngineDeadError("the engine has not started, or has ended")
        return self._service

    async def _answer(
        self, path: str, request: BaseModel, raw: RawRequestInfo | None, complete: type[BaseModel]
    ) -> AsyncGenerator[str | BaseModel, None]:
        self._started()
        body = request.model_dump_json(exclude_unset=True, by_alias=True).encode()
        given = {name.lower(): value for name, value in ({} if raw is None else raw.headers).items()}
        headers = {name: given[name] for name in _PASSED_HEADERS if name in given}
        async with posted(self._app, path, body, headers) as answer:
            if answer.is_event_stream:
                async for piece in answer.pieces():
                    yield piece.decode()
                return
            content = json.loads(await answer.body())
            if answer.status == HTTPStatus.OK:
                if complete is DetokenizeResponse:
                    content["text"] = content["prompt"]  # SGLang's name
                yield complete.model_validate(content)
            else:
                yield _error(answer.status, **content["error"])


def _configurations(llm_config: LLMConfig) -> tuple[EngineConfig, ServerConfig]:
    if llm_config.lora_config is not None:
        raise ConfigError("lora_config must be None: octavo has no adapters yet")
    if llm_config.placement_group_config is not None:
        raise ConfigError(
            "placement_group_config must be None: a replica of octavo is on one node; give its CPUs and GPUs as "
            'deployment_config["ray_actor_options"]'
        )
    source = llm_config.model_loading_config.model_source
    if not isinstance(source, str | None):
        raise ConfigError(f"model_source must be a path or a hub id, got {source!r}")
    arguments = {"seed": random_seed(), **llm_config.engine_kwargs}
    return read_arguments(arguments, model=source or llm_config.model_id, name=llm_config.model_id)


def _error(status: int, message: str, type: str = "not_implemented", **_: Any) -> Any:  # noqa: A002 - OpenAI's name
    return ErrorResponse(error=ErrorInfo(message=message, type=type, code=status))


def _refuse(what: str) -> NoReturn:
    raise NotImplementedError(f"octavo cannot {what}")
