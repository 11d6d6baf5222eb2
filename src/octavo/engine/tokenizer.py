"""Encode and decode text with a checkpoint's `tokenizer.json`."""

from __future__ import annotations

from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import tokenizers

from octavo.engine.detokenizer import IncrementalDetokenizer, TokenPieces
from octavo.engine.generation_config import read_json_object
from octavo.engine.long_text import PIECE_CHARS, LongTextEncoder
from octavo.errors import ModelError, RequestError
from octavo.runtime.text_work import progress

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

_SPECIAL_TOKEN_KEYS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_ADDED_TOKEN_FLAGS = ("lstrip", "normalized", "rstrip", "single_word", "special")
_SHORT_CHARS = 1024


class Tokenizer:
    """A checkpoint's tokenizer.

    special_tokens: Texts by key of tokenizer_config.json, such as "bos_token".
    """

    def __init__(self, backend: tokenizers.Tokenizer, config: dict[str, Any] | None = None) -> None:
        """Modifies `backend`."""
        config = config or {}
        backend.no_padding()
        backend.no_truncation()
        self.backend = backend
        self.special_tokens = _read_special_tokens(config)
        _mark_special(backend, self.special_tokens.values())
        self.bos_token_id = self._special_id("bos_token")
        self.eos_token_id = self._special_id("eos_token")
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        added = backend.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._pieces = TokenPieces(backend, self._special_ids)
        # As in transformers 5, only the post-processor adds BOS and EOS. add_bos_token and add_eos_token are ignored.
        self._adds_bos = self.bos_token_id is not None and backend.encode("").ids[:1] == [self.bos_token_id]

    @classmethod
    def from_directory(cls, directory: Path) -> Tokenizer:
        """Read a checkpoint's tokenizer. Raises `ModelError`."""
        cls.check_directory(directory)
        path = directory / "tokenizer.json"
        try:
            backend = tokenizers.Tokenizer.from_buffer(path.read_bytes())
        except Exception as error:
            raise ModelError(f"{path} is not a tokenizer that octavo can read ({error}); download it again") from error
        config_path = directory / "tokenizer_config.json"
        config = read_json_object(config_path)
        if "added_tokens_decoder" not in config:  # older checkpoints
            config |= read_json_object(directory / "special_tokens_map.json")
        _add_tokens(backend, config, config_path)
        return cls(backend, config)

    @staticmethod
    def check_directory(directory: Path) -> None:
        """Raise `ModelError` if tokenizer.json is missing."""
        if not (directory / "tokenizer.json").is_file():
            raise ModelError(_explain_missing(directory))

    def encode(self, text: str, *, add_special_tokens: bool = True, most: int | None = None) -> list[int]:
        """See `TextCodec`. Raises `RequestError` if the text is not valid Unicode, or is long and cannot be split."""
        _check_unicode(text)
        if len(text) > PIECE_CHARS:
            return self._long_texts.encode(text, add_special_tokens=add_special_tokens, most=most)
        ids = self._encode_at_once(text, add_special_tokens=add_special_tokens)
        progress(len(ids))
        return ids

    def encode_end(self, text: str, num_tokens: int, *, add_special_tokens: bool = True) -> list[int]:
        """See `TextCodec`. Raises `RequestError`."""
        _check_unicode(text)
        if len(text) > PIECE_CHARS:
            return self._long_texts.encode_end(text, num_tokens, add_special_tokens=add_special_tokens)
        return self.encode(text, add_special_tokens=add_special_tokens)[-num_tokens:]

    @cached_property
    def _long_texts(self) -> LongTextEncoder:
        bos = self.bos_token_id if self._adds_bos else None
        return LongTextEncoder(self.backend, self._encode_at_once, bos)

    def _encode_at_once(self, text: str, *, add_special_tokens: bool) -> list[int]:
        if len(text) <= _SHORT_CHARS:
            ids = list(self.backend.encode(text, add_special_tokens=add_special_tokens).ids)
        else:  # only functions for batches release the interpreter lock
            ids = list(self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)
        doubled = add_special_tokens and self._adds_bos and ids[1:2] == [self.bos_token_id]
        return ids[1:] if doubled else ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """See `TextCodec`."""
        ids = list(token_ids)
        if len(ids) <= _SHORT_CHARS:
            return str(self.backend.decode(ids, skip_special_tokens=skip_special_tokens))
        return str(self.backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0])

    @cached_property
    def longest_token_chars(self) -> int:
        """See `TextCodec`."""
        return max(map(len, self.backend.get_vocab()))

    def is_special(self, token_id: int) -> bool:
        """See `TextCodec`."""
        return token_id in self._special_ids

    def token_id(self, text: str) -> int | None:
        """See `TextCodec`."""
        token_id: int | None = self.backend.token_to_id(text)
        return token_id

    @property
    def added_ids(self) -> frozenset[int]:
        """Ids of added tokens."""
        return frozenset(self.backend.get_added_tokens_decoder())

    def token(self, token_id: int) -> str:
        """See `TextCodec`."""
        return self.backend.id_to_token(token_id) or ""

    def piece(self, token_id: int, *, skip_special_tokens: bool = False) -> str | bytes:
        """See `DetokenizerFactory`."""
        return self._pieces.piece(token_id, skip_special_tokens=skip_special_tokens)

    @property
    def has_byte_runs(self) -> bool:
        """See `DetokenizerFactory`."""
        return self._pieces.has_byte_runs

    def decode_token(self, token_id: int) -> str:
        """See `DetokenizerFactory`."""
        piece = self.piece(token_id)
        return piece if isinstance(piece, str) else piece.decode(errors="replace")

    def incremental_detokenizer(
        self, prompt_token_ids: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> IncrementalDetokenizer:
        """See `DetokenizerFactory`."""
        decode = partial(self.decode, skip_special_tokens=skip_special_tokens)
        return IncrementalDetokenizer(self._pieces, decode, prompt_token_ids, skip_special_tokens=skip_special_tokens)

    def _special_id(self, key: str) -> int | None:
        text = self.special_tokens.get(key)
        return None if text is None else self.backend.token_to_id(text)


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"the prompt is not valid Unicode: it holds {text[error.start]!r}, a lone surrogate; send UTF-8 text",
            parameter="prompt",
        ) from None


def _read_special_tokens(config: dict[str, Any]) -> dict[str, str]:
    tokens = {}
    for key in _SPECIAL_TOKEN_KEYS:
        value = config.get(key)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            tokens[key] = text
    return tokens


def _mark_special(backend: tokenizers.Tokenizer, texts: Iterable[str]) -> None:
    added = _added_tokens(backend)
    for text in texts:
        token = added.get(text, tokenizers.AddedToken(text, normalized=False))
        if backend.token_to_id(text) is not None and not token.special:
            token.special = True
            backend.add_special_tokens([token])


def _add_tokens(backend: tokenizers.Tokenizer, config: dict[str, Any], path: Path) -> None:
    try:
        listed = {int(id_): entry for id_, entry in (config.get("added_tokens_decoder") or {}).items()}
        texts = {id_: str(entry["content"]) for id_, entry in listed.items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{path}: added_tokens_decoder must map ids to tokens with a content") from error
    added = _added_tokens(backend)
    for token_id, text in sorted(texts.items()):
        flags = {flag: bool(listed[token_id][flag]) for flag in _ADDED_TOKEN_FLAGS if flag in listed[token_id]}
        token = tokenizers.AddedToken(text, **flags)
        if text not in added or _flags(added[text]) != _flags(token):
            backend.add_tokens([token])
        if backend.token_to_id(text) != token_id:
            raise ModelError(
                f"{path}: the added token {text!r} should have id {token_id}, but with tokenizer.json it gets "
                f"{backend.token_to_id(text)}; the two files belong to different checkpoints"
            )


def _added_tokens(backend: tokenizers.Tokenizer) -> dict[str, tokenizers.AddedToken]:
    return {token.content: token for token in backend.get_added_tokens_decoder().values()}


def _flags(token: tokenizers.AddedToken) -> list[bool]:
    return [getattr(token, flag) for flag in _ADDED_TOKEN_FLAGS]


def _explain_missing(directory: Path) -> str:
    convert = "Convert it with transformers: AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
    for name in ("tokenizer.model", "spiece.model", "tiktoken.model", "vocab.json", "vocab.txt"):
        if (directory / name).is_file():
            return f"{directory} has {name} but no tokenizer.json, the one kind of tokenizer octavo reads. {convert}"
    return f"{directory} has no tokenizer.json; download the checkpoint again, or send token ids (skip_tokenizer_init)"
