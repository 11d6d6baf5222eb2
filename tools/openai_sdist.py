"""Run the tests in openai-python's sdist against a real server: `python tools/openai_sdist.py`.

The tests are those of the resources that the server has (`FILES`), unchanged and complete. They were written for a mock
of OpenAI's API that answers everything: each sends invented values, some tests all parameters together, and checks the
type of the answer. Here the real server answers with the built-in model and the API key of the tests. The model has all
model names that occur in the tests (`--served-model-name`).

The sdist, and an environment for the client and the requirements of its tests (`REQUIREMENTS`), are kept in a folder
(`--folder`). Prints passed and failed tests per file, and failures grouped by the server's answer, with its reason in
`REASONS`. If a test sends several invalid parameters, the server reports only the first one. So the body is sent again
without it, until all refused parameters are known. The run fails if a failure has no reason, on an answer of 5xx, or if
the engine process is not the same afterwards or answers differently.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import venv
from collections import Counter, defaultdict
from fnmatch import fnmatchcase
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fuzz_api import statuses

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "system"))
from serving_process import Served, serve

REQUIREMENTS = ("pytest==9.2.0", "pytest-asyncio==1.4.1", "rich==14.3.3")  # in addition to openai[aiohttp]
FILES = (
    "chat/test_completions.py",
    "chat/completions/test_messages.py",
    "test_completions.py",
    "test_embeddings.py",
    "test_models.py",
    "test_responses.py",
    "responses/test_input_items.py",
    "responses/test_input_tokens.py",
)
KEY = "My API Key"  # as in the conftest.py of the tests
_STORED = "nothing is stored: there are no"
_ALL = "every parameter at once"
REASONS = {  # by answer in the form of `answer_of`; for openai-python 3.54.0: other versions may need other entries
    "40[45] to * /v1/chat/completions*": f"{_STORED} chat completions to list, read, change or delete",
    "400 functions to POST /v1/chat/completions": _ALL,
    "400 suffix to POST /v1/completions": _ALL,
    "200 data.0.embedding to POST /v1/embeddings": (
        "the client asks for base64 of its own accord, and a strict one compares that with a type that has numbers only"
    ),
    "405 to DELETE /v1/models/*": "models are not deleted by requests",
    "400 input to POST /v1/responses": "the test sends no input",
    "400 access_programs to POST /v1/responses": _ALL,
    "404 to * /v1/responses/resp*": f"{_STORED} responses to read, cancel or delete",
    "404 to POST /v1/responses/compact": "conversations are not compacted",
    "400 input to POST /v1/responses/input_tokens": "the test sends no input",
    "400 conversation to POST /v1/responses/input_tokens": _ALL,
}


def main() -> int:
    """Run all files; return the exit status, 0 without faults."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--version", default=version("openai"), help="of openai-python (default: the installed one)")
    parser.add_argument("--folder", type=Path, default=Path(__file__).parents[1] / "build" / "openai-sdist")
    parser.add_argument("--tests", action="store_true", help="name the tests of each group of failures")
    arguments = parser.parse_args()
    folder = arguments.folder.absolute() / arguments.version
    python, source = environment(folder, arguments.version), sdist(folder, arguments.version)
    names = names_of_models(source)
    print(f"openai-python {arguments.version}; one model, served under the names {', '.join(names)}")
    options = [word for name in names for word in ("--served-model-name", name)]
    with serve("--log-level", "warning", *options, key=KEY, OCTAVO_API_KEY=KEY) as served:
        engine, answer = served.engine.pid, served.answer()
        tests = run(python, source, served)
        refused = refusals(served, tests)
        is_same = served.engine.pid == engine and served.answer() == answer
        answers = statuses(served)
    wrong = report(tests, refused, arguments.tests)
    wrong += [f"{count} answers of {status}" for status, count in answers.items() if status >= 500]
    if not is_same:
        wrong.append("another engine process, or another answer")
    if wrong:
        print("".join(served.log)[-20_000:], file=sys.stderr)
    print(f"answers by status: {dict(sorted(answers.items()))}")
    print(f"WRONG: {'; '.join(wrong)}" if wrong else "a reason for every failure, the same engine process")
    return int(bool(wrong))


def environment(folder: Path, wanted: str) -> Path:
    """Return the Python of an environment with the client and its test requirements; create it if it is missing."""
    python = folder / "environment" / "bin" / "python"
    if not python.exists():
        venv.create(folder / "environment", with_pip=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, f"openai[aiohttp]=={wanted}", *REQUIREMENTS], check=True)
    return python


def sdist(folder: Path, wanted: str) -> Path:
    """Return the folder of the sdist, which pip downloads if it is missing."""
    source = folder / f"openai-{wanted}"
    if not source.exists():
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
        with tempfile.TemporaryDirectory(dir=folder) as place:
            subprocess.run([*pip, "--dest", place, f"openai=={wanted}"], check=True)
            (archive,) = Path(place).iterdir()
            with tarfile.open(archive) as tar:
                tar.extractall(place, filter="data")
            (Path(place) / source.name).rename(source)
    return source


def names_of_models(source: Path) -> list[str]:
    """Return the names that the tests pass as `model`, and those that they retrieve."""
    found: set[str] = set()
    for file in FILES:
        for node in ast.walk(ast.parse((source / "tests" / "api_resources" / file).read_text())):
            if isinstance(node, ast.Call):
                values = [word.value for word in node.keywords if word.arg == "model"]
                if file == "test_models.py" and isinstance(node.func, ast.Attribute) and node.func.attr == "retrieve":
                    values += node.args
                found |= {str(value.value) for value in values if isinstance(value, ast.Constant)}
    return sorted(found - {""})


def run(python: Path, source: Path, served: Served) -> list[dict[str, Any]]:
    """Run the files, and return the plugin's entry for each test."""
    variables = {
        **os.environ, "TEST_API_BASE_URL": f"{served.http.base_url}/v1", "NO_PROXY": "127.0.0.1",
        "PYTHONPATH": str(Path(__file__).parent), "PYTHONDONTWRITEBYTECODE": "1",
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as place:
        answers = Path(place) / "answers"
        command = [
            str(python), "-m", "pytest", "-p", "answers_plugin", "--answers", str(answers), "-p", "no:cacheprovider",
            "--override-ini", "addopts=", "--quiet", "--tb=short", *(f"tests/api_resources/{file}" for file in FILES),
        ]  # fmt: skip
        done = subprocess.run(command, cwd=source, env=variables, capture_output=True, text=True, check=False)
        if done.returncode not in {0, 1}:  # pytest could not run the tests
            print(done.stdout[-20_000:], done.stderr[-2000:], file=sys.stderr)
            done.check_returncode()
        return [json.loads(line) for line in answers.read_text().splitlines()]


def refusals(served: Served, tests: list[dict[str, Any]]) -> dict[str, list[str]]:
    """Return all refused parameters of the request bodies that were answered with status 400, by answer."""
    bodies = defaultdict(set)
    for failure in (test["failure"] for test in tests if test["failure"] is not None):
        if failure["status"] == 400 and failure["request"].startswith("POST "):
            bodies[answer_of(failure)].add((failure["request"].removeprefix("POST "), failure["body"]))
    refused: dict[str, list[str]] = defaultdict(list)
    for answer, requests in bodies.items():
        for path, text in sorted(requests):
            body = json.loads(text)
            while (response := served.http.post(path, json=body)).status_code == 400:
                parameter = str(response.json()["error"]["param"])
                if parameter not in refused[answer]:
                    refused[answer].append(parameter)
                if body.pop(re.split(r"[.\[]", parameter)[0], None) is None:
                    break  # it is refused because it is missing
    return refused


def report(tests: list[dict[str, Any]], refused: dict[str, list[str]], is_long: bool) -> list[str]:
    """Print passed and failed tests, and return the faults of the table of reasons."""
    wrong, needed = [], set()
    for file in FILES:
        of_file = [test for test in tests if test["file"] == f"tests/api_resources/{file}"]
        print(f"{file}: {summary(of_file)}")
        groups = defaultdict(list)
        for test in of_file:
            if test["failure"] is not None:
                groups[answer_of(test["failure"])].append(test)
        for answer, failed in sorted(groups.items(), key=lambda group: -len(group[1])):
            pattern = next((pattern for pattern in REASONS if fnmatchcase(answer, pattern)), None)
            needed.add(pattern)
            print(f"  {len(failed)}: {answer}: {REASONS.get(pattern or '') or failed[0]['failure']['text']}")
            if answer in refused:
                print(f"     refused one by one: {', '.join(refused[answer])}")
            if is_long:
                print(f"     {' '.join(test['test'] for test in failed)}")
            if pattern is None:
                wrong.append(f"{file}: {len(failed)} failures without a reason: {answer}")
    print(f"together: {summary(tests)}")
    return wrong + [f"a reason without a failure: {pattern}" for pattern in REASONS.keys() - needed]


def summary(tests: list[dict[str, Any]]) -> str:
    """Return a text with the numbers of passed and failed tests, and of those that passed without an answer."""
    outcomes = Counter(test["outcome"] for test in tests)
    local = sum(test["outcome"] == "passed" and not test["answered"] for test in tests)
    others = [f"{count} {outcome}" for outcome, count in sorted(outcomes.items()) if outcome != "passed"]
    return ", ".join([f"{outcomes['passed'] - local} passed, {local} passed without a request", *others])


def answer_of(failure: dict[str, Any]) -> str:
    """Return the server's answer in one line: status, error code and parameter; or the test's own error."""
    if failure["status"] is None:
        return str(failure["text"])
    error = " ".join(str(failure[part]) for part in ("code", "param") if failure[part])
    return f"{failure['status']} {error + ' ' if error else ''}to {failure['request']}"


if __name__ == "__main__":
    sys.exit(main())
