"""The load of the engine, in the forms of vLLM and SGLang."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel
from starlette.responses import JSONResponse, PlainTextResponse

from octavo import __version__
from octavo.errors import RequestError
from octavo.server.endpoints import endpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from starlette.requests import Request
    from starlette.responses import Response

    from octavo.data.capacity import EngineCapacity
    from octavo.data.metrics import EngineStats
    from octavo.server.service import Service

_Figures = dict[str, Any]
_GB = 1 << 30
_FORMATS = ("json", "prometheus")
_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class LoadsQuery(BaseModel):
    """Query parameters of /v1/loads."""

    include: str = "all"
    dp_rank: Literal[0] = 0
    format: Literal["json", "prometheus"] = "json"


@endpoint(answer=dict[str, int])
async def server_load(service: Service, _http_request: Request) -> Response:
    """Return the number of open requests."""
    service.check_engine()  # a restarting engine has no requests, and must not look idle
    stats = service.engine.client.stats
    return JSONResponse({"server_load": stats.num_requests_running + stats.num_requests_waiting})


@endpoint(answer=_Figures, query=LoadsQuery, may_be_text=True)
async def loads(service: Service, http_request: Request) -> Response:
    """Return the engine's load for gateways."""
    query = http_request.query_params
    _check("dp_rank", query.get("dp_rank", "0"), ("0",))
    _check("format", query.get("format", "json"), _FORMATS)
    sections = [name.strip() for name in (query.get("include") or "all").split(",")]
    for name in sections:
        _check("include", name, ("core", *_SECTIONS, "lora", "all"))  # there are no figures of adapters
    service.check_engine()
    load = _load(service.engine.client.stats, service.engine.client.capacity, sections)
    if query.get("format") == "prometheus":
        return PlainTextResponse(_samples(load), media_type=_CONTENT_TYPE)
    return JSONResponse({"timestamp": datetime.now(UTC).isoformat(), "version": __version__, "loads": [load]})


def _check(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise RequestError(f"{name} must be {' or '.join(allowed)}, got {value[:60]!r}", parameter=name)


def _load(stats: EngineStats, capacity: EngineCapacity, sections: list[str]) -> _Figures:
    hit_rate = stats.prefix_cache_hits / stats.prefix_cache_queries if stats.prefix_cache_queries else 0.0
    num_used_tokens = round(stats.kv_cache_usage * capacity.kv_cache_tokens)
    load: _Figures = {
        "dp_rank": 0,
        "num_running_reqs": stats.num_requests_running,
        "num_waiting_reqs": stats.num_requests_waiting,
        "num_waiting_uncached_tokens": round(stats.num_waiting_tokens * (1 - hit_rate)),
        "num_used_tokens": num_used_tokens,
        "num_total_tokens": num_used_tokens + stats.num_waiting_tokens,
        "max_total_num_tokens": capacity.kv_cache_tokens,
        "max_running_requests": capacity.max_num_seqs,
        "token_usage": round(stats.kv_cache_usage, 4),
        "cache_hit_rate": round(hit_rate, 4),
    }
    for section, (name, make) in _SECTIONS.items():
        if (section in sections or "all" in sections) and (figures := make(stats, capacity)):
            load[name] = figures
    return load


def _memory(_stats: EngineStats, capacity: EngineCapacity) -> _Figures:
    num_bytes = capacity.num_gpu_blocks * capacity.kv_block_bytes
    num_bytes += sum(group.num_blocks * group.block_bytes for group in capacity.bounded_groups)
    return {"kv_cache_gb": round(num_bytes / _GB, 3), "token_capacity": capacity.kv_cache_tokens}


def _speculation(stats: EngineStats, _capacity: EngineCapacity) -> _Figures:
    drafts = stats.drafts
    if not drafts.num_drafts:
        return {}
    accept_rate = drafts.num_accepted_tokens / max(drafts.num_draft_tokens, 1)
    return {"accept_length": 1 + drafts.num_accepted_tokens / drafts.num_drafts, "accept_rate": accept_rate}


def _disaggregation(_stats: EngineStats, capacity: EngineCapacity) -> _Figures:
    return {"mode": "null" if capacity.role == "both" else capacity.role}


def _queues(stats: EngineStats, _capacity: EngineCapacity) -> _Figures:
    return {"waiting": stats.num_requests_waiting}


# Value of `include` -> field of the answer, and its figures
_SECTIONS: Mapping[str, tuple[str, Callable[[EngineStats, EngineCapacity], _Figures]]] = {
    "memory": ("memory", _memory),
    "spec": ("speculative", _speculation),
    "disagg": ("disaggregation", _disaggregation),
    "queues": ("queues", _queues),
}


def _samples(load: _Figures) -> str:
    """Return the numbers of a load in Prometheus' text format, with SGLang's names."""
    figures: dict[str, float] = {}
    for name, value in load.items():
        if isinstance(value, dict):
            section = next(section for section, (field, _) in _SECTIONS.items() if field == name)
            figures |= {f"{section}_{each}": number for each, number in value.items() if not isinstance(number, str)}
        elif name != "dp_rank":
            figures[name] = value
    lines = [f'# TYPE sglang_{name} gauge\nsglang_{name}{{dp_rank="0"}} {value}\n' for name, value in figures.items()]
    return "".join(lines)
