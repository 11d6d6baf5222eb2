"""Which of an answer's tokens are its content, with their log probabilities: for an API that keeps those apart."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.server.api.openai.logprobs import chat_logprobs

if TYPE_CHECKING:
    from octavo.outputs import CompletionOutput
    from octavo.server.answers.answer_form import AnswerForm
    from octavo.server.answers.parts import Part
    from octavo.server.api.openai.logprobs import Piece, Position
    from octavo.server.api.openai.replies import TokenLogprob


class ContentLogprobs:
    """Reads an answer token by token, so that it is the same however the answer was cut.

    Runs of content, which other parts stand between, are counted as messages are. The token that ends an answer, those
    of reasoning and calls, and those of the marks around them are in none.
    """

    def __init__(self, form: AnswerForm, num_top: int, piece: Piece) -> None:
        self._parser = form.parser()
        self._piece = piece
        self._num_top = num_top
        self._pending: list[tuple[str, Position]] = []  # tokens of which it is not known yet what they are
        self._runs: list[list[TokenLogprob]] = []
        self._goes_on = False  # the last run

    def add(self, completion: CompletionOutput) -> None:
        """Take some more tokens; none where no log probabilities were asked for."""
        positions = completion.logprobs or []
        has_end = completion.finish_reason == "stop" and not isinstance(completion.stop_reason, str)
        for position in positions[: len(positions) - has_end]:
            text = next(iter(position.values())).decoded_token or ""
            self._pending.append((text, position))
            self._sort(self._parser.feed(text))
        if completion.finished:
            self._sort(self._parser.finish(is_cut=not has_end))

    def take(self, run: int) -> list[TokenLogprob]:
        """Return those of a run's tokens that have come since."""
        if run >= len(self._runs):
            return []
        new, self._runs[run] = self._runs[run], []
        return new

    def _sort(self, parts: list[Part]) -> None:
        """Share the pending tokens out, now that a parser is certain."""
        num_chars = sum(len(part.text) for part in parts if part.kind == "content")
        if num_chars:
            is_last = parts[-1].kind == "content"
            if parts[0].kind != "content":
                self._goes_on = False
            self._keep(self._covering(num_chars, from_end=is_last))
            self._goes_on = is_last
        elif parts:
            self._goes_on = False
        if parts:
            self._pending.clear()

    def _covering(self, num_chars: int, *, from_end: bool) -> list[Position]:
        """Return the pending tokens that have so many characters, the last ones or the first ones."""
        covering: list[Position] = []
        for text, position in reversed(self._pending) if from_end else self._pending:
            if num_chars <= 0:
                break
            covering.append(position)
            num_chars -= len(text)
        return covering[::-1] if from_end else covering

    def _keep(self, positions: list[Position]) -> None:
        spelled = chat_logprobs(positions, self._num_top, self._piece)
        if not self._goes_on:
            self._runs.append([])
        self._runs[-1] += spelled.content if spelled is not None else []
