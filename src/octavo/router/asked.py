"""What a request asks for, as far as a router has to know: read from its body without taking the prompt apart."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_BYTES_PER_TOKEN = 4  # of English; only loads are reckoned with it
_USUAL_TOKENS = 256  # of an answer whose length is not limited
_SMALL_PIECE, _LARGE_PIECE, _SMALL_PIECES = 64, 1024, 128  # bytes of a prompt's pieces: its first ones are small
_MAX_PIECES = 4096  # behind these nobody looks: 4 MB
_MAX_TOKENS = 1 << 17  # that an answer counts as; who asks for more is told so by the engine
_MAX_STREAMS = 1 << 10
# What stands before what in the prompt that an engine makes, whichever API it is.
_PROMPT_FIELDS = ("tools", "instructions", "system", "messages", "prompt", "input", "inputs")
_NO_RAW = msgspec.Raw()


class Parameters(msgspec.Struct):
    """TGI's."""

    max_new_tokens: Any = None
    decoder_input_details: Any = None


class Body(msgspec.Struct):
    """The fields of all APIs that matter here; whatever else there is, and whether they are right, is the engine's."""

    model: Any = None
    tools: msgspec.Raw = _NO_RAW
    instructions: msgspec.Raw = _NO_RAW
    system: msgspec.Raw = _NO_RAW
    messages: msgspec.Raw = _NO_RAW
    prompt: msgspec.Raw = _NO_RAW
    input: msgspec.Raw = _NO_RAW
    inputs: msgspec.Raw = _NO_RAW
    max_tokens: Any = None
    max_completion_tokens: Any = None
    max_output_tokens: Any = None
    parameters: Parameters | None = None
    n: Any = None
    echo: Any = None
    logprobs: Any = None
    prompt_logprobs: Any = None
    user: Any = None
    prompt_cache_key: Any = None
    cache_salt: Any = None


_decoder = msgspec.json.Decoder(Body)


@dataclass(frozen=True)
class Asked:
    """One request. prompt: the bytes that stand for its prompt; one that goes on begins with the same.

    owner: whose cache it is: model, salt, tenant. num_tokens, max_tokens: reckoned, of prompt and answer.
    session: what the policy affinity goes by. scores_prompt: log probabilities of the prompt are asked for, so that all
    of it is computed whatever is in a cache.
    """

    prompt: bytes = b""
    owner: bytes = b""
    model: str | None = None
    num_tokens: int = 0
    max_tokens: int = 0
    num_streams: int = 1
    session: str | None = None
    scores_prompt: bool = False

    @cached_property
    def pieces(self) -> tuple[list[bytes], list[int]]:
        """The prompt's pieces: a hash of each with all that stands before it, and where each ends."""
        hashes: list[bytes] = []
        ends: list[int] = []
        digest = hashlib.blake2b(self.owner, digest_size=16).digest()
        view = memoryview(self.prompt)
        for start, end in _bounds(len(view)):
            digest = hashlib.blake2b(view[start:end], key=digest, digest_size=16).digest()
            hashes.append(digest)
            ends.append(end)
        return hashes, ends


def _bounds(num_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield where pieces begin and end, which depends on nothing but where they are; the rest is none."""
    start = 0
    for number in range(_MAX_PIECES):
        end = start + (_SMALL_PIECE if number < _SMALL_PIECES else _LARGE_PIECE)
        if end > num_bytes:
            return
        yield start, end
        start = end


def read_asked(body: bytes, *, tenant: str, headers: Mapping[str, str], session_header: str) -> Asked:
    """Read a request. A body that is none of a known API's asks for nothing in particular."""
    session = headers.get(session_header)
    try:
        read = _decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return Asked(session=session)
    model = read.model if isinstance(read.model, str) else None
    salt = read.cache_salt if isinstance(read.cache_salt, str) else ""
    prompt = _prompt(read)
    given = (read.user, read.prompt_cache_key, read.cache_salt)
    return Asked(
        prompt=prompt,
        owner=msgspec.json.encode((model, salt, tenant)),
        model=model,
        num_tokens=_num_tokens(prompt),
        max_tokens=_max_tokens(read),
        num_streams=min(read.n, _MAX_STREAMS) if _is_count(read.n) else 1,
        session=session or next((each for each in given if isinstance(each, str) and each), None),
        scores_prompt=_scores_prompt(read),
    )


def _prompt(read: Body) -> bytes:
    """Return the prompt's fields behind one another, without what closes the last: then one that goes on is longer."""
    given = [bytes(getattr(read, name)) for name in _PROMPT_FIELDS]
    return b"\n".join(filter(None, given)).rstrip(b'"]} \t\r\n')


def _scores_prompt(read: Body) -> bool:
    is_echoed = bool(read.echo) and read.logprobs is not None
    has_details = read.parameters is not None and bool(read.parameters.decoder_input_details)
    return read.prompt_logprobs is not None or is_echoed or has_details


def _num_tokens(prompt: bytes) -> int:
    if prompt[:1] == b"[" and prompt[1:].lstrip()[:1].isdigit():  # token ids
        return prompt.count(b",") + 1
    return len(prompt) // _BYTES_PER_TOKEN


def _max_tokens(read: Body) -> int:
    limits = (read.max_completion_tokens, read.max_tokens, read.max_output_tokens)
    given = [*limits, None if read.parameters is None else read.parameters.max_new_tokens]
    return min(min((each for each in given if _is_count(each)), default=_USUAL_TOKENS), _MAX_TOKENS)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
