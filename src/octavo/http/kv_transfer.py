"""HTTP headers of a request that one engine prefills and another engine decodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.data.kv_transfer_params import KVTransferParams
from octavo.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Mapping

_ID, _ROLE, _SOURCE = "X-KV-Transfer-Id", "X-KV-Transfer-Role", "X-KV-Transfer-Source"
KV_TRANSFER_HEADERS = (_ID, _ROLE, _SOURCE)
_PREFILL, _DECODE = "prefill", "decode"
_CLIENT_NAMES = {"transfer_id": _ID, "source": _SOURCE}


def read_kv_transfer(headers: Mapping[str, str], role: str) -> KVTransferParams | None:
    """Parse the transfer headers. Raises `RequestError`. headers: A mapping that ignores case."""
    given = {name: value for name in KV_TRANSFER_HEADERS if (value := headers.get(name)) is not None}
    if not given:
        return None
    wanted = given.get(_ROLE, "")
    if wanted not in {_PREFILL, _DECODE}:
        raise RequestError(f"{_ROLE} must be {_PREFILL} or {_DECODE}, got {wanted!r:.100}", parameter=_ROLE)
    if wanted != role:
        raise RequestError(
            f"{_ROLE} is {wanted}, but this engine was started with --role {role}: send it to one of --role {wanted}",
            parameter=_ROLE,
        )
    if wanted == _PREFILL and _SOURCE in given:
        raise RequestError(f"{_SOURCE} is only for an engine of --role {_DECODE}", parameter=_SOURCE)
    try:
        return KVTransferParams(given.get(_ID, ""), is_prefill=wanted == _PREFILL, source=given.get(_SOURCE))
    except RequestError as error:
        name = _CLIENT_NAMES[error.parameter or ""]
        raise RequestError(str(error).replace(error.parameter or "", name, 1), parameter=name) from None


def kv_transfer_headers(params: KVTransferParams) -> dict[str, str]:
    """Return transfer headers."""
    headers = {_ID: params.transfer_id, _ROLE: _PREFILL if params.is_prefill else _DECODE}
    return headers if params.source is None else {**headers, _SOURCE: params.source}
