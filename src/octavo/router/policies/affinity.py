"""The policy "affinity"."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from octavo.router.policies.interface import RoutingPolicy
from octavo.router.policies.least_loaded import least_loaded

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo.router.engines import EngineHandle
    from octavo.router.request_summary import RequestSummary


class SessionAffinity(RoutingPolicy):
    """Sends a session's requests to one engine. Requests without a session go to the least loaded engine.

    With rendezvous hashing (Thaler and Ravishankar 1998), an engine's removal moves only its own sessions.
    """

    def choose(self, summary: RequestSummary, engines: Sequence[EngineHandle]) -> EngineHandle:
        """Choose an engine."""
        if summary.session is None:
            return least_loaded(engines)
        session = hashlib.blake2b(summary.session.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        return max(engines, key=lambda engine: hashlib.blake2b(engine.url.encode(), key=session).digest())
