"""OpenAI's model list."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from starlette.responses import JSONResponse

from octavo.server.api.request_types import Model, ModelList
from octavo.server.endpoints import endpoint

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from octavo.server.service import Service


@endpoint(answer=ModelList)
async def list_models(service: Service, http_request: Request) -> Response:
    """List served models."""
    data = [_card(service, http_request, name) for name in service.model_names]
    return JSONResponse({"object": "list", "data": data})


@endpoint(answer=Model)
async def describe_model(service: Service, http_request: Request) -> Response:
    """Describe a model."""
    name = service.check_model(http_request.path_params["model"], aliases=())
    return JSONResponse(_card(service, http_request, name))


def _card(service: Service, http_request: Request, name: str) -> dict[str, Any]:
    created = int(http_request.app.state.started.timestamp())
    fields = {"id": name, "object": "model", "created": created, "owned_by": "octavo"}
    return {**fields, "root": name, "parent": None, "max_model_len": service.model_info.max_model_len, "permission": []}
