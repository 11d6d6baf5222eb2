"""TGI's tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    from octavo.engine.tokenizer_interface import Detokenizer


class PrefillToken(Struct):
    """A prompt token. The first token has no log probability."""

    id: int
    text: str
    logprob: float | None


class Token(PrefillToken):
    """A token of the answer.

    text: The text that the token adds to the answer, or "" if the token completes no character. A special token has its
    name in a whole answer. In a stream it has "", because clients join the texts of all events.
    """

    special: bool


class TokenTexts:
    """Sets the text that each token adds to the answer. Special tokens are invisible."""

    def __init__(self, detokenizer: Detokenizer) -> None:
        self._detokenizer = detokenizer
        self._held = ""  # text for the next visible token
        self._num_chars = 0

    def share(self, tokens: list[Token], whole: str | None) -> str:
        """Divide new text among visible tokens. If no token is visible, return the remaining text.

        whole: The answer's text if `tokens` are the last tokens, otherwise None. A stop string may cut off the end of a
        token's text. The last visible token gets incomplete characters at the answer's end.
        """
        visible = None
        for token in tokens:
            self._held += self._detokenizer.add([token.id])
            if token.special:
                continue
            visible, token.text, self._held = token, self._held, ""
            if whole is not None:
                token.text = token.text[: max(len(whole) - self._num_chars, 0)]
            self._num_chars += len(token.text)
        rest = "" if whole is None else whole[self._num_chars :]
        if visible is None:
            return rest
        visible.text += rest
        return ""
