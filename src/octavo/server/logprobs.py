"""Log probabilities as the two APIs spell them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.server.openai_responses import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
    TopLogprob,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from octavo.outputs import Logprob

Position = dict[int, "Logprob"]  # the token itself first, then the most probable ones
_LOWEST = -9999.0  # JSON has no infinity; vLLM's stand-in


def chat_logprobs(positions: Sequence[Position] | None, num_top: int, *, as_ids: bool = False) -> ChatLogprobs | None:
    """Spell the positions of a chat choice; None where none were asked for. as_ids: vLLM's token_id:123 for texts."""
    if positions is None:
        return None
    content = []
    for position in positions:
        token_id, token = next(iter(position.items()))
        best = sorted(position.items(), key=lambda item: item[1].rank or 0)[:num_top]
        top = [TopLogprob(_name(each, entry, as_ids), _finite(entry), _utf8(entry)) for each, entry in best]
        content.append(TokenLogprob(_name(token_id, token, as_ids), _finite(token), _utf8(token), top))
    return ChatLogprobs(content)


def completion_logprobs(
    positions: Iterable[Position | None], first_text: str, text_offset: int, *, as_ids: bool = False
) -> tuple[CompletionLogprobs, int]:
    """Spell the positions of a completion choice, and return the text offset behind them.

    A position that is None is the first of an echoed prompt, whose text is `first_text`. as_ids: as in `chat_logprobs`.
    """
    result = CompletionLogprobs([], [], [], [])
    for position in positions:
        result.text_offset.append(text_offset)
        if position is None:
            text, logprob = first_text, None
            name = text
            result.top_logprobs.append(None)
        else:
            token_id, token = next(iter(position.items()))
            text, logprob = _text(token), _finite(token)
            name = _name(token_id, token, as_ids)
            top: dict[str, float] = {}
            for each, entry in position.items():
                top.setdefault(_name(each, entry, as_ids), _finite(entry))  # of tokens with one text the first counts
            result.top_logprobs.append(top)
        result.tokens.append(name)
        result.token_logprobs.append(logprob)
        text_offset += len(text)
    return result, text_offset


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


def token_id_name(token_id: int) -> str:
    """Name a token by its id, as vLLM does."""
    return f"token_id:{token_id}"


def _name(token_id: int, entry: Logprob, as_ids: bool) -> str:
    return token_id_name(token_id) if as_ids else _text(entry)


def _text(entry: Logprob) -> str:
    return entry.decoded_token or ""


def _finite(entry: Logprob) -> float:
    return max(entry.logprob, _LOWEST)


def _utf8(entry: Logprob) -> list[int]:
    return list(_text(entry).encode())
