"""The policy "affinity"."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from octavo.router.policies.interface import RoutingPolicy
from octavo.router.policies.least_loaded import least_loaded
from octavo.router.policies.rendezvous import engine_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo.router.engines import EngineHandle
    from octavo.router.request_summary import RequestSummary


class SessionAffinity(RoutingPolicy):
    """Sends a session's requests to one engine. Requests without a session go to the least loaded engine."""

    def choose(self, summary: RequestSummary, engines: Sequence[EngineHandle]) -> EngineHandle:
        """Choose an engine."""
        if summary.session is None:
            return least_loaded(engines)
        session = hashlib.blake2b(summary.session.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        return engine_of(session, engines)
