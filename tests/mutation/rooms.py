"""The rooms with mutated code, and the tests that judge each of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mutation.mutator import SOURCE, Module

if TYPE_CHECKING:
    from collections.abc import Iterable

TESTS = Path(__file__).resolve().parents[1]
EQUIVALENT = Path(__file__).with_name("equivalent")


@dataclass(frozen=True, slots=True)
class Room:
    """Modules that are judged together.

    package: the package that contains them, with its subpackages.
    modules: their paths in the package; empty for all of them.
    elsewhere: paths of modules that run in child processes, which no mutant reaches: they are not judged.
    tests: files and folders below `tests/` that judge them, in this process and within seconds.
    left_out: prefixes of test names that do not judge: they start processes, or measure time or the whole process.
    conftest: the folder below `tests/` above which no conftest.py is loaded.
    num_worlds: number of worlds of the simulation that judge too.
    whole_sweeps: all cases of sweeps judge, not only those that are drawn for the day.
    min_killed: the percentage of judged mutants, without the equivalent ones, that must be killed.
    """

    name: str
    package: str
    tests: tuple[str, ...]
    modules: tuple[str, ...] = ()
    elsewhere: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    conftest: str = ""
    num_worlds: int = 0
    whole_sweeps: bool = False
    min_killed: float = 90

    @property
    def folder(self) -> Path:
        """The folder of the package's source."""
        return SOURCE / self.package.replace(".", "/")

    @property
    def equivalent(self) -> Path:
        """The path of the list of equivalent mutants."""
        return EQUIVALENT / f"{self.name}.toml"

    def paths(self) -> list[Path]:
        """Return the paths of the modules, sorted."""
        left_out = {self.folder / name for name in self.elsewhere}
        return sorted({*([self.folder / name for name in self.modules] or self.folder.rglob("*.py"))} - left_out)

    def read_modules(self, paths: Iterable[Path] | None = None) -> list[Module]:
        """Parse the modules, or only those at `paths`."""
        return [Module(_name_of(path), folder=self.folder) for path in (self.paths() if paths is None else paths)]


def _name_of(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


ROOMS = (
    Room("core", "octavo.core", ("core",), conftest="core", num_worlds=100, min_killed=95),
    Room(
        "models",
        "octavo.models",
        (
            "models/test_rope.py",
            "models/test_gguf_file.py",
            "models/test_gguf_limits.py",
            "models/test_gguf_pieces.py",
        ),
        ("rope.py", "gguf_file.py"),
        left_out=("tests/models/test_rope.py::test_cos_sin_peak_memory_is_about_table_size",),
    ),
    Room(
        "engine",
        "octavo.engine",
        (
            "engine/test_detokenizer.py",
            "engine/test_llm_engine.py",
            "engine/test_output_processor.py",
            "engine/test_stop_strings.py",
            "engine/test_tokenizer.py",
        ),
        ("detokenizer.py", "output_processor.py", "stop_strings.py"),
        left_out=("tests/engine/test_stop_strings.py::test_worst_case_stop_strings_stay_fast",),
    ),
    Room("speculative", "octavo.speculative", ("speculative",)),
    Room("router", "octavo.router", ("router",)),
    Room(
        "ray",
        "octavo.ray",
        ("ray/test_figures.py", "ray/test_fleet.py", "ray/test_scaling.py"),
        ("figures.py", "fleet.py", "scaling.py"),
    ),
    Room(
        "http",
        "octavo.http",
        ("http", "server/test_http_errors.py"),
        left_out=("tests/http/test_limits.py::test_allow_open_files_sets_limits_of_real_process",),
    ),
    Room(
        "bodies",
        "octavo.server",
        ("server/test_bodies.py", "server/test_http_errors.py", "server/test_json_structure.py"),
        ("bodies.py", "json_structure.py"),
    ),
    Room(
        "kv_transfer",
        "octavo.kv_transfer",
        ("kv_transfer",),
        elsewhere=("mooncake_process.py",),
        left_out=(
            "tests/kv_transfer/test_direct.py::test_killed_or_frozen_donor_ends_load_with_received_blocks",
            "tests/kv_transfer/test_direct_engines.py",
            "tests/kv_transfer/test_disk_faults.py::test_full_file_system_stops_saves_and_keeps_loads",
            "tests/kv_transfer/test_disk_faults.py::test_file_size_rlimit_stops_saves_and_keeps_loads",
            "tests/kv_transfer/test_disk_processes.py",
            "tests/kv_transfer/test_mooncake_engines.py",
            "tests/kv_transfer/test_mooncake_pool.py",
        ),
    ),
    Room(
        "ranks",
        "octavo.ranks",
        ("simulation/test_rank_messages.py", "ranks/test_step_messages.py"),
        ("messages.py", "following_runner.py"),
        whole_sweeps=True,
    ),
    Room("answers", "octavo.server.answers", ("server/answers",), whole_sweeps=True),
)
BY_NAME = {room.name: room for room in ROOMS}


def room_of_day(day: str) -> Room:
    """Return the room of a day, written as in `date +%Y-%j`: rooms take turns by the number of the day.

    Raises `ValueError` for any other text.
    """
    year, dash, number = day.partition("-")
    if not (dash and len(year) == 4 and year.isdecimal() and number.isdecimal() and 1 <= int(number) <= 366):
        raise ValueError(f"{day} is no day: write the year and the number of the day, such as 2026-007")
    return ROOMS[int(number) % len(ROOMS)]


def paths_named(rooms: Iterable[Room], files: Iterable[str]) -> list[tuple[Room, list[Path]]]:
    """Return each room that has one of these files, with their paths; all rooms and paths if no file is named.

    A file is the end of a path: `limiter.py`, `http/limiter.py`. Raises `ValueError` for a file in no room.
    """
    found = [(room, room.paths()) for room in rooms]
    wanted = [Path(file).parts for file in files]
    if not wanted:
        return found
    for parts in wanted:
        if not any(path.parts[-len(parts) :] == parts for _, paths in found for path in paths):
            raise ValueError(f"{'/'.join(parts)} is no file of {', '.join(room.name for room, _ in found)}")
    chosen = [
        (room, [path for path in paths if any(path.parts[-len(parts) :] == parts for parts in wanted)])
        for room, paths in found
    ]
    return [(room, paths) for room, paths in chosen if paths]
