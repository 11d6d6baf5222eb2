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


def chat_logprobs(positions: Sequence[Position] | None, num_top: int) -> ChatLogprobs | None:
    """Spell the positions of a chat choice; None where none were asked for."""
    if positions is None:
        return None
    content = []
    for position in positions:
        token = next(iter(position.values()))
        best = sorted(position.values(), key=lambda entry: entry.rank or 0)[:num_top]
        top = [TopLogprob(_text(entry), _finite(entry), _utf8(entry)) for entry in best]
        content.append(TokenLogprob(_text(token), _finite(token), _utf8(token), top))
    return ChatLogprobs(content)


def completion_logprobs(
    positions: Iterable[Position | None], first_text: str, text_offset: int
) -> tuple[CompletionLogprobs, int]:
    """Spell the positions of a completion choice, and return the text offset behind them.

    A position that is None is the first of an echoed prompt, whose text is `first_text`.
    """
    result = CompletionLogprobs([], [], [], [])
    for position in positions:
        result.text_offset.append(text_offset)
        if position is None:
            text, logprob = first_text, None
            result.top_logprobs.append(None)
        else:
            token = next(iter(position.values()))
            text, logprob = _text(token), _finite(token)
            top: dict[str, float] = {}
            for entry in position.values():
                top.setdefault(_text(entry), _finite(entry))  # of tokens with one text the first counts
            result.top_logprobs.append(top)
        result.tokens.append(text)
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


def _text(entry: Logprob) -> str:
    return entry.decoded_token or ""


def _finite(entry: Logprob) -> float:
    return max(entry.logprob, _LOWEST)


def _utf8(entry: Logprob) -> list[int]:
    return list(_text(entry).encode())
