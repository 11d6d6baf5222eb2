"""Finds engines."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import TYPE_CHECKING, Protocol

from octavo.config.router import engine_url
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from octavo.config import RouterConfig

logger = logging.getLogger(__name__)


class Source(Protocol):
    """Addresses of engines."""

    async def urls(self) -> list[str]:
        """Return the current addresses, or the previous addresses after an error."""
        ...


class EnginesFile:
    """A file with an address on each line. A changed file is read again.

    An invalid file changes nothing and is logged once.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._urls: list[str] = []
        self._seen: tuple[int, int, int] | None = None
        self._trouble = ""

    async def urls(self) -> list[str]:
        """Return the addresses."""
        return await asyncio.to_thread(self._read)

    def _read(self) -> list[str]:
        try:
            stat = self._path.stat()
            seen = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
            if seen != self._seen:
                self._urls = read_engines(self._path)
                self._seen, self._trouble = seen, ""
        except (OSError, UnicodeDecodeError, ConfigError) as error:
            if str(error) != self._trouble:
                logger.error("the list of engines was not reloaded: %s: %s", self._path, error)  # noqa: TRY400 - it says all
            self._trouble = str(error)
        return self._urls


def read_engines(path: Path) -> list[str]:
    """Read addresses. Raises `ConfigError`, `OSError` and `UnicodeDecodeError`."""
    lines = (line.partition("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines())
    return [engine_url(line) for line in lines if line]


class EnginesOfName:
    """All addresses of a DNS name."""

    def __init__(self, name_and_port: str) -> None:
        name, _, port = name_and_port.rpartition(":")
        self._name, self._port = name.strip("[]"), int(port)
        self._urls: list[str] = []

    async def urls(self) -> list[str]:
        """Resolve the name."""
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(self._name, self._port, type=socket.SOCK_STREAM)
        except socket.gaierror as error:
            if error.errno not in {socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)}:
                return self._urls
            found = []
        hosts = {str(address[0]) for *_, address in found}
        self._urls = sorted(
            f"http://[{host}]:{self._port}" if ":" in host else f"http://{host}:{self._port}" for host in hosts
        )
        return self._urls


def make_sources(config: RouterConfig) -> list[Source]:
    """Make configured sources."""
    sources: list[Source] = []
    if config.engines_file is not None:
        sources.append(EnginesFile(config.engines_file))
    if config.engines_dns is not None:
        sources.append(EnginesOfName(config.engines_dns))
    return sources
