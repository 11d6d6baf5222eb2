"""When the newest token ends a request, and the finish reason."""

from __future__ import annotations

import pytest

from octavo.core.stop import check_stop
from octavo.data.request import Request, RequestStatus
from octavo.sampling_params import SamplingParams

STOPPED, CAPPED = RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED


@pytest.mark.parametrize(
    ("output", "status", "reason"),
    [
        ([5], None, None),
        ([9], None, None),  # EOS before min_tokens
        ([5, 9], None, None),
        ([5, 5, 9], STOPPED, None),
        ([5, 5, 8], STOPPED, 8),
        ([9, 8, 5], None, None),
        ([5, 5, 5, 5], None, None),
        ([5, 5, 5, 5, 5], CAPPED, None),
        ([5, 5, 5, 5, 9], STOPPED, None),
    ],
)
def test_check_stop_returns_finish_status_and_stop_reason(output, status, reason):
    params = SamplingParams(max_tokens=5, min_tokens=2, stop_token_ids=[8])
    request = Request("a", [8, 9, 9], params, stop_token_ids=frozenset({8, 9}))
    request.sequence.token_ids += output
    assert check_stop(request) is status
    assert request.stop_reason == reason
