"""Convert a journal that an older octavo recorded to the version that this octavo replays.

    python tools/convert_journal.py old.journal new.journal
    octavo replay new.journal

Files with names ending in .gz are compressed. The new journal repeats the recorded run: `octavo explain` and `octavo
trace` read it like any other. A journal of version 2 has no checksums of decisions then, because the old ones do not
fit the new format: `octavo replay` runs it and does not compare its steps.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.errors import ConfigError
from octavo.journal.format import VERSION, open_journal, read_any_version

if TYPE_CHECKING:
    from collections.abc import Callable

    Header = dict[str, Any]
    Lines = list[list[Any]]

SHORT_RESULT = 4  # members of the line of a result in which nothing was guessed and nothing copied
NOTHING_GUESSED: tuple[Any, ...] = (0.0, 0, [], [])  # the further members; versions 2 and 3 may leave out the last ones
MOST_QUESTIONS_AT_AN_END = 2  # which blocks to save, and which without their window parts


def to_version_3(header: Header, lines: Lines) -> tuple[Header, Lines]:
    """Replace the numbers of blocks in the header by KV groups, drop the checksums, move the answers of stores.

    Version 2 has num_blocks, and for models with windows num_window_blocks and window. Its checksums are computed over
    block ids.
    """
    header = dict(header)
    groups: list[dict[str, Any]] = [{"kind": "full_attention", "num_blocks": header.pop("num_blocks")}]
    num_window_blocks, window = header.pop("num_window_blocks", 0), header.pop("window", 0)
    if num_window_blocks:
        groups.append({"kind": "sliding_window", "num_blocks": num_window_blocks, "window": window})
    header["kv_groups"] = groups
    lines = [["s", line[1], None] if line[0] == "s" else line for line in lines]
    return header, with_early_answers(lines) if header.get("connector") else lines


def with_early_answers(lines: Lines) -> Lines:
    """Put the answers of a store before all lines that asked for them.

    Version 2 writes the answers to an abort ("f") or a failed step ("x") with the next step or result, together with
    the answers to that one. It writes none after the last step or result. No step is decided after that, so there the
    answers say that the store wants none of the blocks.
    """
    moved: Lines = []
    start = 0  # of the lines that may have asked since the last step or result
    for line in lines:
        if line[0] == "k":
            moved.insert(start, line)
        else:
            moved.append(line)
        if line[0] in {"s", "u"}:
            start = len(moved)
    if any(line[0] in {"f", "x"} for line in moved[start:]):
        num_requests = sum(line[0] == "a" for line in moved)
        moved.insert(start, ["k", [[]] * MOST_QUESTIONS_AT_AN_END * num_requests])
    return moved


def to_version_4(header: Header, lines: Lines) -> tuple[Header, Lines]:
    """Write the drafts of each step into the line of its result.

    Version 3 has a line ["d", {number: count}] for them after that of the result.
    """
    merged: Lines = []
    result: list[Any] | None = None  # the newest result, before the next decision
    for line in lines:
        if line[0] == "d":
            if result is None:
                raise ConfigError("drafts do not follow a result")
            result += [*NOTHING_GUESSED[len(result) - SHORT_RESULT :], line[1]]
            result = None
            continue
        merged.append(list(line))
        if line[0] in "usx":
            result = merged[-1] if line[0] == "u" else None
    return header, merged


# The next version of the format adds one function here: each converts from the version before it.
UPGRADES: dict[int, Callable[[Header, Lines], tuple[Header, Lines]]] = {2: to_version_3, 3: to_version_4}


def upgraded(header: Header, lines: Lines) -> tuple[Header, Lines]:
    """Return header and lines in the present version. Raises `ConfigError` for a version that is not known."""
    version = recorded = header["journal"]
    if not isinstance(version, int) or version not in {*UPGRADES, VERSION}:
        known = ", ".join(map(str, [*sorted(UPGRADES), VERSION]))
        raise ConfigError(f"the journal has version {version!r}, and only versions {known} can be read")
    while version != VERSION:
        header, lines = UPGRADES[version](header, lines)
        version += 1
    if recorded != VERSION:
        header = {**header, "journal": VERSION, "converted_from": header.get("converted_from", recorded)}
    return header, lines


def convert(source: Path, target: Path) -> int:
    """Write the journal at `source` to `target` in the present version; return the version it had.

    Raises `ConfigError` if the source is no journal of a known version, or if the target exists. Nothing is written
    then.
    """
    header, lines = read_any_version(source)
    try:
        new_header, new_lines = upgraded(header, lines)
    except (KeyError, IndexError, TypeError) as error:
        raise ConfigError(f"{source} is a damaged journal of version {header['journal']!r}: {error!r}") from None
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
    try:
        with open_journal(target, "x") as file:
            file.writelines(json.dumps(line, separators=(",", ":")) + "\n" for line in [new_header, *new_lines])
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error.strerror or error}") from None
    return int(header["journal"])


def main(arguments: list[str] | None = None) -> int:
    """Convert one journal; return the status for the shell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, metavar="OLD", help="the journal that an older octavo recorded")
    parser.add_argument("target", type=Path, metavar="NEW", help="the file to write; it must not exist")
    options = parser.parse_args(arguments)
    try:
        version = convert(options.source, options.target)
    except ConfigError as error:
        print(f"convert_journal: {error}", file=sys.stderr)
        return 1
    print(f"{options.target}: version {VERSION}, from version {version}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
