"""The engines of a router, with the known state and the load of each."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from octavo.config.router import ASSUMED_REQUEST_TIMEOUT_S, REQUEST_TIMEOUT_MARGIN_S
from octavo.http.apis import OLLAMA_TAG
from octavo.http.errors import EngineLostError
from octavo.router.partners import Partners
from octavo.router.policies.least_loaded import least_loaded

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from octavo.router.asked import Asked
    from octavo.router.flight import Flight
    from octavo.router.partners import PromptFigures
    from octavo.router.policies import Policy

_numbers = itertools.count()


@dataclass(slots=True, eq=False)
class Engine:
    """One engine.

    is_member: the sources still name it. models: the names of its models; None: not known yet; empty: its answer was
    no list. role: "prefill", "decode" or "both". incarnation: identifies a run of its process; None: not known yet.
    kv_transfer_port: its port for direct transfers of KV; None: it has none.
    kv_format: the properties that its KV depends on in addition to tokens, by name; None: it published none.
    request_timeout_s: its time limit of a request; None: not known.
    prompt_figures: counts of how it got the KV of prompts, from its metrics; None: not known.
    prefills_from: time from which it may be asked for prefills again, on the event loop's clock.

    open_tokens: tokens that this router sent or expects and that have not come back. other_tokens: estimated tokens
    of requests from other clients of the engine. num_sent_prompt_tokens: estimated prompt tokens in num_sent_tokens.
    num_paired: requests that it answers with KV of prompts that another engine computes. num_paired_in_vain: those of
    them to which no KV came.
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
    number: int = field(default_factory=lambda: next(_numbers))
    flights: set[Flight] = field(default_factory=set)
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
        """Estimated tokens that it still has to process."""
        return self.open_tokens + self.other_tokens

    @property
    def ends_within_s(self) -> float:
        """Seconds after which it has ended any request by itself, with a margin."""
        limit_s = ASSUMED_REQUEST_TIMEOUT_S if self.request_timeout_s is None else self.request_timeout_s
        return limit_s + REQUEST_TIMEOUT_MARGIN_S

    def serves(self, model: str | None) -> bool:
        """Return True if it may have a model of that name; also if its models are not known."""
        return model is None or not self.models or not self.models.isdisjoint((model, model.removesuffix(OLLAMA_TAG)))


class EnginePool:
    """All engines by address. Chooses the engine for each request."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.engines: dict[str, Engine] = {}
        self.partners = Partners()

    def change(self, urls: Iterable[str]) -> tuple[list[Engine], list[Engine]]:
        """Replace the set of engines; return the new and the removed ones. A removed one finishes its open requests."""
        wanted = dict.fromkeys(urls)
        gone = [engine for url, engine in self.engines.items() if url not in wanted]
        for engine in gone:
            engine.is_member = engine.is_ready = False
            del self.engines[engine.url]
            self.forget(engine)
        new = [Engine(url) for url in wanted if url not in self.engines]
        self.engines.update((engine.url, engine) for engine in new)
        return new, gone

    def ready(self) -> list[Engine]:
        """Return the engines that take requests."""
        return [engine for engine in self.engines.values() if engine.is_ready]

    @property
    def ends_within_s(self) -> float:
        """Seconds after which every engine has ended any request by itself, with a margin."""
        return max((engine.ends_within_s for engine in self.engines.values()), default=ASSUMED_REQUEST_TIMEOUT_S)

    def choose(self, asked: Asked, tried: Sequence[Engine], failed: Collection[Engine] = ()) -> Engine | None:
        """Return the engine for a request; None if no untried engine can take it.

        tried: engines that were asked already. failed: those of them that failed the request.
        An engine of role prefill is chosen only if no other ready engine has the model and has not failed the request.
        """
        able = self._able(asked)
        if any(engine.role != "prefill" and engine not in failed for engine in able):
            able = [engine for engine in able if engine.role != "prefill"]
        able = [engine for engine in able if engine not in tried]
        if not able:
            return None
        return able[0] if len(able) == 1 else self._policy.choose(asked, able)

    def _able(self, asked: Asked) -> list[Engine]:
        """Return the ready engines that have a request's model. If no engine has it, return all: any may refuse it."""
        able = [engine for engine in self.ready() if engine.serves(asked.model)]
        is_known = any(engine.models and engine.serves(asked.model) for engine in self.engines.values())
        return able if able or is_known else self.ready()

    def choose_prefill(self, asked: Asked, decode: Engine, now: float) -> Engine | None:
        """Return the least loaded engine that can compute a prompt for `decode`; None if there is none.

        now: on the event loop's clock.
        """
        able = [
            engine
            for engine in self.ready()
            if engine.role == "prefill"
            and engine.serves(asked.model)
            and engine.prefills_from <= now
            and self.partners.may_pair(engine, decode, now)
        ]
        return least_loaded(able) if able else None

    def sent(self, asked: Asked, engine: Engine) -> float:
        """Record that a request goes to an engine; return the share of its prompt expected in the engine's cache."""
        return self._policy.sent(asked, engine)

    def told(self, asked: Asked, engine: Engine, num_prompt_tokens: int | None, num_cached_tokens: int | None) -> None:
        """Record the end of a request and the counts that its engine reported; None: not reported."""
        share = None
        if num_prompt_tokens and num_cached_tokens is not None:
            engine.num_prompt_tokens += num_prompt_tokens
            engine.num_cached_tokens += num_cached_tokens
            share = num_cached_tokens / num_prompt_tokens
        self._policy.ended(asked, engine, share)

    def forget(self, engine: Engine) -> None:
        """Drop the records about an engine's cache after it was removed or restarted."""
        self._policy.forget(engine)
        self.partners.forget(engine)

    def restarted(self, engine: Engine) -> None:
        """Record that an engine has restarted."""
        engine.num_restarts += 1
        self.forget(engine)

    def lost(self, engine: Engine) -> None:
        """Mark an engine as not ready, and end its open requests with `EngineLostError`."""
        engine.is_ready = False
        engine.other_tokens = 0
        for flight in list(engine.flights):
            flight.end(EngineLostError())
