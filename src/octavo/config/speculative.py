"""How tokens are guessed."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from octavo.config.fields import one_of, within
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

_METHODS = ("ngram",)
_MAX_TOKENS = 32
_MAX_LOOKUP = 32
_DEFAULT_LOOKUP = (2, 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """How tokens are guessed, so that one step verifies several. No token depends on it; named as in vLLM.

    method: "ngram" proposes what followed the last time that the newest tokens stood in the request.
    num_speculative_tokens: at most so many are guessed behind the newest token.
    prompt_lookup_min, prompt_lookup_max: how many tokens have to be the same for that; the most are looked for first.
    None: 2 and 4, or what leaves the other one as it is.
    """

    method: str
    num_speculative_tokens: int = 4
    prompt_lookup_min: int | None = None
    prompt_lookup_max: int | None = None

    def __post_init__(self) -> None:
        one_of("method of speculative_config", self.method, _METHODS)
        within("num_speculative_tokens", self.num_speculative_tokens, 1, _MAX_TOKENS)
        for name in ("prompt_lookup_min", "prompt_lookup_max"):
            if getattr(self, name) is not None:
                within(name, getattr(self, name), 1, _MAX_LOOKUP)
        least, most = self.lookup_lengths
        if least > most:
            raise ConfigError(f"prompt_lookup_min ({least}) must be at most prompt_lookup_max ({most})")

    @property
    def lookup_lengths(self) -> tuple[int, int]:
        """The least and the most tokens that are looked for."""
        least, most = self.prompt_lookup_min, self.prompt_lookup_max
        if least is None:
            least = _DEFAULT_LOOKUP[0] if most is None else min(_DEFAULT_LOOKUP[0], most)
        return least, max(_DEFAULT_LOOKUP[1], least) if most is None else most

    @classmethod
    def parse(cls, given: Mapping[str, Any] | None) -> SpeculativeConfig | None:
        """Return what a user wrote as an object of JSON; None for none. Raises `ConfigError`."""
        if given is None:
            return None
        names = tuple(each.name for each in fields(cls))
        if not hasattr(given, "keys") or "method" not in given:
            raise ConfigError(f"speculative_config must be an object that names a method, got {given!r}")
        for name in given:
            one_of("a field of speculative_config", name, names)
        return cls(**given)
