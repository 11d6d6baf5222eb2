"""Which of an answer's tokens are its content, with their log probabilities: for an API that keeps those apart."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from octavo.server.api.openai.logprobs import chat_logprobs

if TYPE_CHECKING:
    from octavo.outputs import CompletionOutput
    from octavo.server.answers.parts import Part
    from octavo.server.api.openai.logprobs import Piece, Position
    from octavo.server.api.openai.replies import TokenLogprob
    from octavo.server.api.openai.token_places import TokenPlace, TokenPlaces


class ContentLogprobs:
    """Finds the tokens of each part by the place where it stands in the answer, however that was cut.

    A token that has some character of the content, or of one a part, is the content's, whatever else it has. Others are
    in none: those of reasoning and calls, of the marks around them, hidden ones, and the one that ends an answer.
    """

    def __init__(self, places: TokenPlaces, num_top: int, piece: Piece, *, hides_end: bool) -> None:
        """Start with the places of the answer's tokens. hides_end: the token that ends it is none of its text."""
        self._places = places
        self._num_top = num_top
        self._piece = piece
        self._hides_end = hides_end
        self._waiting: deque[Position] = deque()  # tokens whose place is not certain
        self._tokens: deque[tuple[TokenPlace, Position]] = deque()
        self._is_told = False  # the first of them, which the last content ended in

    def add(self, completion: CompletionOutput) -> None:
        """Take some more tokens; none where no log probabilities were asked for."""
        if completion.logprobs is None:
            return
        is_end = completion.finish_reason == "stop" and not isinstance(completion.stop_reason, str)
        num_tokens = len(completion.logprobs) - (self._hides_end and is_end)
        self._waiting += completion.logprobs[:num_tokens]
        places = self._places.add(completion.token_ids[:num_tokens])
        if completion.finished:
            places += self._places.finish()
        self._tokens += [(place, self._waiting.popleft()) for place in places]

    def take(self, part: Part) -> list[TokenLogprob]:
        """Return the tokens of the answer's next part, if it is content; one that it goes on with is told already."""
        while self._tokens and _end(self._tokens[0][0]) <= part.start:
            self._tokens.popleft()
            self._is_told = False
        if part.kind != "content":
            self._is_told = False
            return []
        end = part.start + len(part.text)
        taken: list[Position] = []
        while self._tokens and self._tokens[0][0].offset < end:
            place, position = self._tokens[0]
            if place.num_chars and not self._is_told:
                taken.append(position)
            self._is_told = _end(place) > end
            if self._is_told:
                break
            self._tokens.popleft()
        spelled = chat_logprobs(taken, self._num_top, self._piece)
        return spelled.content if spelled is not None else []


def _end(place: TokenPlace) -> int:
    return place.offset + place.num_chars
