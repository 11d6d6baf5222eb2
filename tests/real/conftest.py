"""Real models, tokenizers and chat templates for the tests of this folder: `make real` fetches and makes them.

Every test here is marked `real`, and skipped where the material is missing, unless OCTAVO_REQUIRE_REAL=1 makes that an
error. OCTAVO_REAL_SCALE, 0 to 1, is the share of their cases that sweeps take; OCTAVO_REAL_SEED draws which.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

HOME = Path(os.environ.get("OCTAVO_REAL_HOME", "~/.cache/octavo/real")).expanduser()  # as tools/make_real.py has it
LLAMA_CPP_MODELS = HOME / "llama.cpp" / "models"


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.real)


def found(path: Path) -> Path:
    """Return a path that exists; else the test is skipped, or fails where the material is required."""
    if not path.exists():
        message = f"{path} is missing: `make real` makes it"
        (pytest.fail if os.environ.get("OCTAVO_REQUIRE_REAL") == "1" else pytest.skip)(message)
    return path


@pytest.fixture(scope="session")
def real_model():
    """Return a function: the name of a checkpoint, "smollm2" or "qwen3" say -> its folder."""
    return lambda name: found(HOME / name / "model.safetensors").parent


@pytest.fixture(scope="session")
def real_templates() -> dict[str, str]:
    """Chat templates of real models: name -> source."""
    paths = sorted(found(LLAMA_CPP_MODELS / "templates").glob("*.jinja"))
    return {path.stem: path.read_text(encoding="utf-8") for path in paths}


@pytest.fixture(scope="session")
def real_vocabularies() -> dict[str, Path]:
    """Vocabularies of real models as GGUF files: name -> path; path + ".inp" has texts, ".out" their token ids."""
    paths = sorted(found(LLAMA_CPP_MODELS).glob("ggml-vocab-*.gguf"))
    return {path.stem.removeprefix("ggml-vocab-"): path for path in paths}


@pytest.fixture(scope="session")
def real_scale() -> float:
    """Share of their cases that sweeps take, above 0 and at most 1."""
    return float(os.environ.get("OCTAVO_REAL_SCALE", "1"))


@pytest.fixture(scope="session")
def sampled(real_scale):
    """Return a function: a list of cases -> the share that this run takes, at least one, in their order."""
    draw = random.Random(os.environ.get("OCTAVO_REAL_SEED", "0"))

    def take(cases):
        count = max(1, round(len(cases) * real_scale))
        return [cases[index] for index in sorted(draw.sample(range(len(cases)), count))]

    return take
