from __future__ import annotations

from octavo.core.kv_connector import NullConnector
from octavo.data.request import Request
from octavo.sampling_params import SamplingParams


def test_null_connector_finds_and_saves_nothing():
    assert NullConnector().get_num_new_matched_tokens(Request("a", [1, 2, 3], SamplingParams()), 0) == 0
    assert NullConnector().keys_to_save([b"x"]) == set()
