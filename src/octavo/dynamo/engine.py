"""An octavo engine as Dynamo's `LLMEngine`. Dynamo tokenizes prompts and detokenizes answers."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

from dynamo.common.backend import EngineConfig, LLMEngine, LlmRegistration, WorkerConfig
from dynamo.common.backend.health_check import build_health_check_payload
from dynamo.common.backend.publisher import ZmqSource
from dynamo.common.utils.token_ids import token_ids_to_list
from dynamo.llm import ModelInput
from dynamo.llm.exceptions import DynamoException, EngineShutdown, InvalidArgument, Unknown, WorkerUnavailable

from octavo.config import KVEventsConfig
from octavo.dynamo.options import read_options
from octavo.dynamo.requests import Chunks, sampling_params
from octavo.engine.async_llm import AsyncEngine
from octavo.errors import EngineDeadError, OctavoError, QueueFullError, RequestError
from octavo.startup.launch import ServedModel, launch_engine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from dynamo._core import Context

    from octavo.config import EngineConfig as Config
    from octavo.dynamo.options import WorkerOptions

_ERRORS: tuple[tuple[type[OctavoError], type[DynamoException]], ...] = (
    (QueueFullError, WorkerUnavailable),
    (RequestError, InvalidArgument),
    (EngineDeadError, EngineShutdown),
)


class OctavoEngine(LLMEngine):  # type: ignore[misc]  # Dynamo has no types
    """Runs one octavo engine for a worker of Dynamo. The engine's core is a process of its own."""

    def __init__(self, options: WorkerOptions) -> None:
        self._options = options
        self._config, self._events_folder = _with_events(options)
        self._llm: AsyncEngine | None = None

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[Self, WorkerConfig]:
        """Read a command line. Exits after --help or an invalid option."""
        options = read_options(sys.argv[1:] if argv is None else argv)
        model = options.engine.model
        path = str(ServedModel.find(model).text.path)
        config = WorkerConfig.from_runtime_config(
            options.dynamo, model_name=path, served_model_name=options.name, model_input=ModelInput.Tokens
        )
        return cls(options), config

    async def start(self, worker_id: int) -> EngineConfig:  # noqa: ARG002 - Dynamo's signature
        """Load the model. Return its limits. Raises `ConfigError` and `ModelError`."""
        config = self._config
        engine = await asyncio.to_thread(launch_engine, config)
        self._llm = AsyncEngine(engine)
        capacity = engine.capacity
        return EngineConfig(
            model=str(ServedModel.find(config.model).text.path),
            served_model_name=self._options.name,
            llm=LlmRegistration(
                context_length=engine.input_processor.model_info.max_model_len,
                kv_cache_block_size=capacity.block_size,
                total_kv_blocks=capacity.num_gpu_blocks,
                max_num_seqs=capacity.max_num_seqs,
                max_num_batched_tokens=capacity.max_num_batched_tokens,
            ),
        )

    async def generate(self, request: Any, context: Context) -> AsyncIterator[dict[str, Any]]:
        """Yield the chunks of one request. Closing the iterator early aborts the request.

        Raises `DynamoException`: `InvalidArgument` for an invalid request, `WorkerUnavailable` if too many requests
        wait, `EngineShutdown` if the engine has ended, and `Unknown` if the request failed.
        """
        llm, chunks = self._running(), Chunks()
        try:
            prompt = {"prompt_token_ids": token_ids_to_list(request["token_ids"])}
            params = sampling_params(request, llm.input_processor.model_info.generation_defaults)
            salt = (request.get("routing") or {}).get("cache_salt")
            async for output in llm.generate(prompt, params, context.id(), cache_salt=salt):
                if output.error is not None:
                    raise Unknown(output.error)
                for chunk in chunks.of(output):
                    yield chunk
        except OctavoError as error:
            kind = next((theirs for ours, theirs in _ERRORS if isinstance(error, ours)), Unknown)
            raise kind(str(error)) from error

    async def abort(self, context: Context) -> None:
        """End a request after its client has disconnected. Does nothing if the id is unknown."""
        if self._llm is not None:
            await self._llm.abort([context.id()])

    async def kv_event_sources(self) -> list[ZmqSource]:
        """Return the endpoint of the engine's KV events. Dynamo's router subscribes to it."""
        events = self._config.kv_events
        endpoint = events.endpoint.replace("*", "127.0.0.1")
        return [ZmqSource(endpoint, events.topic, dp_rank=0)] if events.is_active else []

    async def health_check_payload(self) -> dict[str, Any]:
        """Return a request for one token, which Dynamo sends to an idle worker."""
        token_id = min(self._running().input_processor.model_info.eos_token_ids, default=0)
        payload: dict[str, Any] = build_health_check_payload(token_id)
        return payload

    async def cleanup(self) -> None:
        """End the engine. Open requests fail. Does nothing if there is no engine."""
        llm, self._llm = self._llm, None
        if llm is not None:
            await asyncio.to_thread(llm.shutdown)
        if self._events_folder is not None:
            self._events_folder.cleanup()

    def _running(self) -> AsyncEngine:
        if self._llm is None:
            raise EngineShutdown("the engine has not started, or has ended")
        return self._llm


def _with_events(options: WorkerOptions) -> tuple[Config, tempfile.TemporaryDirectory[str] | None]:
    """Return a configuration that publishes KV events, by default in a new folder."""
    config = options.engine
    if config.kv_events.is_active or not config.cache.enable_prefix_caching:
        return config, None
    folder = tempfile.TemporaryDirectory(prefix="octavo-dynamo-")
    events = KVEventsConfig(enable_kv_cache_events=True, endpoint=f"ipc://{folder.name}/kv-events")
    return replace(config, kv_events=events), folder
