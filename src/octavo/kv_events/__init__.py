"""Publishes the contents of the prefix cache to routers, in vLLM's format."""

from octavo.kv_events.event_log import KVEventLog
from octavo.kv_events.publisher import KVEventPublisher

__all__ = ["KVEventLog", "KVEventPublisher"]
