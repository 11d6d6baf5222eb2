"""A journal's format. The first line is a JSON object, the header. Each further line is a call into the core.

The core is deterministic, so a journal needs only the core's inputs and checksums of decisions. A pseudonym replaces
each token. It is 31 bits of a hash of this token and all earlier tokens: BLAKE2b with a key that is not stored.
Pseudonyms reveal only how many first tokens of two requests are equal. Keyed hashes replace cache salts and keys of
spans. "spans" is a list of [first, end, key].

    ["a", t, number, id, prompt, max_total_tokens, {options}]       a request arrived
    ["f", t, [numbers], status]                                     requests were ended from outside
    ["s", t, checksum]                                              a step was decided; null: not known
    ["u", t, [[number, sampled, accepted, status, error], ...], [[transfer, blocks, moves, evicted], ...],
     seconds, passes, [numbers], [moves], {number: count}, kernels,
     experts]                                                       the result of a step
    ["k", [answers]]                                                a store's answers to the call in the next line
    ["x", t, message]                                               the step failed
    ["p", [numbers]], ["r"]                                         preempt these requests; reset the prefix cache
    ["g", number, output]                                           an ended request's generated tokens

A result omits requests that got one token and continue, and requests with an incomplete prompt. For a request with a
postponed token, sampled is 0 and error is null. The last seven fields of a result are omitted if all are empty:

- seconds, passes: Seconds and forward passes of drafting.
- [numbers]: Requests with drafts from a model.
- [moves]: Copies to and from host memory.
- {number: count}: Proposed drafts by request.
- kernels: Kernels compiled.
- experts: Fields of `ExpertLoad`, or omitted.

In the header, "journal" is the version, and "kv_groups" has `KVGroupSpec.to_json` of each KV group, full attention
first. "converted_from" is the version before a conversion. The conversion of version 2 replaces checksums by null.

t: Microseconds since the previous line with a time. A move is [tier, blocks, bytes, seconds]. Prompts
and outputs are base64 of pseudonyms. A pseudonym has four bytes, and the highest bit is ignored.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import zlib
from array import array
from typing import IO, TYPE_CHECKING, Any

from octavo.data.kv_tiers import EndedTransfer, TierMove
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from octavo.data.scheduler_output import SchedulerOutput

VERSION = 4
REQUEST_OPTIONS = (
    "priority",
    "cache_salt",
    "tenant",
    "tenant_weight",
    "adapter",
    "deadline",
    "arrival_time",
    "reads_prefix_cache",
    "kv_transfer_params",
    "cache_points",
)
REQUEST_DEFAULTS: dict[str, Any] = {
    "priority": 0,
    "cache_salt": None,
    "tenant": "",
    "tenant_weight": 1.0,
    "adapter": None,
    "deadline": None,
    "reads_prefix_cache": True,
    "kv_transfer_params": None,
    "cache_points": (),
}


class Pseudonyms:
    """Computes the pseudonyms of one sequence."""

    def __init__(self, key: bytes) -> None:
        self._hash = hashlib.blake2b(key=key, digest_size=4)

    def extend(self, token_ids: list[int]) -> bytes:
        """Return the pseudonyms of the next tokens, four bytes each."""
        update, digest, packed = self._hash.update, self._hash.digest, array("q", token_ids).tobytes()
        names = []
        for start in range(0, len(packed), 8):
            update(packed[start : start + 8])
            names.append(digest())
        return b"".join(names)


def hidden(text: str, key: bytes) -> str:
    """Return a text's keyed hash as 16 hexadecimal digits."""
    return hashlib.blake2b(text.encode(), key=key, digest_size=8).hexdigest()


def encode_tokens(names: bytes) -> str:
    """Encode as base64."""
    return base64.b64encode(names).decode()


def decode_tokens(text: str) -> list[int]:
    """Decode to token ids for a replay."""
    packed = array("I")
    packed.frombytes(base64.b64decode(text))
    return [name & 0x7FFFFFFF for name in packed]


def decode_transfer(
    transfer_id: int, num_blocks: int, moves: Sequence[list[Any]] = (), evicted: Sequence[tuple[str, int]] = ()
) -> EndedTransfer:
    """Decode an ended transfer. Older journals lack moves and evicted blocks."""
    by_tier = tuple((tier, count) for tier, count in evicted)
    return EndedTransfer(transfer_id, num_blocks, tuple(TierMove(*move) for move in moves), by_tier)


def checksum(scheduled: SchedulerOutput) -> int:
    """Return the checksum of a step's decision."""
    cached, counts, copies = scheduled.scheduled_cached_reqs, scheduled.num_scheduled_tokens, scheduled.copies
    seldom = (
        [(new.request_id, new.num_computed_tokens, new.block_ids) for new in scheduled.scheduled_new_reqs],
        cached.new_block_ids,
        sorted(scheduled.finished_req_ids),
        sorted(scheduled.preempted_req_ids),
        [(name, len(drafts)) for name, drafts in scheduled.scheduled_spec_decode_tokens.items()],
        scheduled.max_drafts,
        (copies.swap_out, copies.swap_in, copies.block_copies) if copies else None,
        [(each.transfer_id, each.direction.value, each.block_ids) for each in scheduled.kv_transfers],
        scheduled.kv_cancels,
        *([scheduled.state_saves] if scheduled.state_saves else []),
    )
    numbers = array("q", [len(counts), *counts.values(), *cached.num_computed_tokens])
    names = zlib.crc32("\0".join(counts).encode())
    return zlib.crc32(repr(seldom).encode(), zlib.crc32(numbers.tobytes(), names))


def open_journal(path: Path, mode: str) -> IO[str]:
    """Open a text file, compressed if its name ends in .gz."""
    if path.suffix == ".gz":
        return gzip.open(path, mode + "t", compresslevel=1, encoding="ascii")  # type: ignore[return-value]
    return path.open(mode, encoding="ascii")


def read_journal(path: Path) -> tuple[dict[str, Any], list[list[Any]]]:
    """Return header and complete lines. Raises `ConfigError`."""
    header, lines = read_any_version(path)
    version = header["journal"]
    if version == VERSION:
        return header, lines
    is_older = isinstance(version, int) and version < VERSION
    advice = "convert it with tools/convert_journal.py" if is_older else "use the version of octavo that wrote it"
    raise ConfigError(f"{path} is a journal of version {version!r}, and this octavo reads version {VERSION}: {advice}")


def read_any_version(path: Path) -> tuple[dict[str, Any], list[list[Any]]]:
    """Like `read_journal`, for any version."""
    try:
        with open_journal(path, "r") as file:
            lines = list(_complete_lines(file))
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as a journal: {error}") from None
    if not lines or not isinstance(lines[0], dict) or "journal" not in lines[0]:
        raise ConfigError(f"{path} is not a journal; `octavo serve --record FILE` writes one")
    return lines[0], lines[1:]


def _complete_lines(file: IO[str]) -> Iterator[Any]:
    for line in file:
        if not line.endswith("\n"):
            return
        try:
            yield json.loads(line)
        except ValueError:
            raise ConfigError(f"{file.name} is not a journal: {line[:60]!r}") from None
