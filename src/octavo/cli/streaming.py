"""Streams to terminals."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from octavo.cli.interrupt import Interrupt
from octavo.errors import ExecutionError

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo.engine.llm_engine import Engine
    from octavo.sampling_params import SamplingParams

_request_numbers = itertools.count()


def stream_answer(
    engine: Engine, prompt: Any, params: SamplingParams, write: Callable[[str], None]
) -> tuple[str, str | None]:
    """Write an answer piece by piece. Return the answer's text and finish reason ("abort" after Ctrl-C).

    params: `output_kind` must be DELTA. Raises `RequestError` and `ExecutionError`.
    """
    request_id = f"stream-{next(_request_numbers)}"
    engine.add_request(request_id, prompt, params)
    pieces: list[str] = []
    finish_reason = None
    with Interrupt() as interrupt:
        while engine.has_unfinished_requests():
            if interrupt.pressed:
                engine.abort_request(request_id)
            for output in engine.step():
                if output.error is not None:
                    raise ExecutionError(output.error)
                (completion,) = output.outputs
                pieces.append(completion.text)
                write(completion.text)
                finish_reason = completion.finish_reason
    return "".join(pieces), finish_reason
