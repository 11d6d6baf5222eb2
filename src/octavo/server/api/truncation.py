"""Truncation of prompts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.engine.input_processor import InputProcessor
    from octavo.server.api.openai.requests import TruncationFields


@dataclass(frozen=True, slots=True)
class Truncation:
    """How to truncate a prompt.

    num_tokens: Number of tokens to keep, or None for all.
    from_left: True to cut off the first tokens.
    """

    num_tokens: int | None = None
    from_left: bool = True

    @classmethod
    def of(cls, request: TruncationFields, num_output_tokens: int, max_model_len: int) -> Truncation:
        """Read vLLM's fields. The value -1 keeps room for `num_output_tokens` in the context."""
        num_tokens = request.truncate_prompt_tokens
        if num_tokens == -1:
            num_tokens = max(1, max_model_len - num_output_tokens)
        return cls(num_tokens, request.truncation_side != "right")

    def applied_to(self, prompt: Any, inputs: InputProcessor) -> Any:
        """Truncate a string, or a dict with `prompt_token_ids`."""
        if self.num_tokens is None:
            return prompt
        if isinstance(prompt, str):
            # With the key "prompt", `Service.generate` does not charge for these tokens a second time.
            return {"prompt": None, "prompt_token_ids": self.encode(prompt, inputs)}
        token_ids = prompt["prompt_token_ids"]
        kept = token_ids[-self.num_tokens :] if self.from_left else token_ids[: self.num_tokens]
        return {**prompt, "prompt_token_ids": kept}

    def encode(self, text: str, inputs: InputProcessor, *, add_special_tokens: bool = True) -> list[int]:
        """Tokenize the kept text."""
        assert self.num_tokens is not None, "nothing is cut off"
        take = inputs.encode_end if self.from_left else inputs.encode_start
        return take(text, self.num_tokens, add_special_tokens=add_special_tokens)


WHOLE = Truncation()
