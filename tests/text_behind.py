"""The text of tokens after a prompt, as the `tokenizers` library decodes them in one call: the reference for streams.

A character that begins in the prompt and is completed by the tokens belongs to the tokens. Bytes of the prompt that
never become a character belong to the prompt, with the text that the library makes of them.
"""

from __future__ import annotations

import codecs
import functools
import re
from itertools import chain
from typing import TYPE_CHECKING

import tokenizers
from tokenizers import pre_tokenizers

if TYPE_CHECKING:
    from collections.abc import Iterable

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


def text_behind(backend: tokenizers.Tokenizer, prompt: list[int], tokens: list[int], *, skip: bool) -> str:
    """Return the text of tokens after a prompt."""
    kinds = b"" if backend.decoder is None else backend.decoder.__getstate__()
    text = backend.decode(prompt + tokens, skip_special_tokens=skip)
    special = _special_ids(backend) if skip else frozenset()
    seen = [_shown(backend, ids, special) for ids in (prompt, tokens)]
    if b"ByteLevel" in kinds:
        return _behind_bytes(text, *(b"".join(map(_bytes_of, spelled)) for spelled in seen))
    if b"ByteFallback" in kinds and seen[0] and _BYTE.fullmatch(seen[0][-1]):
        return _behind_run(backend, text, *seen)
    before = backend.decode(prompt, skip_special_tokens=skip)
    if not text.startswith(before):
        raise AssertionError(f"the text of a prompt changes with what follows: {before!r}, {text!r}")
    return text[len(before) :]


@functools.cache
def _special_ids(backend: tokenizers.Tokenizer) -> frozenset[int]:
    return frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)


def _shown(backend: tokenizers.Tokenizer, ids: list[int], special: frozenset[int]) -> list[str]:
    """Return the spellings of the tokens that the decoder gets."""
    spelled = [backend.id_to_token(token_id) for token_id in ids if token_id not in special]
    return [token for token in spelled if token is not None]


def _behind_bytes(text: str, prompt: bytes, tokens: bytes) -> str:
    """Remove the prompt's text. Its unfinished last character stays if the tokens complete it."""
    reader = codecs.getincrementaldecoder("utf-8")("replace")
    num_chars, begun = len(reader.decode(prompt)), reader.getstate()[0]
    ends = any(_is_character(begun + tokens[:length]) for length in range(1, 4))
    return text[num_chars + bool(begun and not ends) :]


def _is_character(data: bytes) -> bool:
    try:
        return len(data.decode()) == 1
    except UnicodeDecodeError:
        return False


def _behind_run(backend: tokenizers.Tokenizer, text: str, prompt: list[str], tokens: list[str]) -> str:
    """Remove the prompt's text, which ends in a run of bytes that is valid text only as a whole, or not at all."""
    decode = tokenizers.decoders.Sequence([backend.decoder]).decode
    begun = len(prompt) - len(_run(reversed(prompt)))
    behind = text[len(decode([*prompt[:begun]])) :]
    run = bytes(_run(prompt[begun:]))
    if begun == 0 and run.startswith(b" ") and decode([" a"]) == "a":  # the start of a text has no space
        run = run[1:]
    try:
        (bytes(_run(prompt[begun:])) + bytes(_run(tokens))).decode()
    except UnicodeDecodeError:
        return behind[len(_run(prompt[begun:])) :]
    return behind[len(run.decode(errors="ignore")) :]


def _run(spelled: Iterable[str]) -> list[int]:
    """Return the bytes that the tokens begin with."""
    values = []
    for token in spelled:
        if not (byte := _BYTE.fullmatch(token)):
            break
        values.append(int(byte[1], 16))
    return values


def _bytes_of(spelled: str) -> bytes:
    try:
        return bytes(_alphabet()[character] for character in spelled)
    except KeyError:
        return spelled.encode()


@functools.cache
def _alphabet() -> dict[str, int]:
    """Return the byte of each character of a byte-level vocabulary, with the library's spelling."""
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str
    codes = [range(0x800), range(0x800, 0xD800, 0x40), range(0xE000, 0x10000, 0x40), range(0x10000, 0x110000, 0x1000)]
    table = {
        spelled: byte
        for character in map(chr, chain(*codes))
        for spelled, byte in zip(spell(character)[0][0], character.encode(), strict=True)
    }
    never = [byte for byte in range(256) if byte not in table.values()]  # in UTF-8
    return table | {chr(byte): byte for byte in never}
