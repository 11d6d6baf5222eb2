"""From an answer's tokens to its parts, as in the server: text, stop, reasoning, calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.data.core_output import EngineCoreOutput
from octavo.engine.output_processor import OutputProcessor
from octavo.sampling_params import RequestOutputKind, SamplingParams
from octavo.server.answers.answer_form import AnswerReader
from octavo.server.answers.parts import joined

if TYPE_CHECKING:
    from octavo.engine.output_processor import DetokenizerFactory
    from octavo.server.answers.answer_form import AnswerForm
    from octavo.server.answers.parts import Part


def read_answer(
    tokenizer: DetokenizerFactory, form: AnswerForm, prompt_ids: list[int], pieces: list[list[int]], finish_reason: str
) -> list[Part]:
    """Return the parts of an answer with tokens in these pieces; with "stop", the last token is the one that ends
    it.
    """
    params = form.applied_to(SamplingParams(output_kind=RequestOutputKind.DELTA))
    outputs, reader, parts = OutputProcessor(tokenizer, lambda: 0.0), AnswerReader(form), list["Part"]()
    outputs.add_request("a", ["a"], None, prompt_ids, params, arrival_time=0.0)
    for index, piece in enumerate(pieces):
        is_last = index == len(pieces) - 1
        news = EngineCoreOutput("a", piece, finish_reason=finish_reason if is_last else None)
        for output in outputs.process([news]).request_outputs:
            parts += reader.read(output.outputs[0])
    return joined(parts)
