"""Send generated requests to a real server: `python tools/fuzz_api.py --cases 10000`.

schemathesis (https://schemathesis.readthedocs.io, `pip install schemathesis`, in this environment or in one that
`--schemathesis` points into) generates valid and invalid requests from /openapi.json. The run fails on an answer of
5xx, or if the engine process is not the same afterwards or answers differently.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "system"))
from serving_process import Served, serve

PROMPT = {"prompt": "Once upon a time", "max_tokens": 12, "temperature": 0}
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
LENGTH = 128  # of the longest sequence, so that answers without a limit end soon


def main() -> int:
    """Run all cases; return the exit status, 0 if no fault was found."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", type=int, default=1000, help="so many requests at least")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--schemathesis", default=shutil.which("schemathesis"), help="its command")
    arguments = parser.parse_args()
    if arguments.schemathesis is None:
        parser.error("schemathesis was not found: pip install schemathesis")
    with serve("--max-model-len", str(LENGTH), "--log-level", "warning") as served:
        engine, answer = served.engine.pid, text_of(served)
        rounds, failed = 0, False
        while sum(statuses(served).values()) < arguments.cases:
            failed = fuzz(arguments, served, arguments.seed + rounds) or failed
            rounds += 1
        is_same = served.engine.pid == engine and text_of(served) == answer
        answers = statuses(served)
    server_errors = sum(count for status, count in answers.items() if status >= 500)
    if server_errors:
        print("".join(served.log)[-20_000:], file=sys.stderr)
    print(f"requests: {sum(answers.values())} in {rounds} rounds; answers by status: {dict(sorted(answers.items()))}")
    print(f"answers of 5xx: {server_errors}; the same engine process, and the same answers: {is_same}")
    return int(failed or server_errors > 0 or not is_same)


def fuzz(arguments: argparse.Namespace, served: Served, seed: int) -> bool:
    """Run schemathesis once; return True if it found a fault."""
    command = [
        arguments.schemathesis, "run", f"{served.http.base_url}/openapi.json", "--checks", CHECKS, "--mode", "all",
        "--phases", "coverage,fuzzing", "--max-examples", "100", "--seed", str(seed), "--no-shrink",
        "--continue-on-failure", "--workers", str(arguments.workers), "--suppress-health-check", "all",
        "--request-timeout", "60",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stdout[-20_000:], done.stderr[-2000:], file=sys.stderr)
    return done.returncode != 0


def statuses(served: Served) -> Counter[int]:
    """Return the number of answers by status, from the server's own counters."""
    found: Counter[int] = Counter()
    for family in text_string_to_metric_families(served.http.get("/metrics").text):
        for sample in family.samples:
            if sample.name == "http_requests_total":
                found[int(sample.labels["status"])] += int(sample.value)
    return found


def text_of(served: Served) -> str:
    """Return the server's answer to a fixed prompt."""
    return str(served.http.post("/v1/completions", json=PROMPT).json()["choices"][0]["text"])


if __name__ == "__main__":
    sys.exit(main())
