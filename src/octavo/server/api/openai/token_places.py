"""Finds the characters that each token adds to a text."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

    from octavo.engine.tokenizer_interface import DetokenizerFactory

BYTES = "bytes:"  # prefix of bytes that are not UTF-8
_MOST_SKIPPED_BYTES = 32  # largest gap between two tokens in a prompt's text
_CONTINUING = frozenset(range(0x80, 0xC0))  # UTF-8 bytes that continue a character


class TokenPlace(NamedTuple):
    """A token's place in a text.

    offset: Number of characters before the token.
    text: The token's text, or the name of a skipped special token.
    num_chars: Number of characters that come wholly or partly from the token.
    """

    offset: int
    text: str
    token_id: int
    num_chars: int

    @property
    def end(self) -> int:
        """The offset of the first character after the token."""
        return self.offset + self.num_chars


def piece_text(piece: str | bytes) -> str:
    r"""Return a token's text. A part of a character becomes `bytes:\xf0\x9f`, as in OpenAI's API."""
    if isinstance(piece, str):
        return piece
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return _bytes_text(piece)


def _bytes_text(data: bytes) -> str:
    return BYTES + repr(data)[2:-1]


class TokenPlaces:
    """Finds the places of tokens in a text that is being generated.

    Some tokenizers decode a run of byte tokens as a whole. The places of these tokens are known only after the run.
    """

    def __init__(
        self, tokenizer: DetokenizerFactory, prompt_token_ids: list[int], offset: int, *, skip_special_tokens: bool
    ) -> None:
        """offset: number of characters before the first token."""
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._detokenizer = tokenizer.incremental_detokenizer(prompt_token_ids, skip_special_tokens=skip_special_tokens)
        self._offset = offset
        self._run = b""  # unfinished bytes of the prompt, then the run's bytes
        self._num_prompt_bytes = 0
        self._waiting: list[tuple[int, int]] = []  # (token id, index of the token's bytes in `_run`)

    def add(self, token_ids: Iterable[int]) -> list[TokenPlace]:
        """Add tokens. Return the places that are now known."""
        places: list[TokenPlace] = []
        for token_id in token_ids:
            piece = self._tokenizer.piece(token_id, skip_special_tokens=self._skip)
            if self._tokenizer.has_byte_runs and (isinstance(piece, bytes) or (self._waiting and not piece)):
                self._wait(token_id, piece)
            elif isinstance(piece, bytes):
                places.append(self._place_bytes(token_id, piece))
            elif piece:
                places += self._place_text(token_id, piece)
            else:
                name = piece_text(self._tokenizer.piece(token_id, skip_special_tokens=False))
                places.append(TokenPlace(self._offset, name, token_id, 0))
        return places

    def finish(self) -> list[TokenPlace]:
        """Return the remaining places."""
        return self._end_run(self._detokenizer.finish())

    def _place_text(self, token_id: int, piece: str) -> list[TokenPlace]:
        text = self._detokenizer.add([token_id])
        num_chars_before = max(len(text) - len(piece), 0)  # the decoder may strip a space at the start
        places = self._end_run(text[:num_chars_before])
        places.append(TokenPlace(self._offset, text[num_chars_before:], token_id, len(text) - num_chars_before))
        self._offset += len(text) - num_chars_before
        return places

    def _place_bytes(self, token_id: int, piece: bytes) -> TokenPlace:
        held = self._detokenizer.held
        index = len((held + piece[:1]).decode(errors="replace")) - 1
        num_chars = len((held + piece).decode(errors="replace")) - index
        if index and self._detokenizer.num_prompt_bytes:
            index -= 1  # the text has no character for unfinished bytes of the prompt
        place = TokenPlace(self._offset + index, _bytes_text(piece), token_id, num_chars)
        self._offset += len(self._detokenizer.add([token_id]))
        return place

    def _wait(self, token_id: int, piece: str | bytes) -> None:
        if not self._waiting:
            self._run, self._num_prompt_bytes = self._detokenizer.held, self._detokenizer.num_prompt_bytes
        self._waiting.append((token_id, len(self._run)))
        self._run += piece if isinstance(piece, bytes) else b""
        self._detokenizer.add([token_id])

    def _end_run(self, text: str) -> list[TokenPlace]:
        run, waiting, start = self._run, self._waiting, self._offset
        self._run, self._waiting, self._offset = b"", [], self._offset + len(text)
        if not waiting:
            return []
        try:
            num_stripped = len(run.decode()) - len(text)
        except UnicodeDecodeError:
            num_before, is_text = list(range(len(run) + 1)), False
            num_stripped = self._num_prompt_bytes
        else:
            num_before, is_text = [0, *accumulate(byte not in _CONTINUING for byte in run)], True
        places = []
        for token_id, position in waiting:
            piece = self._tokenizer.piece(token_id, skip_special_tokens=self._skip)
            # A token that begins within a character has the character's offset.
            index = num_before[position] - (is_text and _continues(run, position))
            offset = start + max(index - num_stripped, 0)
            if not isinstance(piece, bytes):
                text = piece_text(self._tokenizer.piece(token_id, skip_special_tokens=False))
            elif index < num_stripped:
                text = ""
            else:
                text = piece_text(piece) if is_text else _bytes_text(piece)
            num_chars = int(isinstance(piece, bytes) and index >= num_stripped)
            places.append(TokenPlace(offset, text, token_id, num_chars))
        return places


def _continues(data: bytes, position: int) -> bool:
    return position < len(data) and data[position] in _CONTINUING


def places_in_prompt(tokenizer: DetokenizerFactory, prompt: str, token_ids: Iterable[int]) -> list[TokenPlace]:
    """Find the places of a prompt's tokens in the prompt's text.

    The tokens' text may differ from the prompt. A token that is not found gets 0 characters.
    """
    data, places, position = prompt.encode(), [], 0
    num_chars = [0, *accumulate(byte not in _CONTINUING for byte in data)]
    for token_id in token_ids:
        piece = tokenizer.piece(token_id, skip_special_tokens=False)
        raw = piece if isinstance(piece, bytes) else piece.encode()
        text = piece_text(piece)
        if raw.startswith(b" ") and not data.startswith(raw, position) and data.startswith(raw[1:], position):
            raw, text = raw[1:], text[1:]
        found = data.find(raw, position, position + len(raw) + (_MOST_SKIPPED_BYTES if raw.strip() else 0))
        if found < 0:
            found, raw = position, b""
        offset = num_chars[found] - _continues(data, found)
        places.append(TokenPlace(offset, text, token_id, num_chars[found + len(raw)] - offset))
        position = found + len(raw)
    return places
