"""Convert log probabilities."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from octavo.engine.output_processor import TokenTexts
from octavo.server.api.openai import replies
from octavo.server.api.openai.token_places import BYTES, piece_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import TypeAlias

    from octavo.data.model_output import TokenLogprobs
    from octavo.outputs import CompletionOutput, Logprob, PromptLogprobs
    from octavo.server.answers.parts import Part
    from octavo.server.api.openai.token_places import TokenPlace, TokenPlaces

    Piece: TypeAlias = Callable[[int], str | bytes]  # returns a token's text, even for a special token
    PlacedPosition: TypeAlias = tuple[TokenPlace, "Position"]

Position = dict[int, "Logprob"]  # by token id; the first entry is the chosen token
_LOWEST = -9999.0  # as in vLLM, replaces -infinity, which JSON lacks


def chat_logprobs(
    positions: Sequence[Position] | None, num_top: int, piece: Piece, *, as_ids: bool = False
) -> replies.ChatLogprobs | None:
    """Convert the log probabilities of a chat choice.

    num_top: Number of most probable tokens at each position.
    as_ids: True to write tokens as token_id:123, as in vLLM.
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
    """Pairs each token's log probabilities with the token's place in the text."""

    def __init__(self, places: TokenPlaces) -> None:
        self._places = places
        self._waiting: deque[Position] = deque()

    def add(self, token_ids: list[int], positions: list[Position], *, is_over: bool) -> list[PlacedPosition]:
        """Add tokens. Return (place, log probabilities) for each token with a known place.

        is_over: True for the last tokens.
        """
        self._waiting += positions
        places = self._places.add(token_ids)
        if is_over:
            places += self._places.finish()
        return [(place, self._waiting.popleft()) for place in places]


class ContentLogprobs:
    """Finds the log probabilities of the tokens of an answer's content.

    A token belongs to the content if one of the content's characters comes wholly or partly from the token.
    """

    def __init__(self, places: TokenPlaces, num_top: int, piece: Piece, *, hides_end: bool) -> None:
        """hides_end: True if the token that ends the answer is not in the text."""
        self._places = PlacedLogprobs(places)
        self._num_top = num_top
        self._piece = piece
        self._hides_end = hides_end
        self._tokens: deque[PlacedPosition] = deque()
        self._is_returned = False  # True if `take` returned the first of `_tokens`

    def add(self, completion: CompletionOutput) -> None:
        """Add tokens."""
        if completion.logprobs is None:
            return
        is_end = completion.finish_reason == "stop" and not isinstance(completion.stop_reason, str)
        num_tokens = len(completion.logprobs) - (self._hides_end and is_end)
        token_ids, positions = completion.token_ids[:num_tokens], completion.logprobs[:num_tokens]
        self._tokens += self._places.add(token_ids, positions, is_over=completion.finished)

    def take(self, part: Part) -> list[replies.TokenLogprob]:
        """Return log probabilities for the answer's next part. A token that spans two parts is returned once."""
        while self._tokens and self._tokens[0][0].end <= part.start:
            self._tokens.popleft()
            self._is_returned = False
        if part.kind != "content":
            self._is_returned = False
            return []
        end = part.start + len(part.text)
        taken: list[Position] = []
        while self._tokens and self._tokens[0][0].offset < end:
            place, position = self._tokens[0]
            if place.num_chars and not self._is_returned:
                taken.append(position)
            self._is_returned = place.end > end
            if self._is_returned:
                break
            self._tokens.popleft()
        entries = chat_logprobs(taken, self._num_top, self._piece)
        return [] if entries is None else entries.content


def completion_logprobs(
    positions: Iterable[Position | TokenLogprobs | None], places: Iterable[TokenPlace], piece: Piece, *, as_ids: bool
) -> replies.CompletionLogprobs:
    """Convert the log probabilities of a completion choice.

    positions: Log probabilities at each token. None for the first token of an echoed prompt, `TokenLogprobs` for the
    prompt's other tokens.
    """
    result = replies.CompletionLogprobs([], [], [], [])
    texts = TokenTexts(lambda token_id: piece_text(piece(token_id)))
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
    return dict(zip(position.token_ids, _all_finite(position), strict=True))


def _by_text(scores: dict[int, float], place: TokenPlace, texts_by_id: TokenTexts[str]) -> dict[str, float]:
    texts = list(map(texts_by_id.__getitem__, scores))
    is_start = texts[0] == " " + place.text  # the tokenizer strips a space at the start
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
    """Convert prompt logprobs."""
    text_of = positions.texts.__getitem__
    result: replies.PromptLogprobs = [None]
    for entry in positions.entries:
        ranks = [entry.rank, *range(1, len(entry.token_ids))]
        entries = list(map(replies.PromptLogprob, _all_finite(entry), ranks, map(text_of, entry.token_ids)))
        names = list(map(str, entry.token_ids))
        by_id = dict(zip(names, entries, strict=True))
        by_id[names[0]] = entries[0]  # in a tie, the chosen token may occur again with another rank
        result.append(by_id)
    return result


def _id_name(token_id: int) -> str:
    return f"token_id:{token_id}"


def _finite(entry: Logprob) -> float:
    return max(entry.logprob, _LOWEST)


def _all_finite(entry: TokenLogprobs) -> list[float]:
    logprobs = entry.logprobs
    return logprobs if min(logprobs) >= _LOWEST else [max(each, _LOWEST) for each in logprobs]


def _chat_token(token_id: int, entry: Logprob, piece: Piece, as_ids: bool) -> tuple[str, float, list[int]]:
    written = piece(token_id)
    text = written if isinstance(written, str) else piece_text(written).removeprefix(BYTES)
    data = written.encode() if isinstance(written, str) else written
    return _id_name(token_id) if as_ids else text, _finite(entry), list(data)
