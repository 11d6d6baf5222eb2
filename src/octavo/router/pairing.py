"""Pairs a prefill engine with a decode engine for a request."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from octavo.data.kv_transfer_params import KVTransferParams
from octavo.errors import OctavoError
from octavo.http.kv_transfer import KV_TRANSFER_HEADERS, kv_transfer_headers
from octavo.router.routed_request import RoutedRequest, Share
from octavo.router.upstream import FAILURES
from octavo.router.usage import read_usage
from octavo.runtime import logs
from octavo.runtime.ids import new_id

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.types import Scope

    from octavo.router.engines import EngineHandle
    from octavo.router.service import RouterService
    from octavo.router.usage import ReportedUsage

logger = logging.getLogger(__name__)
_NAMES = frozenset(name.lower().encode() for name in KV_TRANSFER_HEADERS)
_LEAST_S, _S_PER_TOKEN = 5.0, 0.002  # time limit of a prefill through a store
_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0  # default and maximum of the pause after a failed prefill
_FULL, _SERVERS = 429, 500  # from 500 on, the engine is at fault


def pair(
    service: RouterService, routed: RoutedRequest, engine: EngineHandle, scope: Scope, body: bytes, known: float
) -> Pair | None:
    """Start a prefill on another engine. Return None if the request or the engines are unsuitable.

    known: Share of the prompt expected in the cache of `engine`. The other tokens are new.
    """
    summary = routed.summary
    num_new = summary.num_tokens * (1 - known)
    if (
        engine.role != "decode"
        or scope["method"] != "POST"
        or not summary.is_answered
        or summary.scores_prompt
        or num_new < service.config.min_prefill_tokens
        or (prefill := service.pool.choose_prefill(summary, engine, asyncio.get_running_loop().time())) is None
    ):
        return None
    return Pair(service, routed, scope, body, prefill, engine, known)


def without_kv_transfer(scope: Scope) -> Scope:
    """Return `scope` without headers that only the router may set."""
    return {**scope, "headers": [(name, value) for name, value in scope["headers"] if name not in _NAMES]}


class Pair:
    """A request to two engines. `prefill` computes the prompt, and `decode` generates the answer.

    If KV is sent directly, both engines get the request together. If KV is sent through a store, `decode` gets the
    request after the prefill. The answer does not depend on the prefill, because `decode` computes missing KV.
    """

    def __init__(
        self,
        service: RouterService,
        routed: RoutedRequest,
        scope: Scope,
        body: bytes,
        prefill: EngineHandle,
        decode: EngineHandle,
        known: float,
    ) -> None:
        self._service, self._scope, self._body = service, scope, body
        self._prefill, self._decode, self._known = prefill, decode, known
        self._before = decode.prompt_figures
        self._is_paired = False
        summary = replace(routed.summary, max_tokens=1, num_streams=1)
        self._routed = RoutedRequest(summary, routed.tenant)
        self._params = KVTransferParams(new_id(), source=_source_of(prefill))
        scope["state"]["audit"]["prefill_engine"] = prefill.url
        prefill.num_prefills += 1
        # The load must change before the next engine is chosen.
        share = Share(self._routed, prefill).__enter__()
        self._task = asyncio.create_task(self._compute())
        self._task.add_done_callback(share.__exit__)

    async def scope(self) -> Scope:
        """Return the scope of the request to `decode`.

        If KV is sent through a store, wait for the prefill. After a failed prefill, the scope is unchanged.
        """
        if self._params.source is None and not await self._is_computed():
            return self._scope
        self._decode.num_paired += 1
        self._is_paired = True
        return _with_headers(self._scope, kv_transfer_headers(self._params))

    def close(self, usage: ReportedUsage | None) -> None:
        """Cancel the prefill, and record whether its KV arrived. usage: None if the answer is incomplete.

        Nothing is recorded unless at least `min_prefill_tokens` tokens were new for `decode`.
        """
        has_failed = self._task.done() and not (self._task.cancelled() or self._task.result())
        self._task.cancel()
        if usage is None or has_failed or not self._is_paired:
            return
        partners, now = self._service.pool.partners, asyncio.get_running_loop().time()
        num_tokens = usage.num_prompt_tokens or self._routed.summary.num_tokens
        num_new = num_tokens * (1 - self._known)
        if num_new < self._service.config.min_prefill_tokens:
            return
        if usage.num_prompt_tokens and usage.num_cached_tokens is not None:
            share = usage.num_cached_tokens / usage.num_prompt_tokens
            partners.ended(self._prefill, self._decode, share, self._known, now)
        else:
            summary = self._routed.summary
            partners.ended_without_usage(self._prefill, self._decode, self._before, summary.num_tokens, num_new)

    async def _is_computed(self) -> bool:
        timeout_s = _LEAST_S + _S_PER_TOKEN * self._routed.summary.num_tokens
        await asyncio.wait({self._task}, timeout=timeout_s)
        if not self._task.done():
            self._failed(f"no answer within {timeout_s:.1f} s")
            self._task.cancel()
            return False
        return self._task.result()

    async def _compute(self) -> bool:
        params = KVTransferParams(self._params.transfer_id, is_prefill=True)
        scope = _with_headers(self._scope, kv_transfer_headers(params))
        is_computed = False
        try:
            async with self._routed.guarded():
                upstream = self._service.upstream
                async with await upstream.ask(self._prefill, scope, self._body, logs.request_id.get() or "") as answer:
                    received = await answer.read()
            if answer.status == 200:
                self._count(received)
                is_computed = True
            elif answer.status == _FULL or answer.status >= _SERVERS:
                self._failed(f"status {answer.status}", answer.retry_after_s)
        except FAILURES as error:
            self._service.suspect(self._prefill)
            self._failed(f"{type(error).__name__}: {error}")
        except OctavoError as error:
            self._failed(str(error))
        except Exception as error:
            logger.exception("a prefill failed")
            self._failed(type(error).__name__)
        return is_computed

    def _count(self, received: bytes) -> None:
        usage, engine = read_usage(b"", received), self._prefill
        engine.num_prefill_tokens += usage.num_prompt_tokens or 0
        if usage.num_prompt_tokens is not None and usage.num_cached_tokens is not None:
            engine.num_prompt_tokens += usage.num_prompt_tokens
            engine.num_cached_tokens += usage.num_cached_tokens

    def _failed(self, why: str, retry_after_s: float | None = None) -> None:
        engine = self._prefill
        engine.num_failed_prefills += 1
        pause_s = _PAUSE_S if retry_after_s is None else min(retry_after_s, _LONGEST_PAUSE_S)
        engine.prefills_from = asyncio.get_running_loop().time() + pause_s
        logger.warning(
            "%s did not compute a prompt for %s, which computes it itself: %s", engine.url, self._decode.url, why
        )


def _source_of(engine: EngineHandle) -> str | None:
    if engine.kv_transfer_port is None:
        return None
    host = (urlsplit(engine.url).hostname or "").partition("%")[0]  # an IPv6 zone is local
    return f"[{host}]:{engine.kv_transfer_port}" if ":" in host else f"{host}:{engine.kv_transfer_port}"


def _with_headers(scope: Scope, headers: Mapping[str, str]) -> Scope:
    more = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    return {**scope, "headers": [*scope["headers"], *more]}
