"""Routes that describe the server. No answer contains a file's path."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

from starlette.responses import HTMLResponse, JSONResponse

from octavo import __version__
from octavo.server.endpoints import endpoint

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from octavo.server.service import Service

_HEADERS = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'", "Cache-Control": "no-store"}
_LINKS = {
    "/v1/models": "the names of the served model",
    "/openapi.json": "all routes, as an OpenAPI document",
    "/server_info": "the configuration of this server",
    "/metrics": "metrics for Prometheus",
    "/health": "whether the engine can serve requests",
    "/live": "whether this process is alive",
    "/ready": "whether requests are accepted",
}
_PAGE = """<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>octavo</title>
<style>body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 40em; margin: 3em auto; padding: 0 1em }}</style>
<h1>octavo {version}</h1>
<p>This server answers as <b>{names}</b>. Clients of OpenAI's API find it under <code>/v1</code>,
those of Ollama, which look here for the words "Ollama is running", under <code>/api</code>.</p>
<ul>
{links}
</ul>
</html>
"""


@endpoint()
async def front_page(service: Service, _http_request: Request) -> Response:
    """Return a page of links for browsers."""
    links = {"/dashboard": "a live view of the engine", **_LINKS} if service.config.dashboard else _LINKS
    lines = [f'<li><a href="{path}">{path}</a>: {what}</li>' for path, what in links.items()]
    names = escape(", ".join(service.model_names))
    page = _PAGE.format(version=__version__, names=names, links="\n".join(lines))
    return HTMLResponse(page, headers=_HEADERS)


@endpoint(answer=dict[str, Any])
async def model_info(service: Service, _http_request: Request) -> Response:
    """Describe the model for gateways."""
    info, name = service.model_info, service.model_names[0]
    return JSONResponse(
        {
            "model_path": name,
            "tokenizer_path": name,
            "is_generation": info.has_head,
            "model_type": info.model_type,
            "architectures": list(info.architectures),
            "preferred_sampling_params": dict(info.generation_defaults) or None,
            "weight_version": "default",
            "has_image_understanding": False,
            "has_audio_understanding": False,
            "max_model_len": info.max_model_len,
            "vocab_size": info.vocab_size,
            "role": service.engine.client.capacity.role,
            "kv_transfer_port": service.engine.client.capacity.kv_transfer_port,
            "kv_format": service.engine.client.capacity.kv_format,
            "request_timeout": service.config.request_timeout_s,
        }
    )


@endpoint(answer=dict[str, Any])
async def server_info(service: Service, _http_request: Request) -> Response:
    """Return the settings that the server was started with."""
    fingerprint = service.engine.client.capacity.fingerprint
    return JSONResponse(
        {
            "model_path": service.model_names[0],
            "served_model_name": service.model_names[0],
            "version": __version__,
            "tp_size": 1,
            "dp_size": 1,
            "max_total_tokens": service.engine.client.capacity.kv_cache_tokens,
            "max_running_requests": service.engine.client.capacity.max_num_seqs,
            "context_length": service.model_info.max_model_len,
            "speculative_method": service.engine.client.capacity.speculative_method,
            "num_speculative_tokens": service.engine.client.capacity.num_speculative_tokens,
            "fingerprint": None if fingerprint is None else fingerprint.to_json(),
            "settings": service.settings,
        }
    )
