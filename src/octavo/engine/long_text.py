"""Tokenize a long text in pieces, or only its end. Cuts do not change the ids.

A text is cut before a blank between two ASCII letters, or after a single line break between two visible characters.
The text before a cut must not change the tokens after the cut. Therefore no token may span a cut, and pre-tokenizers
must split at each cut.
"""

from __future__ import annotations

import re
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

from octavo.errors import RequestError
from octavo.runtime.text_work import progress

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import tokenizers

PIECE_CHARS = 1 << 15  # 15 ms of work
MAX_UNCUT_CHARS = 1 << 20  # one or two seconds of work, which cannot be cancelled
# blank and line break in byte-level, sentencepiece and plain tokens
_BLANK, _BREAK = "Ġ▁ ", "Ċ\n"
_ACROSS_BLANK = re.compile(f"[A-Za-z][{_BLANK}]")
_ACROSS_BREAK = re.compile(f"[{_BREAK}][^{_BREAK}{_BLANK}ĉč\t\r\f\v]")
_BLANK_CUT, _BREAK_CUT = r"(?<=[A-Za-z])(?= [A-Za-z])", r"(?<=\S\n)(?=\S)"
# Texts are cut only if this sample's pieces yield the same ids as the whole sample.
_SAMPLE = (
    "A fox's 1234567 tails.\nIt said\n(twice): x_y = [0] \n\n  if a b:\n\tc  d\r\n"
    "\u72d0\n\u72d0\u72d0 e\u0301 \u00e9t\u00e9 z  \n"
)


class WholeEncoder(Protocol):
    """Tokenizes uncut texts."""

    def __call__(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return token ids."""
        ...


class LongTextEncoder:
    """Tokenizes texts of any length. bos_token_id: BOS id if the encoder adds BOS, or None."""

    def __init__(self, backend: tokenizers.Tokenizer, encode: WholeEncoder, bos_token_id: int | None) -> None:
        self._encode, self._bos = encode, bos_token_id
        self._cut = _cuts(backend)
        if self._cut is not None and not self._is_as_said():
            self._cut = None
        self._front, self._back = self._special_tokens()

    def encode(self, text: str, *, add_special_tokens: bool, most: int | None = None) -> list[int]:
        """See `TextCodec`. Raises `RequestError` if too many characters have no possible cut."""
        ids = list(self._front) if add_special_tokens else []
        for piece in self._pieces(text, 0):
            ids += piece
            if most is not None and len(ids) > most:
                return ids
        if add_special_tokens:
            ids += self._back
            if self._bos is not None and ids[1:2] == [self._bos]:
                del ids[0]
        return ids

    def encode_end(self, text: str, num_tokens: int, *, add_special_tokens: bool) -> list[int]:
        """See `TextCodec`."""
        back = self._back if add_special_tokens else []
        num_chars = max(PIECE_CHARS, 8 * num_tokens)
        while num_chars < len(text):
            first = self._next_cut(text, len(text) - num_chars)
            if first is None:
                break
            ids = [id_ for piece in self._pieces(text, first) for id_ in piece]
            if len(ids) + len(back) >= num_tokens:
                return [*ids, *back][-num_tokens:]
            num_chars *= 4
        return self.encode(text, add_special_tokens=add_special_tokens)[-num_tokens:]

    def _pieces(self, text: str, start: int) -> Iterator[list[int]]:
        while start < len(text):
            end = self._next_cut(text, start + PIECE_CHARS)
            end = len(text) if end is None else end
            if end - start > MAX_UNCUT_CHARS:
                raise RequestError(
                    f"the text has {end - start} characters without a place to cut it: no line break that this model's "
                    f"tokenizer would split at, and no blank between two words; the limit is {MAX_UNCUT_CHARS}",
                    parameter="prompt",
                )
            piece = self._ids(text, start, end)
            progress(len(piece))
            yield piece
            start = end

    def _ids(self, text: str, start: int, end: int) -> list[int]:
        # The word before the piece is tokenized, too, because normalizers may change a text's start.
        before = self._cut_before(text, start)
        if before == start:
            return self._encode(text[start:end], add_special_tokens=False)
        ids = self._encode(text[before:end], add_special_tokens=False)
        return ids[len(self._encode(text[before:start], add_special_tokens=False)) :]

    def _next_cut(self, text: str, start: int) -> int | None:
        if self._cut is None or (text.find(" ", start) < 0 and text.find("\n", start - 1) < 0):
            return None
        for begin in range(start, len(text), PIECE_CHARS):
            progress()
            found = self._cut.search(text, begin, begin + PIECE_CHARS + 2)
            if found is not None and 0 < found.start() < len(text):
                return found.start()
        return None

    def _cut_before(self, text: str, place: int) -> int:
        if place == 0 or self._cut is None:
            return place
        back = 64
        while place > back:
            found = self._cut.search(text, place - back, place + 2)
            if found is not None and found.start() < place:
                return found.start()
            back *= 4
        return 0

    def _is_as_said(self) -> bool:
        assert self._cut is not None
        text = _SAMPLE * 2
        places = [0, *(found.start() for found in self._cut.finditer(text)), len(text)]
        pieces = (self._ids(text, start, end) for start, end in pairwise(places))
        return [id_ for piece in pieces for id_ in piece] == self._encode(text, add_special_tokens=False)

    def _special_tokens(self) -> tuple[list[int], list[int]]:
        bare, dressed = (self._encode("a", add_special_tokens=add) for add in (False, True))
        for start in range(len(dressed) - len(bare) + 1):
            if dressed[start : start + len(bare)] == bare:
                return dressed[:start], dressed[start + len(bare) :]
        return [], []


def _cuts(backend: tokenizers.Tokenizer) -> re.Pattern[str] | None:
    tokens: Iterable[str] = backend.get_vocab()
    added = backend.get_added_tokens_decoder().values()
    greedy = [token.content[:1] for token in added if token.lstrip]  # tokens that absorb preceding blanks
    greedy += [token.content[-1:] for token in added if token.rstrip]
    kinds = []
    if not any(map(_ACROSS_BLANK.search, tokens)) and not any(edge.isalpha() for edge in greedy):
        kinds.append(_BLANK_CUT)
    if not any(map(_ACROSS_BREAK.search, tokens)) and not any(token.lstrip for token in added):
        kinds.append(_BREAK_CUT)
    return re.compile("|".join(kinds)) if kinds else None
