"""Log probabilities as the two APIs spell them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.server.api.openai.replies import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
    TopLogprob,
)
from octavo.server.api.openai.token_places import BYTES, spelled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import TypeAlias

    from octavo.outputs import Logprob
    from octavo.server.api.openai.token_places import TokenPlace

    Piece: TypeAlias = Callable[[int], str | bytes]  # what a token adds to a text, special ones included

Position = dict[int, "Logprob"]  # the token itself first, then the most probable ones
_LOWEST = -9999.0  # JSON has no infinity; vLLM's stand-in


def chat_logprobs(
    positions: Sequence[Position] | None, num_top: int, piece: Piece, *, as_ids: bool = False
) -> ChatLogprobs | None:
    """Spell the positions of a chat choice; None where none were asked for. as_ids: vLLM's token_id:123 for texts."""
    if positions is None:
        return None
    content = []
    for position in positions:
        token_id, token = next(iter(position.items()))
        best = sorted(position.items(), key=lambda item: item[1].rank or 0)[:num_top]
        top = [TopLogprob(*_chat_token(each, entry, piece, as_ids)) for each, entry in best]
        content.append(TokenLogprob(*_chat_token(token_id, token, piece, as_ids), top))
    return ChatLogprobs(content)


def completion_logprobs(
    positions: Iterable[Position | None], places: Iterable[TokenPlace], piece: Piece, *, as_ids: bool = False
) -> CompletionLogprobs:
    """Spell the positions of a completion choice; one that is None is the first of an echoed prompt.

    as_ids: as in `chat_logprobs`.
    """
    result = CompletionLogprobs([], [], [], [])
    for position, place in zip(positions, places, strict=True):
        result.text_offset.append(place.offset)
        result.tokens.append(_id_name(place.token_id) if as_ids else place.text)
        result.token_logprobs.append(None if position is None else _finite(position[place.token_id]))
        if position is None:
            result.top_logprobs.append(None)
        elif as_ids:
            result.top_logprobs.append({_id_name(each): _finite(entry) for each, entry in position.items()})
        else:
            result.top_logprobs.append(_by_text(position, place, piece))
    return result


def _by_text(position: Position, place: TokenPlace, piece: Piece) -> dict[str, float]:
    """Spell all tokens of a position; of those that read alike all but the first by their ids."""
    is_start = spelled(piece(place.token_id)) == " " + place.text  # of a text, which has no space there
    result: dict[str, float] = {}
    for token_id, entry in position.items():
        text = place.text if token_id == place.token_id else spelled(piece(token_id))
        text = text.removeprefix(" ") if is_start else text
        result[_id_name(token_id) if text in result else text] = _finite(entry)
    return result


def prompt_logprobs(positions: Iterable[Position | None]) -> PromptLogprobs:
    """Spell vLLM's prompt_logprobs, by token id."""
    return [
        None
        if position is None
        else {
            str(token_id): PromptLogprob(_finite(entry), entry.rank, entry.decoded_token)
            for token_id, entry in position.items()
        }
        for position in positions
    ]


def _id_name(token_id: int) -> str:
    """Name a token by its id, as vLLM does."""
    return f"token_id:{token_id}"


def _finite(entry: Logprob) -> float:
    return max(entry.logprob, _LOWEST)


def _chat_token(token_id: int, entry: Logprob, piece: Piece, as_ids: bool) -> tuple[str, float, list[int]]:
    r"""Return text, log probability and own bytes; a part of a character reads `\xf0\x9f`, as in OpenAI's API."""
    own = piece(token_id)
    text = own if isinstance(own, str) else spelled(own).removeprefix(BYTES)
    data = own.encode() if isinstance(own, str) else own
    return _id_name(token_id) if as_ids else text, _finite(entry), list(data)
