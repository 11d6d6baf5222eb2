"""The journal's lines: one JSON array for each call into the core, a header before them.

The core is a pure machine, so its inputs are all that is needed: what it decided is computed again, and compared with a
checksum. No text and no token ids are kept. A token stands as a pseudonym: 31 bits of a running hash over it and all
tokens before it (BLAKE2b with a key that is not kept), so that two requests agree in pseudonyms exactly as far as they
agree in tokens, and nothing else can be read from them. A cache salt stands as a keyed hash, too, and so does the key
of a span of the prompt: the option "spans" has [first, end, key] of each.

    ["a", t, number, id, prompt, max_total_tokens, {options}]       a request arrived
    ["f", t, [numbers], status]                                     requests were ended from outside
    ["s", t, checksum]                                              a step was decided; checksum null: not known
    ["u", t, [[number, sampled, accepted, status, error], ...], [[transfer, blocks, moves, evicted], ...],
     seconds, passes, [numbers], [moves], {number: count}]          its result, without requests that were due one token
                                                                    and got it; a request whose token is postponed has
                                                                    none, and no error. The last five are left out if
                                                                    all are empty: what guessing took, of which
                                                                    requests, what was copied to host memory and back,
                                                                    and how many drafts were proposed for each request
    ["k", [answers]]                                                what a store of KV outside answered to the next line
    ["x", t, message]                                               the step failed
    ["p", [numbers]], ["r"]                                         preempt these; forget the prefix cache
    ["g", number, output]                                           what a request generated, written when it ends

The header has the version as "journal". Its "kv_groups" has one object per KV group, full attention first:
{"kind": "full_attention", "num_blocks": n}, {"kind": "sliding_window", "num_blocks": n, "window": tokens}.
"converted_from": the version that the journal was written in, if a converter brought it to this one. From version 2 the
checksums are null then, because they do not fit the decisions of later versions.

t: microseconds since the line before. A move is [tier, blocks, bytes, seconds]. Prompts and outputs: base64 of
pseudonyms of four bytes, whose highest bit is not used.
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
}


class Pseudonyms:
    """Names for the tokens of one sequence, each by everything before it."""

    def __init__(self, key: bytes) -> None:
        self._hash = hashlib.blake2b(key=key, digest_size=4)

    def extend(self, token_ids: list[int]) -> bytes:
        """Return the names of the tokens that follow, four bytes each."""
        update, digest, packed = self._hash.update, self._hash.digest, array("q", token_ids).tobytes()
        names = []
        for start in range(0, len(packed), 8):
            update(packed[start : start + 8])
            names.append(digest())
        return b"".join(names)


def hidden(text: str, key: bytes) -> str:
    """Return what stands for a text that must not be told: equal for equal texts."""
    return hashlib.blake2b(text.encode(), key=key, digest_size=8).hexdigest()


def encode_tokens(names: bytes) -> str:
    """Pack names of tokens."""
    return base64.b64encode(names).decode()


def decode_tokens(text: str) -> list[int]:
    """Unpack names of tokens as the 31-bit ids that stand for them."""
    packed = array("I")
    packed.frombytes(base64.b64decode(text))
    return [name & 0x7FFFFFFF for name in packed]


def decode_transfer(
    transfer_id: int, num_blocks: int, moves: Sequence[list[Any]] = (), evicted: Sequence[tuple[str, int]] = ()
) -> EndedTransfer:
    """Unpack a transfer that ended; a journal may be older than what is told of it besides."""
    told = tuple((tier, count) for tier, count in evicted)
    return EndedTransfer(transfer_id, num_blocks, tuple(TierMove(*move) for move in moves), told)


def checksum(scheduled: SchedulerOutput) -> int:
    """Sum up every decision of a step: who, how many tokens, which blocks, which copies and transfers."""
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
    )
    numbers = array("q", [len(counts), *counts.values(), *cached.num_computed_tokens])  # thrice as fast as their repr
    names = zlib.crc32("\0".join(counts).encode())
    return zlib.crc32(repr(seldom).encode(), zlib.crc32(numbers.tobytes(), names))


def open_journal(path: Path, mode: str) -> IO[str]:
    """Open a journal for reading or writing as text; one whose name ends in .gz is compressed."""
    if path.suffix == ".gz":
        return gzip.open(path, mode + "t", compresslevel=1, encoding="ascii")  # type: ignore[return-value]
    return path.open(mode, encoding="ascii")


def read_journal(path: Path) -> tuple[dict[str, Any], list[list[Any]]]:
    """Return header and lines of a journal. A last line that was cut off is left out.

    Raises `ConfigError` if the file is no journal, cannot be read, or has another version than this one.
    """
    header, lines = read_any_version(path)
    version = header["journal"]
    if version == VERSION:
        return header, lines
    is_older = isinstance(version, int) and version < VERSION
    advice = "convert it with tools/convert_journal.py" if is_older else "use the octavo that wrote it"
    raise ConfigError(f"{path} is a journal of version {version!r}, and this octavo reads version {VERSION}: {advice}")


def read_any_version(path: Path) -> tuple[dict[str, Any], list[list[Any]]]:
    """Return header and lines like `read_journal`, whatever the version; header["journal"] has it."""
    try:
        with open_journal(path, "r") as file:
            lines = list(_complete_lines(file))
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as a journal: {error}") from None
    if not lines or not isinstance(lines[0], dict) or "journal" not in lines[0]:
        raise ConfigError(f"{path} is no journal; `octavo serve --record FILE` writes one")
    return lines[0], lines[1:]


def _complete_lines(file: IO[str]) -> Iterator[Any]:
    for line in file:
        if not line.endswith("\n"):
            return
        try:
            yield json.loads(line)
        except ValueError:
            raise ConfigError(f"{file.name} is no journal: {line[:60]!r}") from None
