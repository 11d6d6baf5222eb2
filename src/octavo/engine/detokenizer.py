"""Decode tokens one by one."""

from __future__ import annotations

import json
import re
from codecs import utf_8_decode
from typing import TYPE_CHECKING, Any

from octavo.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import tokenizers

REPLACEMENT = "\ufffd"
_REPLACEMENT_BYTES = REPLACEMENT.encode()
_NO_UTF8 = b"\xff"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_UNFINISHED_BYTES = 3  # maximum length of an incomplete UTF-8 character
_BEFORE = "a"
_NUM_REMEMBERED = 1 << 14  # pieces, about 2 MB
_BY_NEIGHBOURS = frozenset({"BPEDecoder", "CTC"})


class TokenPieces:
    """Computes the text or bytes that each token appends to a nonempty text.

    has_byte_runs: True if consecutive byte tokens are decoded together as a run (sentencepiece's byte fallback). Each
    byte of an invalid run becomes a replacement character.
    strips_start: True if the decoder may change a text's beginning.
    """

    __slots__ = ("_decoder", "_decodes_bytes", "_id_to_token", "_special_ids", "has_byte_runs", "kept", "strips_start")

    def __init__(self, backend: tokenizers.Tokenizer, special_ids: frozenset[int]) -> None:
        """Raises `ModelError` if a token's text depends on neighbouring tokens."""
        kinds = set(_kinds(None if backend.decoder is None else json.loads(backend.decoder.__getstate__())))
        if kinds & _BY_NEIGHBOURS:
            name = ", ".join(sorted(kinds & _BY_NEIGHBOURS))
            raise ModelError(f"tokenizer.json has the decoder {name}, which no streamed text can follow")
        self._decodes_bytes = "ByteLevel" in kinds
        self.has_byte_runs = "ByteFallback" in kinds
        self.strips_start = not self._decodes_bytes
        self._decoder = backend.decoder
        self._id_to_token: Callable[[int], str | None] = backend.id_to_token
        self._special_ids = special_ids
        self.kept: tuple[dict[int, str | bytes], dict[int, str | bytes]] = {}, {}

    def piece(self, token_id: int, *, skip_special_tokens: bool) -> str | bytes:
        """See `DetokenizerFactory`."""
        kept = self.kept[skip_special_tokens]
        piece = kept.get(token_id)
        if piece is None:
            if len(kept) >= _NUM_REMEMBERED:
                kept.clear()
            is_skipped = skip_special_tokens and token_id in self._special_ids
            piece = kept[token_id] = "" if is_skipped else self._read(self._id_to_token(token_id))
        return piece

    def _read(self, token: str | None) -> str | bytes:
        if token is None:  # an id in the vocabulary's padding
            return ""
        if self._decodes_bytes:
            data = _byte_level(token)
        elif self.has_byte_runs and (byte := _BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(byte[1])
        elif self._decoder is None:
            return " " + token
        else:
            return str(self._decoder.decode([_BEFORE, token]))[len(_BEFORE) :]
        try:
            return data.decode()
        except UnicodeDecodeError:
            return data


class IncrementalDetokenizer:
    """Turns token ids into text. Without a prompt, the joined results of `add` and `finish` equal `Tokenizer.decode`.

    Incomplete characters and byte runs are held back until they are complete. After a prompt, the first word keeps its
    leading space, which sentencepiece would strip. A character that begins in the prompt belongs to the text.
    """

    __slots__ = ("_decode", "_first_ids", "_held", "_kept", "_pieces", "_skip", "num_prompt_bytes")

    def __init__(
        self,
        pieces: TokenPieces,
        decode: Callable[[list[int]], str],
        prompt_token_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
    ) -> None:
        self._pieces, self._decode, self._skip = pieces, decode, skip_special_tokens
        self._kept = pieces.kept[skip_special_tokens]
        self._held = bytearray()
        self.num_prompt_bytes = 0
        self._first_ids: list[int] | None = None  # leading ids while their text is empty, then None
        if not self._continue(prompt_token_ids) and pieces.strips_start:
            self._first_ids = []

    @property
    def held(self) -> bytes:
        """See `Detokenizer`."""
        return bytes(self._held)

    def add(self, token_ids: Iterable[int]) -> str:
        """See `Detokenizer`."""
        text = ""
        for token_id in token_ids:
            piece = self._kept.get(token_id)
            if piece is None:
                piece = self._pieces.piece(token_id, skip_special_tokens=self._skip)
            if not piece:
                continue
            if self._first_ids is not None:
                text += self._begin(self._first_ids, token_id, piece)
            elif isinstance(piece, str):
                text += self._release() + piece if self._held else piece
            else:
                self._held += piece
                text += "" if self._pieces.has_byte_runs else self._decode_held(final=False)
        return text

    def finish(self) -> str:
        """See `Detokenizer`."""
        return self._release() if self._first_ids is None else self._decode(self._first_ids)

    def _begin(self, first_ids: list[int], token_id: int, piece: str | bytes) -> str:
        first_ids.append(token_id)
        text = "" if isinstance(piece, bytes) else self._decode(first_ids)
        if text:
            self._first_ids = None
        return text

    def _release(self) -> str:
        if not self._pieces.has_byte_runs:
            return self._decode_held(final=True)
        data, num_prompt_bytes = bytes(self._held), self.num_prompt_bytes
        self._held.clear()
        self.num_prompt_bytes = 0
        try:
            return data.decode()
        except UnicodeDecodeError:
            return REPLACEMENT * (len(data) - num_prompt_bytes)

    def _decode_held(self, *, final: bool) -> str:
        text, num_bytes = utf_8_decode(self._held, "replace", final)
        if num_bytes and self.num_prompt_bytes:
            self.num_prompt_bytes = 0
            if text[0] == REPLACEMENT and not self._held.startswith(_REPLACEMENT_BYTES):
                text = text[1:]  # the invalid bytes belong to the prompt
        del self._held[:num_bytes]
        return text

    def _continue(self, prompt_token_ids: Sequence[int]) -> bool:
        parts: list[bytes] = []
        has_text, has_runs = False, self._pieces.has_byte_runs
        for token_id in reversed(prompt_token_ids):
            piece = self._pieces.piece(token_id, skip_special_tokens=self._skip)
            has_text = has_text or bool(piece)
            if isinstance(piece, bytes):
                parts.append(piece)
            if (isinstance(piece, str) and piece) or (not has_runs and sum(map(len, parts)) >= _UNFINISHED_BYTES):
                break
        data = b"".join(reversed(parts))
        try:
            self._held += data[utf_8_decode(data, "strict" if has_runs else "replace", False)[1] :]
        except UnicodeDecodeError:
            self._held += _NO_UTF8
        self.num_prompt_bytes = len(self._held)
        return has_text


def _kinds(decoder: Any) -> Iterable[str]:
    if isinstance(decoder, dict):
        yield str(decoder.get("type"))
        for each in decoder.get("decoders", ()):
            yield from _kinds(each)


def _byte_level(token: str) -> bytes:
    try:
        return bytes(_BYTES[character] for character in token)
    except KeyError:
        return token.encode()


def _byte_level_alphabet() -> dict[str, int]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTES = _byte_level_alphabet()
