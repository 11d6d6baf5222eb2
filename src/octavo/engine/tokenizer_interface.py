"""Interfaces for decoding outputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable


class Detokenizer(Protocol):
    """Turns a stream's token ids into text."""

    @property
    def held(self) -> bytes:
        """Bytes not yet returned as text, because their character or run of byte tokens is incomplete.

        Bytes of the prompt come first.
        """
        ...

    @property
    def num_prompt_bytes(self) -> int:
        """Number of bytes in `held` that belong to the prompt."""
        ...

    def add(self, token_ids: list[int]) -> str:
        """Append tokens. Return the new text that later tokens cannot change."""
        ...

    def finish(self) -> str:
        """Return the text that `add` held back."""
        ...


class DetokenizerFactory(Protocol):
    """Decodes output tokens."""

    @property
    def has_byte_runs(self) -> bool:
        """True if consecutive byte tokens are decoded together."""
        ...

    def incremental_detokenizer(self, prompt_token_ids: list[int], *, skip_special_tokens: bool) -> Detokenizer:
        """Return a stream's detokenizer."""
        ...

    def decode_token(self, token_id: int) -> str | None:
        """Return one token's text, for logprobs."""
        ...

    def piece(self, token_id: int, *, skip_special_tokens: bool) -> str | bytes:
        """Return the text that a token appends, or bytes that may be part of a character."""
        ...

    def is_special(self, token_id: int) -> bool:
        """Return True if `skip_special_tokens` hides the token."""
        ...


class NoDetokenizer:
    """Returns no text."""

    held = b""
    num_prompt_bytes = 0

    def add(self, token_ids: list[int]) -> str:  # noqa: ARG002
        """Return no text."""
        return ""

    def finish(self) -> str:
        """Return no text."""
        return ""


class NoTokenizer:
    """Replaces a missing tokenizer."""

    has_byte_runs = False

    def incremental_detokenizer(
        self,
        prompt_token_ids: list[int],  # noqa: ARG002
        *,
        skip_special_tokens: bool,  # noqa: ARG002
    ) -> Detokenizer:
        """Return a `NoDetokenizer`."""
        return NoDetokenizer()

    def decode_token(self, token_id: int) -> None:
        """Return None."""

    def piece(self, token_id: int, *, skip_special_tokens: bool) -> str:  # noqa: ARG002
        """Return no text."""
        return ""

    def is_special(self, token_id: int) -> bool:  # noqa: ARG002
        """Return False."""
        return False


class SomeSpecialTokens:
    """A tokenizer that hides special tokens except those in `shown`."""

    def __init__(self, tokenizer: DetokenizerFactory, shown: list[int]) -> None:
        self._tokenizer = tokenizer
        self._shown = frozenset(shown)

    @property
    def has_byte_runs(self) -> bool:
        """See `DetokenizerFactory`."""
        return self._tokenizer.has_byte_runs

    def incremental_detokenizer(self, prompt_token_ids: list[int], *, skip_special_tokens: bool) -> Detokenizer:
        """See `DetokenizerFactory`."""
        if not skip_special_tokens:
            return self._tokenizer.incremental_detokenizer(prompt_token_ids, skip_special_tokens=False)
        return _SomeHidden(self._tokenizer, prompt_token_ids, self.is_special)

    def decode_token(self, token_id: int) -> str | None:
        """See `DetokenizerFactory`."""
        return self._tokenizer.decode_token(token_id)

    def piece(self, token_id: int, *, skip_special_tokens: bool) -> str | bytes:
        """See `DetokenizerFactory`."""
        is_hidden = skip_special_tokens and self.is_special(token_id)
        return "" if is_hidden else self._tokenizer.piece(token_id, skip_special_tokens=False)

    def is_special(self, token_id: int) -> bool:
        """Return True for hidden tokens."""
        return token_id not in self._shown and self._tokenizer.is_special(token_id)


class _SomeHidden:
    def __init__(
        self, tokenizer: DetokenizerFactory, prompt_token_ids: list[int], is_hidden: Callable[[int], bool]
    ) -> None:
        self._is_hidden = is_hidden
        prompt = self._shown(prompt_token_ids)
        self._behind = tokenizer.incremental_detokenizer(prompt, skip_special_tokens=False)

    @property
    def held(self) -> bytes:
        return self._behind.held

    @property
    def num_prompt_bytes(self) -> int:
        return self._behind.num_prompt_bytes

    def add(self, token_ids: list[int]) -> str:
        return self._behind.add(self._shown(token_ids))

    def finish(self) -> str:
        return self._behind.finish()

    def _shown(self, token_ids: list[int]) -> list[int]:
        return [each for each in token_ids if not self._is_hidden(each)]
