"""Answers of reasoning, content and calls in tokens that end anywhere: which tokens are reported as content."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from octavo.data.core_output import EngineCoreOutput
from octavo.data.model_output import TokenLogprobs
from octavo.engine.output_processor import OutputProcessor
from octavo.sampling_params import RequestOutputKind, SamplingParams
from octavo.server.answers.answer_form import AnswerForm, AnswerReader, AnswerStyle
from octavo.server.answers.tools import read_chat_tools
from octavo.server.api.openai.logprobs import ContentLogprobs
from octavo.server.api.openai.token_places import TokenPlaces

if TYPE_CHECKING:
    import random

    from octavo.engine.input_processor import InputProcessor
    from octavo.engine.tokenizer import Tokenizer

NOW: Any = {"type": "function", "function": {"name": "now"}}
CALL = '<tool_call>\n{"name": "now", "arguments": {"a": "content é"}}\n</tool_call>'
CONTENTS = ["I look.", "狐 🦜🌍", "a  b\n\n<c", "é", "naïve <tool_ e\u0301", "<think", "x"]
THOUGHTS = ["", "Hm.", "I look. 狐", "two\n\nlines"]
_LONGEST_PIECE = 12  # bytes, as long as a marker


@dataclass
class Writer:
    """Writes texts in tokens of one vocabulary, cut at random, with hidden tokens among them."""

    tokenizer: Tokenizer
    form: AnswerForm

    def __post_init__(self) -> None:
        self.hidden = [
            each
            for each in sorted(self.tokenizer.added_ids)
            if self.tokenizer.is_special(each) and each not in self.form.shown_ids
        ]
        self.ids: dict[bytes, int] = {}
        for token_id in range(self.tokenizer.vocab_size):
            piece = self.piece(token_id)
            if piece and token_id not in self.hidden:
                self.ids.setdefault(piece, token_id)

    @classmethod
    def of(cls, inputs: InputProcessor) -> Writer:
        """Return a writer for a Hermes model with reasoning."""
        style = AnswerStyle.find("hermes", "think", inputs)
        toolbox = read_chat_tools([NOW], None, None, style.tools)
        return cls(inputs.tokenizer, AnswerForm.of(style, toolbox, "Hello."))  # type: ignore[arg-type]

    def piece(self, token_id: int) -> bytes:
        piece = self.tokenizer.piece(token_id)
        return piece.encode() if isinstance(piece, str) else piece

    def write(self, text: str, draw: random.Random) -> list[int]:
        """Return tokens of a text: long ones, short ones and bytes."""
        data, ids, position = text.encode(), list[int](), 0
        while position < len(data):
            if draw.random() < 0.1 and self.hidden:
                ids.append(draw.choice(self.hidden))
            fitting = [
                self.ids[data[position : position + size]]
                for size in range(1, _LONGEST_PIECE + 1)
                if data[position : position + size] in self.ids
            ]
            ids.append(draw.choice(fitting))
            position += len(self.piece(ids[-1]))
        return ids


def written(draw: random.Random) -> tuple[str, list[tuple[int, str]]]:
    """Return an answer, and its runs of content with the number of characters before each."""
    text, contents = "", []
    if draw.random() < 0.7:
        text += "<think>" + draw.choice(["", "\n"]) + draw.choice(THOUGHTS) + draw.choice(["", "\n", " "])
        text += "</think>" + draw.choice(["", "\n\n", " "])
    for _ in range(draw.randrange(3)):
        contents.append((len(text), draw.choice(CONTENTS)))
        text += contents[-1][1] + draw.choice(["", "\n", " "]) + CALL + draw.choice(["", "\n"])
    if draw.random() < 0.7 or not contents:
        contents.append((len(text), draw.choice(CONTENTS)))
        text += contents[-1][1]
    return text, contents


def check_answer(writer: Writer, prompt: list[int], draw: random.Random) -> None:
    """Write an answer, complete or cut off, and check the reported tokens of its content."""
    text, contents = written(draw)
    ids = writer.write(text, draw)
    is_cut = draw.random() < 0.3
    if is_cut:
        ids = ids[: draw.randrange(len(ids)) + 1]
        while writer.tokenizer.has_byte_runs and not _is_text(b"".join(map(writer.piece, _shown(writer, ids)))):
            ids.pop()
    else:
        ids.append(writer.tokenizer.eos_token_id or 0)
    told = _told(writer, prompt, ids, "length" if is_cut else "stop", draw)
    if not is_cut and [message for message, _ in told] != [content for _, content in contents]:
        raise AssertionError((text, told, contents))
    for (start, content), (message, tokens) in zip(contents, told, strict=False):
        if not content.startswith(message.rstrip().rstrip("\ufffd")):
            raise AssertionError((text, message))
        if tokens != (covering := _covering(writer, text, ids, start, start + len(message))):
            raise AssertionError((text, message, ids, tokens, covering))


def _covering(writer: Writer, text: str, ids: list[int], start: int, end: int) -> list[int]:
    """Return the indices of the tokens that have a byte of these characters."""
    first, last = (len(text[:place].encode()) for place in (start, end))
    covering, position = [], 0
    for index, token_id in enumerate(ids):
        size = 0 if token_id in writer.hidden else len(writer.piece(token_id))
        if size and position < last and position + size > first:
            covering.append(index)
        position += size
    return covering


def _told(
    writer: Writer, prompt: list[int], ids: list[int], finish_reason: str, draw: random.Random
) -> list[tuple[str, list[int]]]:
    """Return the reported runs of content, and the tokens of each."""
    outputs = OutputProcessor(writer.tokenizer, lambda: 0.0)
    params = SamplingParams(output_kind=RequestOutputKind.DELTA, logprobs=0)
    params = writer.form.applied_to(params)
    outputs.add_request("a", ["a"], None, prompt, params, arrival_time=0.0)
    places = TokenPlaces(outputs.tokenizer_of(params), prompt, 0, skip_special_tokens=True)
    logprobs, reader = ContentLogprobs(places, 0, outputs.piece, hides_end=True), AnswerReader(writer.form)
    told: list[tuple[str, list[int]]] = []
    kind, index = "", 0
    while index < len(ids):
        cut = ids[index : index + draw.choice([1, 1, 2, 5, 100])]
        scored = [TokenLogprobs([each], [-float(index + place)], 1) for place, each in enumerate(cut)]
        index += len(cut)
        news = EngineCoreOutput(
            "a", cut, new_logprobs=scored, finish_reason=finish_reason if index == len(ids) else None
        )
        for output in outputs.process([news]).request_outputs:
            logprobs.add(output.outputs[0])
            for part in reader.read(output.outputs[0]):
                tokens = [int(-entry.logprob) for entry in logprobs.take(part)]
                if part.kind != "content":
                    if tokens:
                        raise AssertionError((part, tokens))
                elif kind == "content":
                    told[-1] = told[-1][0] + part.text, told[-1][1] + tokens
                else:
                    told.append((part.text, tokens))
                kind = part.kind
    return told


def _shown(writer: Writer, ids: list[int]) -> list[int]:
    return [each for each in ids if each not in writer.hidden]


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True
