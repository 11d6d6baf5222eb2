"""Run a sweep of guidellm on a real server: `python tools/guidellm_sweep.py --seconds 10`.

guidellm (https://github.com/vllm-project/guidellm) measures a server from one request at a time up to its capacity. It
is installed in an environment of its own (`--environment`), which is created if necessary. It downloads nothing: its
prompts are generated, and its tokenizer is the built-in model's. Conditions of a sweep: every strategy completes
requests, and no request ends with an error; the server has no error, the same engine process as before, and no
unfinished request or used block. guidellm cuts off running requests when the time of a strategy is over: these are
counted separately and are not errors.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import venv
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

from figures_api import figures
from fuzz_api import statuses
from prometheus_client.parser import text_string_to_metric_families

from octavo.assets import built_in_model_path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "system"))
from serving_process import Served, serve

GUIDELLM = "0.8.1"  # options and reports differ between versions
ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
DATA = "kind=synthetic_text,prompt_tokens=64,output_tokens=16"
ENDINGS = "octavo:request_success_total"
LEFT = 499  # the client has disconnected: guidellm cut the request off


def main() -> int:
    """Sweep every route; return the exit status, 0 without faults."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--environment", type=Path, default=Path(__file__).parents[1] / "build" / "guidellm")
    parser.add_argument("--seconds", type=int, default=10, help="of each strategy")
    parser.add_argument("--strategies", type=int, default=5, help="one by one, all at once, and rates between these")
    parser.add_argument("--concurrency", type=int, default=512, help="most requests at once")
    parser.add_argument("--routes", nargs="+", choices=ROUTES, default=ROUTES)
    parser.epilog = "Other options are for the server: --max-num-waiting 8, say."
    arguments, options = parser.parse_known_args()
    command = guidellm(arguments.environment)
    with serve("--log-level", "warning", *options) as served:
        engine, answer, wrong = served.engine.pid, served.answer(), list[str]()
        for route in arguments.routes:
            try:
                report = sweep(arguments, command, served, route)
            except subprocess.SubprocessError as error:
                print(str(getattr(error, "stdout", ""))[-5000:], file=sys.stderr)
                wrong.append(f"{route}: {error}")
                continue
            print(f"{route}, guidellm {(found := report['metadata']['guidellm_version'])}")
            if found != GUIDELLM:
                wrong.append(f"{arguments.environment} has guidellm {found}, not {GUIDELLM}")
            for benchmark in report["benchmarks"]:
                print(f"  {line(benchmark)}", flush=True)
            wrong += [f"{route}: {what}" for what in faults(report, arguments.strategies)]
        wrong += left_over(served)
        if (served.engine.pid, served.answer()) != (engine, answer):
            wrong.append("another engine process, or another answer")
        answers = statuses(served)
        wrong += [f"{count} answers of {status}" for status, count in answers.items() if status not in {200, LEFT}]
        if count := ended_in_error(served):
            wrong.append(f"{count} requests ended in an error of the engine")
        wrong += [text.rstrip() for text in served.log if text.startswith(("ERROR", "CRITICAL", "Traceback"))]
    if wrong:
        print("".join(served.log)[-20_000:], file=sys.stderr)
    shown = f"answers by status: {dict(sorted(answers.items()))}"
    verdict = f"WRONG: {'; '.join(wrong)}" if wrong else "0 errors, 0 left over, the same engine process"
    print(f"{verdict}; {shown}")
    return int(bool(wrong))


def guidellm(environment: Path) -> str:
    """Return the path of guidellm's command; install guidellm if it is missing."""
    python, command = environment / "bin" / "python", environment / "bin" / "guidellm"
    if not command.exists():
        venv.create(environment, with_pip=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        torch = version("torch").partition("+")[0]  # octavo's version: another one may need gigabytes of CUDA
        for package in (f"torch=={torch}", f"guidellm=={GUIDELLM}"):
            subprocess.run([*pip, package], check=True)
    return str(command)


def sweep(arguments: argparse.Namespace, command: str, served: Served, route: str) -> dict[str, Any]:
    """Run guidellm once, and return its report."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            **os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": folder, "NO_PROXY": "127.0.0.1",
            "GUIDELLM__MAX_WORKER_PROCESSES": str(os.cpu_count()),
        }  # fmt: skip
        path = Path(folder) / "report.json"
        done = subprocess.run(
            [
                command, "run", "--backend", f"kind=openai_http,target={served.http.base_url},request_format={route}",
                "--profile", f"kind=sweep,sweep_size={arguments.strategies},max_concurrency={arguments.concurrency}",
                "--constraint", f"kind=max_duration,seconds={arguments.seconds}", "--data", DATA,
                "--tokenizer", f"kind=huggingface_auto,model={built_in_model_path()}",
                "--output", f"kind=json,path={path}", "--disable-console-interactive",
            ],
            cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
            timeout=60 + 10 * arguments.seconds * arguments.strategies,
        )  # fmt: skip
        done.check_returncode()
        report: dict[str, Any] = json.loads(path.read_text())
        return report


def line(benchmark: dict[str, Any]) -> str:
    """Return a line for one strategy: the number of requests by outcome, and the speed of completed ones."""
    strategy, metrics = benchmark["config"]["strategy"], benchmark["metrics"]
    name = strategy["type_"]
    name += f" {strategy['rate']:.1f}/s" if "rate" in strategy else ""
    completed, errored, cut_off = (len(benchmark["requests"][kind]) for kind in ("successful", "errored", "incomplete"))
    counts = f"{name}: {completed} completed, {errored} errored, {cut_off} cut off"
    if not completed:
        return counts
    first, between, tokens = (
        metrics[metric]["successful"]
        for metric in ("time_to_first_token_ms", "inter_token_latency_ms", "output_token_count")
    )
    return (
        f"{counts}; TTFT p50 {first['median']:.0f} ms, p95 {first['percentiles']['p95']:.0f} ms; "
        f"ITL mean {between['mean']:.1f} ms; {tokens['total_sum'] / benchmark['duration']:.0f} tokens/s"
    )


def faults(report: dict[str, Any], strategies: int) -> list[str]:
    """Return the faults of a sweep according to guidellm's report."""
    found, benchmarks = Counter[str](), report["benchmarks"]
    for benchmark in benchmarks:
        name, state = benchmark["config"]["strategy"]["type_"], benchmark["scheduler_state"]
        errors = [str(request["info"]["error"]) for request in benchmark["requests"]["errored"]]
        errors += ["an error without a record"] * (state["errored_requests"] - len(errors))
        found.update(f"{name}: {error.partition(chr(92) + 'n')[0]}" for error in errors)
        if not benchmark["requests"]["successful"]:
            found[f"{name}: nothing completed"] += 1
        elif benchmark["metrics"]["output_token_count"]["successful"]["min"] < 1:
            found[f"{name}: an answer without a token"] += 1
    wrong = [f"{count} times {error}" for error, count in found.items()]
    if len(benchmarks) != strategies:
        wrong.append(f"{len(benchmarks)} strategies of {strategies}")
    return wrong


def left_over(served: Served) -> list[str]:
    """Return the requests and blocks that the server still holds ten seconds after the last client disconnected."""
    names, end = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"), time.monotonic() + 10
    while any(held := {name: figures(served)[f"octavo:{name}"] for name in names}.values()):
        if time.monotonic() > end:
            return [f"left over: {held}"]
        time.sleep(0.1)
    return []


def ended_in_error(served: Served) -> int:
    """Return the number of requests that ended with an error, from the engine's counters."""
    families = text_string_to_metric_families(served.http.get("/metrics").text)
    samples = [sample for family in families for sample in family.samples]
    reasons = {sample.labels["finished_reason"]: sample.value for sample in samples if sample.name == ENDINGS}
    return int(reasons["error"])


if __name__ == "__main__":
    sys.exit(main())
