"""Routing policies."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.router.policies.affinity import SessionAffinity
from octavo.router.policies.cache_aware import CacheAware
from octavo.router.policies.interface import RoutingPolicy
from octavo.router.policies.least_loaded import LeastLoaded
from octavo.router.policies.round_robin import RoundRobin

if TYPE_CHECKING:
    from octavo.config import RouterConfig

__all__ = ["CacheAware", "LeastLoaded", "RoundRobin", "RoutingPolicy", "SessionAffinity", "create_policy"]


def create_policy(config: RouterConfig) -> RoutingPolicy:
    """Make the policy."""
    match config.policy:
        case "round_robin":
            return RoundRobin()
        case "least_loaded":
            return LeastLoaded()
        case "affinity":
            return SessionAffinity()
    return CacheAware(config.balance_tokens, config.balance_ratio, config.max_prefix_entries)
