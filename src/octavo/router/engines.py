"""A router's engines."""

from __future__ import annotations

import itertools
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from octavo.config.router import ASSUMED_REQUEST_TIMEOUT_S, REQUEST_TIMEOUT_MARGIN_S
from octavo.http.apis import OLLAMA_TAG
from octavo.http.errors import EngineLostError
from octavo.router.partners import Partners
from octavo.router.policies.least_loaded import least_loaded

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from octavo.router.partners import PromptFigures
    from octavo.router.policies import RoutingPolicy
    from octavo.router.request_summary import RequestSummary
    from octavo.router.routed_request import RoutedRequest

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class EngineHandle:
    """One engine. None means not known yet.

    is_member: True until the engine is removed.
    number: Differs from the numbers of all other engines of the router. A removed engine's number is used again.
    models: Empty if the engine has no valid list.
    role: "prefill", "decode" or "both".
    kv_format: Properties by name. Only engines with equal properties can exchange KV.
    prefills_from: Earliest time for the next prefill, on the event loop's clock.
    incarnation: Identifies a run of the engine's process.
    open_tokens: Estimated tokens of this router's open requests.
    other_tokens: Estimated tokens of other clients.
    num_paired: Requests sent to this engine with a prefill on another engine.
    num_paired_in_vain: Requests of `num_paired` for which no KV arrived.
    """

    url: str
    is_ready: bool = False
    is_member: bool = True
    models: frozenset[str] | None = None
    role: str = "both"
    kv_transfer_port: int | None = None
    kv_format: Mapping[str, str] | None = None
    request_timeout_s: float | None = None
    prompt_figures: PromptFigures | None = None
    prefills_from: float = 0.0
    incarnation: tuple[float, ...] | None = None
    number: int = 0
    routed_requests: set[RoutedRequest] = field(default_factory=set)
    open_tokens: int = 0
    other_tokens: int = 0
    num_requests: int = 0
    num_sent_tokens: int = 0
    num_sent_prompt_tokens: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_failures: int = 0
    num_restarts: int = 0
    num_paired: int = 0
    num_paired_in_vain: int = 0
    num_prefills: int = 0
    num_failed_prefills: int = 0
    num_prefill_tokens: int = 0

    @property
    def load(self) -> int:
        """Estimated open tokens."""
        return self.open_tokens + self.other_tokens

    @property
    def ends_within_s(self) -> float:
        """Time limit of a request, plus a margin."""
        limit_s = ASSUMED_REQUEST_TIMEOUT_S if self.request_timeout_s is None else self.request_timeout_s
        return limit_s + REQUEST_TIMEOUT_MARGIN_S

    def serves(self, model: str | None) -> bool:
        """Return True if the engine may have a model."""
        return model is None or not self.models or not self.models.isdisjoint((model, model.removesuffix(OLLAMA_TAG)))


class SavedEngine(NamedTuple):
    """An engine of a state file.

    lost_until: See `RoutingPolicy.recall`.
    """

    number: int
    incarnation: tuple[float, ...]
    lost_until: int


class EnginePool:
    """Engines by address."""

    def __init__(self, policy: RoutingPolicy) -> None:
        self._policy = policy
        self._saved: dict[str, SavedEngine] = {}
        self.engines: dict[str, EngineHandle] = {}
        self.partners = Partners()

    def change(self, urls: Iterable[str]) -> tuple[list[EngineHandle], list[EngineHandle]]:
        """Set the addresses. Return new and removed engines. Removed engines finish their requests."""
        wanted = dict.fromkeys(urls)
        gone = [engine for url, engine in self.engines.items() if url not in wanted]
        for engine in gone:
            engine.is_member = engine.is_ready = False
            del self.engines[engine.url]
            self.forget(engine)
        new = [url for url in wanted if url not in self.engines]
        for url in new:
            number = self._saved[url].number if url in self._saved else self._free_number()
            self.engines[url] = EngineHandle(url, number=number)
        return [self.engines[url] for url in new], gone

    def reserve(self, url: str, incarnation: tuple[float, ...], lost_until: int) -> int:
        """Return the number that an engine of a state file will have."""
        number = self._free_number()
        self._saved[url] = SavedEngine(number, incarnation, lost_until)
        return number

    def _free_number(self) -> int:
        used = {engine.number for engine in self.engines.values()} | {saved.number for saved in self._saved.values()}
        return next(number for number in itertools.count() if number not in used)

    def is_saved(self, engine: EngineHandle) -> bool:
        """Return True if a state file knows the engine, and `identify` was not called."""
        return engine.url in self._saved

    def identify(self, engine: EngineHandle, incarnation: tuple[float, ...]) -> None:
        """Set the engine's run. If it has restarted, forget its cache. If a state file knows this run, recall it."""
        if engine.incarnation not in {None, incarnation}:
            logger.info("%s has restarted: its cache is empty", engine.url)
            engine.num_restarts += 1
            self.forget(engine)
        engine.incarnation = incarnation
        saved = self._saved.pop(engine.url, None)
        if saved is not None and saved.incarnation == incarnation:
            self._policy.recall(engine, saved.lost_until)

    @property
    def has_ready(self) -> bool:
        """True if an engine is ready."""
        return any(engine.is_ready for engine in self.engines.values())

    def ready(self) -> list[EngineHandle]:
        """Return ready engines."""
        return [engine for engine in self.engines.values() if engine.is_ready]

    @property
    def ends_within_s(self) -> float:
        """The longest `ends_within_s`."""
        return max((engine.ends_within_s for engine in self.engines.values()), default=ASSUMED_REQUEST_TIMEOUT_S)

    def choose(
        self, summary: RequestSummary, tried: Sequence[EngineHandle], failed: Collection[EngineHandle] = ()
    ) -> EngineHandle | None:
        """Choose an untried engine, or return None. Prefill engines are used only if all other engines `failed`."""
        able = self._able(summary)
        if any(engine.role != "prefill" and engine not in failed for engine in able):
            able = [engine for engine in able if engine.role != "prefill"]
        if tried:
            able = [engine for engine in able if engine not in tried]
        if not able:
            return None
        return able[0] if len(able) == 1 else self._policy.choose(summary, able)

    def _able(self, summary: RequestSummary) -> list[EngineHandle]:
        engines, model = self.engines.values(), summary.model
        able = [engine for engine in engines if engine.is_ready and engine.serves(model)]
        if able or any(engine.models and engine.serves(model) for engine in engines):
            return able
        return self.ready()

    def choose_prefill(self, summary: RequestSummary, decode: EngineHandle, now: float) -> EngineHandle | None:
        """Choose the least loaded engine that can compute a prompt for `decode`, or return None."""
        able = [
            engine
            for engine in self.ready()
            if engine.role == "prefill"
            and engine.serves(summary.model)
            and engine.prefills_from <= now
            and self.partners.may_pair(engine, decode, now)
        ]
        return least_loaded(able) if able else None

    def sent(self, summary: RequestSummary, engine: EngineHandle) -> float:
        """See `RoutingPolicy.sent`."""
        return self._policy.sent(summary, engine)

    def note_usage(
        self,
        summary: RequestSummary,
        engine: EngineHandle,
        num_prompt_tokens: int | None,
        num_cached_tokens: int | None,
    ) -> None:
        """Record a request's end and token counts."""
        share = None
        if num_prompt_tokens and num_cached_tokens is not None:
            engine.num_prompt_tokens += num_prompt_tokens
            engine.num_cached_tokens += num_cached_tokens
            share = num_cached_tokens / num_prompt_tokens
        self._policy.ended(summary, engine, share)

    def forget(self, engine: EngineHandle) -> None:
        """Treat an engine's cache as empty."""
        self._saved.pop(engine.url, None)
        self._policy.forget(engine)
        self.partners.forget(engine)

    def lost(self, engine: EngineHandle) -> None:
        """Abort an engine's requests with `EngineLostError`."""
        engine.is_ready = False
        engine.other_tokens = 0
        for routed in list(engine.routed_requests):
            routed.end(EngineLostError())
