"""What the output processor, and who tells of its tokens, ask of a tokenizer; and what stands in for one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable


class Detokenizer(Protocol):
    """Turns a stream of token ids into text; all pieces together are the text of all tokens at once.

    held, num_prompt_bytes: bytes that wait for those behind them, and how many of them are the prompt's.
    """

    @property
    def held(self) -> bytes:
        """The bytes."""
        ...

    @property
    def num_prompt_bytes(self) -> int:
        """How many of them the prompt has."""
        ...

    def add(self, token_ids: list[int]) -> str:
        """Return the text that is certain now."""
        ...

    def finish(self) -> str:
        """Return what was held back."""
        ...


class DetokenizerFactory(Protocol):
    """What the output processor, and who tells of its tokens, ask of a tokenizer."""

    @property
    def has_byte_runs(self) -> bool:
        """Whether bytes that follow each other are read together."""
        ...

    def incremental_detokenizer(self, prompt_token_ids: list[int], *, skip_special_tokens: bool) -> Detokenizer:
        """Start a stream behind a prompt."""
        ...

    def decode_token(self, token_id: int) -> str | None:
        """Return the text of one token, for logprobs."""
        ...

    def piece(self, token_id: int, *, skip_special_tokens: bool) -> str | bytes:
        """Return what a token adds to a text: characters, or bytes that are none alone."""
        ...

    def is_special(self, token_id: int) -> bool:
        """Whether a token is none of the text, unless special tokens are asked for."""
        ...


class NoDetokenizer:
    """Null object for requests that want token ids only."""

    held = b""
    num_prompt_bytes = 0

    def add(self, token_ids: list[int]) -> str:  # noqa: ARG002 - the signature is the protocol's
        """No text."""
        return ""

    def finish(self) -> str:
        """No text."""
        return ""


class NoTokenizer:
    """Null object for engines without one."""

    has_byte_runs = False

    def incremental_detokenizer(
        self,
        prompt_token_ids: list[int],  # noqa: ARG002 - the signature is the protocol's
        *,
        skip_special_tokens: bool,  # noqa: ARG002
    ) -> Detokenizer:
        """No text."""
        return NoDetokenizer()

    def decode_token(self, token_id: int) -> None:  # noqa: ARG002
        """No text."""
        return

    def piece(self, token_id: int, *, skip_special_tokens: bool) -> str:  # noqa: ARG002
        """No text."""
        return ""

    def is_special(self, token_id: int) -> bool:  # noqa: ARG002
        """None is known."""
        return False


class SomeSpecialTokens:
    """A tokenizer that shows a few of the special tokens even where they are to be left out."""

    def __init__(self, tokenizer: DetokenizerFactory, shown: list[int]) -> None:
        self._tokenizer = tokenizer
        self._shown = frozenset(shown)

    @property
    def has_byte_runs(self) -> bool:
        """Whether bytes that follow each other are read together."""
        return self._tokenizer.has_byte_runs

    def incremental_detokenizer(self, prompt_token_ids: list[int], *, skip_special_tokens: bool) -> Detokenizer:
        """Start a stream behind a prompt, which hides the same."""
        if not skip_special_tokens:
            return self._tokenizer.incremental_detokenizer(prompt_token_ids, skip_special_tokens=False)
        return _SomeHidden(self._tokenizer, prompt_token_ids, self._is_hidden)

    def decode_token(self, token_id: int) -> str | None:
        """Return the text of one token."""
        return self._tokenizer.decode_token(token_id)

    def piece(self, token_id: int, *, skip_special_tokens: bool) -> str | bytes:
        """Return what a token adds to a text."""
        is_hidden = skip_special_tokens and self._is_hidden(token_id)
        return "" if is_hidden else self._tokenizer.piece(token_id, skip_special_tokens=False)

    def is_special(self, token_id: int) -> bool:
        """Whether a token is none of the text."""
        return self._is_hidden(token_id)

    def _is_hidden(self, token_id: int) -> bool:
        return token_id not in self._shown and self._tokenizer.is_special(token_id)


class _SomeHidden:
    """Leaves the hidden tokens of a stream out."""

    def __init__(
        self, tokenizer: DetokenizerFactory, prompt_token_ids: list[int], is_hidden: Callable[[int], bool]
    ) -> None:
        self._is_hidden = is_hidden
        prompt = self._shown(prompt_token_ids)
        self._behind = tokenizer.incremental_detokenizer(prompt, skip_special_tokens=False)

    @property
    def held(self) -> bytes:
        """Bytes that wait."""
        return self._behind.held

    @property
    def num_prompt_bytes(self) -> int:
        """How many of them the prompt has."""
        return self._behind.num_prompt_bytes

    def add(self, token_ids: list[int]) -> str:
        """Return the text that is certain now."""
        return self._behind.add(self._shown(token_ids))

    def finish(self) -> str:
        """Return what was held back."""
        return self._behind.finish()

    def _shown(self, token_ids: list[int]) -> list[int]:
        return [each for each in token_ids if not self._is_hidden(each)]
