"""A request's fields to `SamplingParams`, on top of the checkpoint's own defaults."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from octavo.errors import RequestError
from octavo.sampling_params import SamplingParams

if TYPE_CHECKING:
    from octavo.server.openai_requests import SamplingFields

# What the two APIs spell in a way of their own is passed by their routes.
_SHARED = tuple(
    field.name
    for field in fields(SamplingParams)
    if field.name not in {"max_tokens", "logprobs", "logit_bias", "detokenize", "output_kind"}
)


def sampling_params(
    request: SamplingFields, defaults: SamplingParams, *, max_tokens: int | None, logprobs: int | None
) -> SamplingParams:
    """Build a request's parameters. Raises `RequestError` with the field's name."""
    values: dict[str, Any] = {name: getattr(request, name) for name in _SHARED}
    given = {name: value for name, value in values.items() if value is not None}
    return replace(
        defaults, max_tokens=max_tokens, logprobs=logprobs, logit_bias=_logit_bias(request.logit_bias), **given
    )


def _logit_bias(biases: dict[str, float] | None) -> dict[int, float] | None:
    """JSON has strings as keys, where token ids are meant."""
    if not biases:
        return None
    for key in biases:
        if not (key.isascii() and key.isdecimal() and len(key) < 10):
            raise RequestError(f"logit_bias: {key[:20]!r} is not a token id", parameter="logit_bias")
    return {int(key): bias for key, bias in biases.items()}
