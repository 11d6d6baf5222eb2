"""Messages between the processes are decoded as they were encoded."""

import pytest

from octavo.data.kv_transfer_params import KVTransferParams
from octavo.data.request import Request
from octavo.engine import ipc
from octavo.errors import RequestError
from octavo.sampling_params import SamplingParams, StructuredOutputsParams


def test_streams_of_request_share_one_structured_outputs_object():
    """So its grammar is held while any of the streams waits."""
    wanted = StructuredOutputsParams(regex="[ab]+")
    sent = [Request(f"r-{i}", [1, 2], SamplingParams(seed=i, structured_outputs=wanted)) for i in range(3)]
    message = ipc.decode_to_engine(ipc.encode(ipc.Add.of("r", sent)))
    arrived = message.to_requests()
    assert [request.sampling_params for request in arrived] == [request.sampling_params for request in sent]
    first = message.streams[0].sampling_params.structured_outputs
    assert all(request.sampling_params.structured_outputs is first for request in arrived)


def test_num_speculative_tokens_survives_encoding():
    for most in (None, 0, 5):
        sent = Request("r", [1], SamplingParams(num_speculative_tokens=most))
        (arrived,) = ipc.decode_to_engine(ipc.encode(ipc.Add.of("r", [sent]))).to_requests()
        assert arrived.sampling_params.num_speculative_tokens == most


def test_prediction_is_encoded_once_for_all_streams():
    predicted = list(range(1000, 3000))
    sent = [Request(f"r-{i}", [1], SamplingParams(), predicted_token_ids=predicted) for i in range(3)]
    encoded = ipc.encode(ipc.Add.of("r", sent))
    assert len(encoded) < 2 * 3 * len(predicted)
    arrived = ipc.decode_to_engine(encoded).to_requests()
    assert [request.predicted_token_ids for request in arrived] == [predicted] * 3
    (without,) = ipc.decode_to_engine(ipc.encode(ipc.Add.of("r", [Request("r", [1], SamplingParams())]))).to_requests()
    assert without.predicted_token_ids is None


def test_kv_transfer_params_survive_encoding():
    for params in (None, KVTransferParams("t", is_prefill=True), KVTransferParams("t", source="10.0.0.1:4000")):
        sent = [Request(f"r-{i}", [1], SamplingParams(), kv_transfer_params=params) for i in range(2)]
        arrived = ipc.decode_to_engine(ipc.encode(ipc.Add.of("r", sent))).to_requests()
        assert [request.kv_transfer_params for request in arrived] == [params] * 2
        assert arrived[0].expects_kv is (params is not None and not params.is_prefill)
        assert arrived[0].hands_kv_over is (params is not None and params.is_prefill)


def test_kv_transfer_params_validate_transfer_id_and_source():
    for name in ("", "x" * 257, "two\nlines"):
        with pytest.raises(RequestError, match="transfer_id"):
            KVTransferParams(name)
    for source in ("", "host", "host:", ":80", "host:0", "host:65536", "a b:80", "http://host:80", "::1:80", "u@h:80"):
        with pytest.raises(RequestError, match="HOST:PORT"):
            KVTransferParams("t", source=source)
    for source in ("host:80", "10.0.0.1:65535", "[::1]:80", "host.name:1"):
        assert KVTransferParams("t", source=source).source == source


def test_cache_points_survive_encoding():
    for points in ((), (16, 300)):
        sent = [Request(f"r-{i}", [1], SamplingParams(), cache_points=points) for i in range(2)]
        arrived = ipc.decode_to_engine(ipc.encode(ipc.Add.of("r", sent))).to_requests()
        assert [request.cache_points for request in arrived] == [points] * 2
