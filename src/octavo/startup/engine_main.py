"""The main module of an engine process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.engine.core_process import run_core_process
from octavo.runtime.garbage import permanent_generation
from octavo.runtime.process_memory import returning_free_memory

if TYPE_CHECKING:
    from octavo.config import EngineConfig
    from octavo.engine.core_process import Progress
    from octavo.engine.engine_core import EngineCore


def build(config: EngineConfig, progress: Progress) -> EngineCore:
    """Import torch and build the core."""
    with permanent_generation():
        from octavo.build import build_core  # noqa: PLC0415 - takes seconds

        return build_core(config, progress=progress, reads_ahead=True)


if __name__ == "__main__":
    with returning_free_memory():
        run_core_process(build)
