"""What the routes share: the engine, its names, and which requests are open."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from octavo.errors import EngineDeadError, EngineRestartingError
from octavo.server.errors import ModelNotFoundError, ServerClosingError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from octavo.config import ModelInfo
    from octavo.engine.async_llm import AsyncLLM
    from octavo.engine.llm_engine import Engine
    from octavo.outputs import RequestOutput
    from octavo.sampling_params import SamplingParams

logger = logging.getLogger(__name__)


class Service:
    """One engine under its served names. Used on one event loop only."""

    def __init__(self, llm: AsyncLLM, served_model_names: Sequence[str] = ()) -> None:
        self.llm = llm
        self.model_names = tuple(served_model_names) or (self.model_info.name,)
        self.default_params: SamplingParams = llm.engine.input_processor.default_sampling_params()
        self.is_closing = False
        self._open_ids: set[str] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def model_info(self) -> ModelInfo:
        """What is known of the model."""
        return self.llm.engine.input_processor.model_info

    def check_model(self, name: str | None) -> str:
        """Return the name to answer under. Raises `ModelNotFoundError` for one that is not served."""
        if name is None:
            return self.model_names[0]
        if name not in self.model_names:
            known = ", ".join(self.model_names)
            raise ModelNotFoundError(f"the model {name!r} does not exist here; served: {known}", parameter="model")
        return name

    def check_alive(self) -> None:
        """Raise where no request will ever be taken again: somebody must start this process anew."""
        if self.llm.is_dead:
            raise EngineDeadError("dead")

    def check_ready(self) -> None:
        """Raise where no request can be taken now: while it closes, or the engine is dead, frozen or starting again."""
        if self.is_closing:
            raise ServerClosingError("closing")
        self.check_alive()
        if not self.llm.is_alive:
            raise EngineRestartingError("not ready")

    async def generate(
        self, prompt: Any, params: SamplingParams, request_id: str, *, priority: int, cache_salt: str | None
    ) -> AsyncIterator[RequestOutput]:
        """Yield a request's outputs; closing the iterator aborts it."""
        self.check_ready()
        self._open_ids.add(request_id)
        self._idle.clear()
        try:
            outputs = self.llm.generate(prompt, params, request_id, priority=priority, cache_salt=cache_salt)
            async with aclosing(outputs) as stream:  # type: ignore[type-var]  # an async generator, by its protocol
                async for output in stream:
                    yield output
        finally:
            self._open_ids.discard(request_id)
            if not self._open_ids:
                self._idle.set()

    async def drain(self, grace_s: float) -> None:
        """Take nothing new; give open requests some time, then end them: each gets its last output, "abort"."""
        self.is_closing = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._idle.wait()
        if not self._open_ids:
            return
        logger.warning("ending %d open requests", len(self._open_ids))
        open_ids = list(self._open_ids)

        def end(engine: Engine) -> None:
            engine.abort_request(open_ids)

        try:
            await self.llm.call(end)
        except EngineDeadError:
            logger.warning("the engine is dead already; its requests have heard of it")
