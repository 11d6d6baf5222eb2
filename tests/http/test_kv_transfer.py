"""The headers by which a request names the other engine of its pair."""

from __future__ import annotations

import pytest
from starlette.datastructures import Headers

from octavo.data.kv_transfer_params import KVTransferParams
from octavo.errors import RequestError
from octavo.http.kv_transfer import kv_transfer_headers, read_kv_transfer


def read(own: str, **given: str) -> KVTransferParams | None:
    return read_kv_transfer(Headers({f"x-kv-transfer-{name}": value for name, value in given.items()}), own)


@pytest.mark.parametrize(
    ("role", "params"),
    [
        ("prefill", KVTransferParams("a1", is_prefill=True)),
        ("decode", KVTransferParams("A.b_c-9")),
        ("decode", KVTransferParams("x" * 128, source="10.0.0.1:65535")),
        ("decode", KVTransferParams("x", source="engine-1.local:1")),
        ("decode", KVTransferParams("x", source="[fe80::1]:9000")),
    ],
)
def test_kv_transfer_headers_round_trip(role: str, params: KVTransferParams) -> None:
    assert read_kv_transfer(Headers(kv_transfer_headers(params)), role) == params


@pytest.mark.parametrize("role", ["both", "prefill", "decode"])
def test_request_without_headers_has_no_kv_transfer_params(role: str) -> None:
    assert read(role) is None


@pytest.mark.parametrize(
    ("role", "wanted"), [("both", "prefill"), ("both", "decode"), ("prefill", "decode"), ("decode", "prefill")]
)
def test_engine_accepts_only_headers_of_its_role(role: str, wanted: str) -> None:
    with pytest.raises(RequestError, match=f"started with --role {role}: send it to one of --role {wanted}") as raised:
        read(role, id="a", role=wanted)
    assert raised.value.parameter == "X-KV-Transfer-Role"


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"id": "a"}, "Role"),
        ({"source": "h:1"}, "Role"),
        ({"id": "a", "role": "both"}, "Role"),
        ({"id": "a", "role": "Decode"}, "Role"),
        ({"role": "decode"}, "Id"),
        ({"id": "", "role": "decode"}, "Id"),
        ({"id": "x" * 257, "role": "decode"}, "Id"),
        ({"id": "a\tb", "role": "decode"}, "Id"),
        *(
            ({"id": "a", "role": "decode", "source": source}, "Source")
            for source in ("", "h", "h:", ":1", "h:0", "h:65536", "h:1:2", "http://h:1", "a b:1", "me@h:1", "[::1]")
        ),
    ],
)
def test_invalid_kv_transfer_header_is_refused_by_name(given: dict[str, str], name: str) -> None:
    with pytest.raises(RequestError, match=f"X-KV-Transfer-{name} must be") as raised:
        read("decode", **given)
    assert raised.value.parameter == f"X-KV-Transfer-{name}"


def test_prefill_engine_refuses_kv_source() -> None:
    with pytest.raises(RequestError, match="is only for an engine of --role decode"):
        read("prefill", id="a", role="prefill", source="h:1")
