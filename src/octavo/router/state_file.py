"""Keeps the prefixes of the policy "cache_aware" in a file, so that they survive a restart of the router."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec

if TYPE_CHECKING:
    from octavo.router.engines import EngineHandle, EnginePool
    from octavo.router.policies.prefix_tree import PrefixTree

logger = logging.getLogger(__name__)
_NAME, _VERSION = "prefixes of octavo route", 1  # a change of the pieces' hashes needs a new version
_BATCH = 1000  # pieces in a line
_Count = Annotated[int, msgspec.Meta(ge=0)]


class _Named(msgspec.Struct):
    content: str
    version: int


class _Engine(msgspec.Struct):
    url: str
    incarnation: tuple[float, ...]
    lost: _Count


class _Header(_Named):
    now: _Count
    num_pieces: int
    engines: list[_Engine]


_Piece = tuple[Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)], bool, dict[_Count, _Count]]
_pieces: msgspec.json.Decoder[list[_Piece]] = msgspec.json.Decoder(list[_Piece])


class StateFile:
    """A file of JSON lines. The first line describes the engines, and each further line has a batch of pieces.

    A piece has a hash, `has_more`, and the time of each engine that got it, by the engine's index. The pieces have the
    tree's order.
    """

    def __init__(self, path: Path, pool: EnginePool, tree: PrefixTree) -> None:
        self._path, self._pool, self._tree = path, pool, tree
        self._is_foreign = False
        self._trouble = ""

    async def read(self) -> None:
        """Restore the prefixes. After an error, log a warning and restore nothing."""
        try:
            header, pieces = await asyncio.to_thread(self._read)
        except FileNotFoundError:
            return
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            what = "it will not be replaced" if self._is_foreign else "the router starts without prefixes"
            logger.warning("%s: %s; %s", self._path, error, what)
            return
        numbers = [self._pool.reserve(each.url, each.incarnation, each.lost) for each in header.engines]
        self._tree.restore(
            (
                (digest, has_more, {numbers[index]: time for index, time in times.items()})
                for digest, has_more, times in pieces
            ),
            header.now,
            numbers,
        )

    def _read(self) -> tuple[_Header, list[_Piece]]:
        first, *lines = self._path.read_bytes().split(b"\n")
        try:
            named = msgspec.json.decode(first, type=_Named)
            self._is_foreign = named.content != _NAME
        except msgspec.DecodeError:
            self._is_foreign = bool(first)
        if self._is_foreign:
            raise ValueError("this is not a state file of octavo route")
        if not first or named.version != _VERSION:
            raise ValueError("this state file is empty or has another version")
        header = msgspec.json.decode(first, type=_Header)
        pieces = [piece for line in lines if line for piece in _pieces.decode(line)]
        num_engines = len(header.engines)
        is_valid = all(
            index < num_engines and time <= header.now for *_, times in pieces for index, time in times.items()
        )
        if len(pieces) != header.num_pieces or not is_valid:
            raise ValueError("this state file is not complete")
        return header, pieces

    async def save(self) -> None:
        """Replace the file. An error is logged once.

        An engine is not saved if the router cannot read its start time.
        """
        if self._is_foreign:
            return
        try:
            engines = [each for each in self._pool.engines.values() if each.incarnation and any(each.incarnation)]
            lines, num_pieces = await self._lines(engines)
            saved = [_Engine(each.url, each.incarnation or (), self._tree.lost_until(each)) for each in engines]
            header = _Header(_NAME, _VERSION, self._tree.now, num_pieces, saved)
            await asyncio.to_thread(self._replace, [msgspec.json.encode(header), *lines])
            self._trouble = ""
        except OSError as error:
            trouble = error.strerror or str(error)
            if trouble != self._trouble:
                logger.error("%s: the prefixes were not saved: %s", self._path, trouble)  # noqa: TRY400 - it says all
            self._trouble = trouble

    async def _lines(self, engines: list[EngineHandle]) -> tuple[list[bytes], int]:
        # Other tasks run between two batches. A piece comes after the pieces that continue it, so its times are later.
        index_of = {engine.number: index for index, engine in enumerate(engines)}
        lines, num_pieces, hashes = [], 0, self._tree.hashes
        for start in range(0, len(hashes), _BATCH):
            pieces = [
                (digest, node.has_more, times)
                for digest in hashes[start : start + _BATCH]
                if (node := self._tree.node(digest)) is not None
                and (times := {index_of[number]: time for number, time in node.times.items() if number in index_of})
            ]
            num_pieces += len(pieces)
            lines.append(msgspec.json.encode(pieces))
            await asyncio.sleep(0)
        return lines, num_pieces

    def _replace(self, lines: list[bytes]) -> None:
        number, name = tempfile.mkstemp(prefix=f".{self._path.name}.", dir=self._path.parent)
        unfinished = Path(name)
        try:
            with os.fdopen(number, "wb") as file:
                file.write(b"\n".join(lines))
            unfinished.replace(self._path)
        except BaseException:
            with contextlib.suppress(OSError):
                unfinished.unlink()
            raise
