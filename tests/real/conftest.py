"""Real models, tokenizers and chat templates for the tests of this folder. `make real` fetches and makes them.

Every test here is marked `real`. It is skipped if its material is missing; with OCTAVO_REQUIRE_REAL=1 that is an error.
OCTAVO_REAL_SCALE, 0 to 1, is the share of cases that sweeps run. Below 1, a test also runs with half of its models
only. OCTAVO_REAL_SEED is the seed of that choice. Tests of one model run in one process, which loads its tokenizer
once.
"""

from __future__ import annotations

import functools
import os
import random
from pathlib import Path

import pytest

from octavo.engine.tokenizer import Tokenizer

HERE = f"{Path(__file__).parent}{os.sep}"
HOME = Path(os.environ.get("OCTAVO_REAL_HOME", "~/.cache/octavo/real")).expanduser()  # as in tools/make_real.py
LLAMA_CPP_MODELS = HOME / "llama.cpp" / "models"


SCALE = float(os.environ.get("OCTAVO_REAL_SCALE", "1"))
SEED = os.environ.get("OCTAVO_REAL_SEED", "0")
MODELS = ("deepseek-r1-distill", "gemma3", "hermes3", "llama31", "mistral", "phi35", "qwen3", "qwen3-coder", "smollm2")


def pytest_collection_modifyitems(config, items):
    models = {}  # test -> the models that it runs with
    for item in items:
        if str(item.path).startswith(HERE):
            item.add_marker(pytest.mark.real)
            if model := model_of(item):
                item.add_marker(pytest.mark.xdist_group(model.partition(",")[0].split()[0]))
                models.setdefault((item.path, item.originalname), {})[model] = None
    if SCALE < 1:
        taken = {test: {*drawn([*names], 0.5, str(test[1]))} for test, names in models.items()}
        left_out = [
            item
            for item in items
            if (item.path, item.originalname) in taken and model_of(item) not in taken[item.path, item.originalname]
        ]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def model_of(item):
    """Return the model that a test runs with, or None."""
    values = item.callspec.params.values() if hasattr(item, "callspec") else ()
    return next((each for each in values if isinstance(each, str) and each.startswith(MODELS)), None)


def drawn(cases, share, more=""):
    """Return a random share of some cases, at least one, in their order."""
    count = max(1, round(len(cases) * share))
    places = random.Random(SEED + more).sample(range(len(cases)), count)
    return [cases[index] for index in sorted(places)]


def found(path: Path) -> Path:
    """Return the path if it exists. Otherwise skip the test, or fail it if the material is required."""
    if not path.exists():
        message = f"{path} is missing: `make real` makes it"
        (pytest.fail if os.environ.get("OCTAVO_REQUIRE_REAL") == "1" else pytest.skip)(message)
    return path


@pytest.fixture(scope="session")
def real_model():
    """Return a function: name of a checkpoint, for example "smollm2" or "qwen3" -> its folder."""
    return lambda name: found(HOME / name / "model.safetensors").parent


@pytest.fixture(scope="session")
def real_gguf():
    """Return a function: "smollm2" or "gemma3" -> the model's GGUF file, as published."""
    names = {"smollm2": "SmolLM2-135M-Instruct.Q4_1.gguf", "gemma3": "gemma-3-270m-q4_k_m.gguf"}
    return lambda name: found(HOME / "gguf" / names[name])


@pytest.fixture(scope="session")
def real_tokenizer(real_model):
    """Return a function: name of a checkpoint -> its tokenizer, loaded once."""
    return functools.cache(lambda name: Tokenizer.from_directory(real_model(name)))


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
    """Return the share of cases that sweeps run, above 0 and at most 1."""
    return SCALE


@pytest.fixture(scope="session")
def sampled(real_scale):
    """Return a function: list of cases -> the share that this run takes, at least one, in their order."""
    draw = random.Random(SEED)

    def take(cases):
        count = max(1, round(len(cases) * real_scale))
        return [cases[index] for index in sorted(draw.sample(range(len(cases)), count))]

    return take
