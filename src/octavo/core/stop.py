"""Checks stop conditions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.data.request import RequestStatus

if TYPE_CHECKING:
    from octavo.data.request import Request


def check_stop(request: Request) -> RequestStatus | None:
    """Return the final status if the newest token ends the request, otherwise None.

    EOS and stop tokens end a request only after `min_tokens` other output tokens. A stop token from the request's
    parameters is written to `request.stop_reason`. `OutputProcessor` finds stop strings.
    """
    sequence = request.sequence
    last_token = sequence.token_ids[-1]
    if last_token in request.stop_token_ids and sequence.num_output_tokens > request.sampling_params.min_tokens:
        if last_token in request.sampling_params.stop_token_ids:
            request.stop_reason = last_token
        return RequestStatus.FINISHED_STOPPED
    if len(sequence.token_ids) >= request.max_total_tokens:
        return RequestStatus.FINISHED_LENGTH_CAPPED
    return None
