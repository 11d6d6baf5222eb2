"""What the output processor, and who tells of its tokens, ask of a tokenizer; and what stands in for one."""

from __future__ import annotations

from typing import Protocol


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
    """Leaves out the special tokens of a stream, but for a few that are shown."""

    def __init__(self, tokenizer: DetokenizerFactory, prompt_token_ids: list[int], shown: list[int]) -> None:
        self._is_special = tokenizer.is_special
        self._shown = frozenset(shown)
        self._behind = tokenizer.incremental_detokenizer(prompt_token_ids, skip_special_tokens=False)

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
        return self._behind.add([each for each in token_ids if each in self._shown or not self._is_special(each)])

    def finish(self) -> str:
        """Return what was held back."""
        return self._behind.finish()
