"""Prompts computed by one engine and answered by another: the first saves its KV where the second finds it."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from octavo.router.flight import Share
from octavo.router.upstream import FAILURES
from octavo.runtime import logs

if TYPE_CHECKING:
    from starlette.types import Scope

    from octavo.router.flight import Flight
    from octavo.router.service import RouterService

logger = logging.getLogger(__name__)
_PATHS = frozenset(
    {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/generate", "/generate_stream", "/"}
)


class NoPairing:
    """Every engine computes its prompts itself."""

    async def prefill(self, _flight: Flight, _scope: Scope, _body: bytes) -> None:
        """Do nothing."""


class Pairing:
    """Sends a request to a prefill engine first. Whatever fails there, the engine that answers computes the prompt."""

    def __init__(self, service: RouterService) -> None:
        self._service = service

    async def prefill(self, flight: Flight, scope: Scope, body: bytes) -> None:
        """Have a prompt computed, and its KV saved; return when that is so, or when it is not worth more waiting."""
        service, asked = self._service, flight.asked
        if scope["method"] != "POST" or scope["path"] not in _PATHS:
            return
        engine = service.pool.choose(asked, (), is_prefill=True)
        if engine is None:
            return
        with Share(flight, engine):
            service.pool.sent(asked, engine)
            try:
                async with (
                    flight.guarded(),
                    asyncio.timeout(service.config.prefill_timeout_s),
                    await service.upstream.ask(engine, scope, body, logs.request_id.get() or "") as answer,
                ):
                    await answer.read()
            except FAILURES as error:
                engine.num_failures += 1
                service.suspect(engine)
                logger.warning("%s did not compute a prompt: %s: %s", engine.url, type(error).__name__, error)
            finally:
                service.pool.told(asked, engine, None, 0)
