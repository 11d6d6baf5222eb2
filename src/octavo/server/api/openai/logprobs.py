"""Log probabilities in the forms of the APIs, and the tokens of an answer that belong to its content."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from octavo.engine.output_processor import TokenTexts
from octavo.server.api.openai import replies
from octavo.server.api.openai.token_places import BYTES, spelled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import TypeAlias

    from octavo.data.model_output import TokenLogprobs
    from octavo.outputs import CompletionOutput, Logprob, PromptLogprobs
    from octavo.server.answers.parts import Part
    from octavo.server.api.openai.token_places import TokenPlace, TokenPlaces

    Piece: TypeAlias = Callable[[int], str | bytes]  # returns a token's text, also that of a special token
    PlacedPosition: TypeAlias = tuple[TokenPlace, "Position"]

Position = dict[int, "Logprob"]  # the token itself first, then the most probable ones
_LOWEST = -9999.0  # replaces -infinity, which JSON lacks, as in vLLM


def chat_logprobs(
    positions: Sequence[Position] | None, num_top: int, piece: Piece, *, as_ids: bool = False
) -> replies.ChatLogprobs | None:
    """Convert the positions of a chat choice; None if the request asked for none.

    num_top: number of alternatives at each position. as_ids: write tokens as vLLM's token_id:123 instead of their text.
    """
    if positions is None:
        return None
    content = []
    for position in positions:
        token_id, token = next(iter(position.items()))
        best = sorted(position.items(), key=lambda item: item[1].rank or 0)[:num_top]
        top = [replies.TopLogprob(*_chat_token(each, entry, piece, as_ids)) for each, entry in best]
        content.append(replies.TokenLogprob(*_chat_token(token_id, token, piece, as_ids), top))
    return replies.ChatLogprobs(content)


class PlacedLogprobs:
    """Pairs the log probabilities of an answer's tokens with their places, once these are certain."""

    def __init__(self, places: TokenPlaces) -> None:
        self._places = places
        self._waiting: deque[Position] = deque()

    def add(self, token_ids: list[int], positions: list[Position], *, is_over: bool) -> list[PlacedPosition]:
        """Add tokens; return the places that are certain now, with their positions. is_over: the answer is complete."""
        self._waiting += positions
        places = self._places.add(token_ids)
        if is_over:
            places += self._places.finish()
        return [(place, self._waiting.popleft()) for place in places]


class ContentLogprobs:
    """Finds the tokens of an answer's content by their places, however the answer was cut into parts.

    A token belongs to the content if it has at least one character of the content, or a part of one. Tokens of
    reasoning, calls and their markers, hidden tokens and the token that ends an answer do not belong to it.
    """

    def __init__(self, places: TokenPlaces, num_top: int, piece: Piece, *, hides_end: bool) -> None:
        """places: finds the places of the answer's tokens. hides_end: the token that ends the answer has no text."""
        self._places = PlacedLogprobs(places)
        self._num_top = num_top
        self._piece = piece
        self._hides_end = hides_end
        self._tokens: deque[PlacedPosition] = deque()
        self._is_told = False  # the first token is already returned: the last content ended within it

    def add(self, completion: CompletionOutput) -> None:
        """Add tokens. Does nothing if the request asked for no log probabilities."""
        if completion.logprobs is None:
            return
        is_end = completion.finish_reason == "stop" and not isinstance(completion.stop_reason, str)
        num_tokens = len(completion.logprobs) - (self._hides_end and is_end)
        token_ids, positions = completion.token_ids[:num_tokens], completion.logprobs[:num_tokens]
        self._tokens += self._places.add(token_ids, positions, is_over=completion.finished)

    def take(self, part: Part) -> list[replies.TokenLogprob]:
        """Return the tokens of the answer's next part; none if it is not content.

        A token that began in the part before is not returned again.
        """
        while self._tokens and self._tokens[0][0].end <= part.start:
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
            self._is_told = place.end > end
            if self._is_told:
                break
            self._tokens.popleft()
        told = chat_logprobs(taken, self._num_top, self._piece)
        return [] if told is None else told.content


def completion_logprobs(
    positions: Iterable[Position | TokenLogprobs | None],
    places: Iterable[TokenPlace],
    piece: Piece,
    *,
    as_ids: bool = False,
) -> replies.CompletionLogprobs:
    """Convert the positions of a completion choice; the first position of an echoed prompt is None.

    as_ids: as in `chat_logprobs`. A prompt's positions are a `TokenLogprobs` each, because there may be 40,000
    alternatives: an object for each would take too long.
    """
    result = replies.CompletionLogprobs([], [], [], [])
    texts = TokenTexts(lambda token_id: spelled(piece(token_id)))
    for position, place in zip(positions, places, strict=True):
        result.text_offset.append(place.offset)
        result.tokens.append(_id_name(place.token_id) if as_ids else place.text)
        if position is None:
            result.token_logprobs.append(None)
            result.top_logprobs.append(None)
            continue
        scores = _scores(position)
        result.token_logprobs.append(scores[place.token_id])
        if as_ids:
            result.top_logprobs.append({_id_name(each): score for each, score in scores.items()})
        else:
            result.top_logprobs.append(_by_text(scores, place, texts))
    return result


def _scores(position: Position | TokenLogprobs) -> dict[int, float]:
    if isinstance(position, dict):
        return {token_id: _finite(entry) for token_id, entry in position.items()}
    return dict(zip(position.token_ids, _all_finite(position), strict=True))  # a token listed twice has the same value


def _by_text(scores: dict[int, float], place: TokenPlace, texts_by_id: TokenTexts[str]) -> dict[str, float]:
    """Return text -> score for a position, its own token first. A token whose text is taken has its id as the key."""
    texts = list(map(texts_by_id.__getitem__, scores))
    is_start = texts[0] == " " + place.text  # at the start of a text a space is stripped
    texts[0] = place.text
    if is_start:
        texts = [text.removeprefix(" ") for text in texts]
    result = dict(zip(texts, scores.values(), strict=True))
    if len(result) == len(scores):
        return result
    result = {}
    for token_id, text in zip(scores, texts, strict=True):
        result[_id_name(token_id) if text in result else text] = scores[token_id]
    return result


def prompt_logprobs(positions: PromptLogprobs) -> replies.PromptLogprobs:
    """Convert to vLLM's prompt_logprobs: a list of positions, each token id -> entry."""
    text_of = positions.texts.__getitem__
    result: replies.PromptLogprobs = [None]
    for entry in positions.entries:
        ranks = [entry.rank, *range(1, len(entry.token_ids))]
        told = list(map(replies.PromptLogprob, _all_finite(entry), ranks, map(text_of, entry.token_ids)))
        names = list(map(str, entry.token_ids))
        by_id = dict(zip(names, told, strict=True))
        by_id[names[0]] = told[0]  # if it is among the best as well, its rank there may differ: ties
        result.append(by_id)
    return result


def _id_name(token_id: int) -> str:
    """Name a token by its id, as vLLM does."""
    return f"token_id:{token_id}"


def _finite(entry: Logprob) -> float:
    return max(entry.logprob, _LOWEST)


def _all_finite(entry: TokenLogprobs) -> list[float]:
    logprobs = entry.logprobs
    return logprobs if min(logprobs) >= _LOWEST else [max(each, _LOWEST) for each in logprobs]


def _chat_token(token_id: int, entry: Logprob, piece: Piece, as_ids: bool) -> tuple[str, float, list[int]]:
    r"""Return a token's text, log probability and bytes. Part of a character is `\xf0\x9f`, as in OpenAI's API."""
    own = piece(token_id)
    text = own if isinstance(own, str) else spelled(own).removeprefix(BYTES)
    data = own.encode() if isinstance(own, str) else own
    return _id_name(token_id) if as_ids else text, _finite(entry), list(data)
