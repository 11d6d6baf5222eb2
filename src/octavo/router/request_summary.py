"""Reads facts of a request without parsing the prompt."""

from __future__ import annotations

import hashlib
import itertools
from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec

from octavo.http.apis import APIS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_BYTES_PER_TOKEN = 4
_USUAL_TOKENS = 256  # assumed for an answer without a limit
_SMALL_PIECE, _LARGE_PIECE, _SMALL_PIECES = 64, 1024, 128  # bytes per piece of a prompt; the first 128 are small
_MAX_PIECES = 4096  # bytes after 4 MB are ignored
_ENDS = list(
    itertools.accumulate(_SMALL_PIECE if number < _SMALL_PIECES else _LARGE_PIECE for number in range(_MAX_PIECES))
)
_MAX_TOKENS = 1 << 17
_MAX_STREAMS = 1 << 10
_NO_RAW = msgspec.Raw()
_BLOCK_BYTES = 4096

_PROMPT_FIELDS = tuple(dict.fromkeys(name for api in APIS for name in api.prompt))
_LIMITS = tuple(dict.fromkeys(tuple(name.split(".")) for api in APIS for name in api.limits))
_DETAILS = ("parameters", "decoder_input_details")
_OTHERS = ("model", "n", "echo", "logprobs", "prompt_logprobs", "user", "prompt_cache_key", "cache_salt")


def _nested(name: str) -> Any:
    paths = [path for path in (*_LIMITS, _DETAILS) if path[0] == name and len(path) > 1]
    return msgspec.defstruct(name.capitalize(), [(path[1], Any, None) for path in dict.fromkeys(paths)])


_FIELDS: dict[str, tuple[Any, Any]] = {
    **dict.fromkeys(_PROMPT_FIELDS, (msgspec.Raw, _NO_RAW)),
    **{path[0]: (Any if len(path) == 1 else _nested(path[0]) | None, None) for path in (*_LIMITS, _DETAILS)},
    **dict.fromkeys(_OTHERS, (Any, None)),
}
_decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(
    msgspec.defstruct("Body", [(name, *declared) for name, declared in _FIELDS.items()])
)


@dataclass(frozen=True)
class RequestSummary:
    """The facts of a request that a router needs.

    prompt: Views of the body. If a prompt continues another prompt, it begins with the other's bytes.
    owner: JSON of model, salt and tenant. Requests of one owner share a prefix cache.
    num_tokens: Estimated tokens of all prompts.
    max_tokens: Estimated tokens of each answer.
    num_choices: Number of answers per prompt.
    num_streams: Number of answers to all prompts.
    session: Key of the policy "affinity".
    scores_prompt: True if the client wants log probabilities of the prompt.
    is_answered: False for embeddings and token counts.
    """

    prompt: tuple[memoryview, ...] = ()
    owner: bytes = b""
    model: str | None = None
    num_tokens: int = 0
    max_tokens: int = 0
    num_choices: int = 1
    num_streams: int = 1
    session: str | None = None
    scores_prompt: bool = False
    is_answered: bool = True

    @cached_property
    def num_prompt_bytes(self) -> int:
        """The prompt's bytes."""
        return sum(map(len, self.prompt))

    @cached_property
    def pieces(self) -> tuple[list[bytes], list[int]]:
        """Hashes and ends of the prompt's pieces. A hash covers all bytes up to the piece's end."""
        ends = _ENDS[: bisect_right(_ENDS, self.num_prompt_bytes)]
        owner = hashlib.blake2b(self.owner, digest_size=16).digest()
        state = hashlib.blake2b(key=owner, digest_size=16)
        hashes: list[bytes] = []
        start = 0
        for end in ends:
            for part in self._between(start, end):
                state.update(part)
            hashes.append(state.digest())
            start = end
        return hashes, ends

    def _between(self, start: int, end: int) -> Iterator[memoryview]:
        for part in self.prompt:
            if start < len(part) and end > 0:
                yield part[max(start, 0) : end]
            start, end = start - len(part), end - len(part)


def read_request_summary(
    body: bytes, *, tenant: str, headers: Mapping[str, str], session_header: str, is_answered: bool = True
) -> RequestSummary:
    """Return a request's summary. An invalid body gives the defaults."""
    session = headers.get(session_header)
    try:
        read = _decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return RequestSummary(session=session, is_answered=is_answered)
    model = read.model if isinstance(read.model, str) else None
    salt = read.cache_salt if isinstance(read.cache_salt, str) else ""
    prompt = _prompt(read)
    given = (read.user, read.prompt_cache_key, read.cache_salt)
    num_choices = min(read.n, _MAX_STREAMS) if _is_count(read.n) else 1
    return RequestSummary(
        prompt=prompt,
        owner=msgspec.json.encode((model, salt, tenant)),
        model=model,
        num_tokens=_num_tokens(prompt),
        max_tokens=_max_tokens(read) if is_answered else 0,
        num_choices=num_choices,
        num_streams=num_choices * _num_prompts(read),
        session=session or next((each for each in given if isinstance(each, str) and each), None),
        scores_prompt=_scores_prompt(read),
        is_answered=is_answered,
    )


def _prompt(read: Any) -> tuple[memoryview, ...]:
    # Final quotes and brackets are removed, because a longer prompt continues before them.
    given = [memoryview(raw) for name in _PROMPT_FIELDS if (raw := getattr(read, name))]
    if given:
        given[-1] = _opened(given[-1])
    return tuple(given)


def _scores_prompt(read: Any) -> bool:
    is_echoed = bool(read.echo) and read.logprobs is not None
    has_details = bool(_value(read, _DETAILS))
    return read.prompt_logprobs is not None or is_echoed or has_details


def _opened(view: memoryview) -> memoryview:
    kept = b""
    while view and not kept:
        block = bytes(view[-_BLOCK_BYTES:])
        kept = block.rstrip(b'"]} \t\r\n')
        view = view[: len(view) - len(block) + len(kept)]
    return view


def _num_tokens(prompt: tuple[memoryview, ...]) -> int:
    return sum(bytes(part).count(b",") + 1 if _holds_ids(part) else len(part) // _BYTES_PER_TOKEN for part in prompt)


def _holds_ids(part: memoryview) -> bool:
    return _elements(part)[:1].isdigit()


def _elements(part: memoryview) -> bytes:
    beginning = bytes(part[:_BLOCK_BYTES]).lstrip()
    return beginning[1:].lstrip() if beginning[:1] == b"[" else b""


def _num_prompts(read: Any) -> int:
    given = read.prompt or read.input
    if _elements(memoryview(given))[:1] not in {b'"', b"["}:  # one text, its ids, or a conversation
        return 1
    return len(msgspec.json.decode(given, type=list[msgspec.Raw]))


def _max_tokens(read: Any) -> int:
    given = [_value(read, path) for path in _LIMITS]
    return min(min((each for each in given if _is_count(each)), default=_USUAL_TOKENS), _MAX_TOKENS)


def _value(read: Any, path: tuple[str, ...]) -> Any:
    value = getattr(read, path[0])
    return value if len(path) == 1 or value is None else getattr(value, path[1])


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
