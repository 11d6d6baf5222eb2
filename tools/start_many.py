"""Start the server many times and compare what the starts compute: a fault in one start shows as a second hash.

    python tools/start_many.py --starts 200 --file starts.jsonl           # again with the same file: continues
    python tools/start_many.py --starts 2000 --load 4 -- --isa avx2       # after --: options of `octavo serve`

Each start answers one fixed prompt (--prompt-tokens random ids, greedy, with log probabilities). Its hash is over the
text, the log probabilities and the checksums of GET /server_info. --load runs processes meanwhile that only compute, so
that threads of the server are interrupted at other places in each start. A start that the server itself refuses, since
its fingerprint differs from that of the first one, counts as "refused".

--file: one line of JSON for each start; starts that it holds already are counted and not repeated. Prints one line for
each hash with the number of its starts; exits with 1 if there is more than one, and with 2 if there was no start.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

READY_S, ANSWER_S, END_S = 120.0, 120.0, 30.0
REFUSED = "refused"
_BURN = "while True: sum(range(10**6))"


def main() -> int:
    """Start the server --starts times; return the exit status."""
    asked = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the current server is ended, too
    counts = Counter(_known(asked.file))
    with tempfile.TemporaryDirectory(prefix="octavo-starts-") as folder, _load(asked.load):
        for number in range(counts.total(), asked.starts):
            started = time.monotonic()
            found = start_once(Path(folder), asked.options, fixed_prompt(asked.prompt_tokens))
            counts[found["hash"]] += 1
            with asked.file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(found) + "\n")
            is_new = counts[found["hash"]] == 1
            if is_new or (number + 1) % asked.tell_every == 0:
                seconds = time.monotonic() - started
                print(f"start {number + 1}: {found['hash']}, {len(counts)} hashes so far, {seconds:.1f} s", flush=True)
    for each, count in counts.most_common():
        print(f"{each} {count}")
    return 2 if not counts else int(len(counts) > 1)


def fixed_prompt(num_tokens: int) -> list[int]:
    """Return the ids of the prompt: the same in every process."""
    draw = random.Random(0)
    return [draw.randrange(100, 400) for _ in range(num_tokens)]


def start_once(folder: Path, options: list[str], prompt: list[int]) -> dict[str, Any]:
    """Start a server, ask it the prompt, end it; return its hash and fingerprint, or why there is none.

    folder: of the cache that all starts share, and of the log.
    """
    port, log = _free_port(), folder / "log.txt"
    command = [sys.executable, "-m", "octavo", "serve", "--port", str(port), *options]
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache")}
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=environment, start_new_session=True)
    address = f"http://127.0.0.1:{port}"
    try:
        if not _wait_until_ready(process, address):
            text = log.read_text(encoding="utf-8", errors="replace")
            is_refused = "computes other numbers" in text
            return {"hash": REFUSED if is_refused else "not ready", "log": text[-4000:]}
        body = {"model": _get(f"{address}/v1/models")["data"][0]["id"], "prompt": prompt, "temperature": 0}
        answer = _get(f"{address}/v1/completions", body | {"max_tokens": 16, "logprobs": 5, "ignore_eos": True})
        fingerprint = _get(f"{address}/server_info")["fingerprint"]
    except (OSError, ValueError, KeyError) as error:
        return {"hash": "no answer", "log": f"{type(error).__name__}: {error}"}
    finally:
        _end(process)
    choice = answer["choices"][0]
    sums = {name: value for name, value in fingerprint.items() if name != "num_threads"}
    told = json.dumps([choice["text"], choice["logprobs"], sums], sort_keys=True)
    return {"hash": hashlib.sha256(told.encode()).hexdigest()[:16], "fingerprint": fingerprint}


def _wait_until_ready(process: subprocess.Popen[bytes], address: str) -> bool:
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{address}/ready", timeout=5) as answer:
            if answer.status == 200:
                return True
        time.sleep(0.05)
    return False


def _get(address: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(address, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
        told: dict[str, Any] = json.load(answer)
    return told


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a server and all processes that it started, which are in its session."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait(END_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextlib.contextmanager
def _load(count: int) -> Iterator[None]:
    """Run `count` processes that only compute, during the context."""
    processes = [subprocess.Popen([sys.executable, "-c", _BURN]) for _ in range(count)]
    try:
        yield
    finally:
        for each in processes:
            each.kill()
            each.wait()


def _known(path: Path) -> list[str]:
    """Return the hashes of a file; an incomplete last line is ignored."""
    hashes = []
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError, KeyError):
                hashes.append(json.loads(line)["hash"])
    return hashes


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=100, help="in all, those of --file included")
    parser.add_argument("--file", type=Path, default=Path("build/starts.jsonl"))
    parser.add_argument("--load", type=int, default=0, help="processes that compute meanwhile")
    parser.add_argument("--prompt-tokens", type=int, default=1300)
    parser.add_argument("--tell-every", type=int, default=50)
    parser.add_argument("options", nargs="*", help="of `octavo serve`, after --")
    asked = parser.parse_args()
    asked.file.parent.mkdir(parents=True, exist_ok=True)
    return asked


if __name__ == "__main__":
    sys.exit(main())
