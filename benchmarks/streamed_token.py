"""CPU time of the HTTP process for each streamed token; compares several versions of octavo in turns.

    python benchmarks/streamed_token.py                                     # this octavo: 1 stream, and 16 streams
    python benchmarks/streamed_token.py --python /old/.venv/bin/python      # compared with another one

Every round starts a new `octavo serve` with the built-in model for each Python in turn, and reads streams of chat
completions without parsing their events. Other work on the machine increases the CPU time, so the minimum over all
rounds is the best figure. The engine process and the client are not counted.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from routing import cpu_seconds
from serving import free_port, running

ALONE = {"OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", action="append", default=[], help="of an octavo to compare with")
    parser.add_argument("--streams", type=int, nargs="*", default=[1, 16], help="at once")
    parser.add_argument("--tokens", type=int, default=400, help="of a stream")
    parser.add_argument("--total", type=int, default=8000, help="tokens of a measurement, over all of its streams")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    pythons = [sys.executable, *options.python]
    spent: dict[tuple[str, int], list[float]] = {(each, n): [] for each in pythons for n in options.streams}
    for _ in range(options.rounds):
        for python in pythons:
            for num_streams, token_us in measure(python, options).items():
                spent[python, num_streams].append(token_us)
    for num_streams in options.streams:
        for name, choose in (("least", min), ("median", statistics.median)):
            own = choose(spent[sys.executable, num_streams])
            for python in pythons:
                token_us = choose(spent[python, num_streams])
                print(f"{num_streams:4} streams  {name:6}  {token_us:6.1f} us a token  {token_us / own:5.2f}  {python}")


def measure(python: str, options: argparse.Namespace) -> dict[int, float]:
    """Return the CPU time of a token in us by number of concurrent streams."""
    port = free_port()
    most = max(options.streams)
    command = [python, "-P", "-m", "octavo", "serve", "--port", str(port), "--num-threads", "1"]
    command += ["--log-level", "warning", "--max-num-seqs", str(most)]
    found = {}
    with running(command, ALONE, f"http://127.0.0.1:{port}/ready") as (process, _), ThreadPoolExecutor(most) as threads:
        ask = partial(read_stream, port, options.tokens)
        list(threads.map(ask, range(most)))  # warm-up
        for num_streams in options.streams:
            num_requests = max(options.total // options.tokens, num_streams)
            before = sum(cpu_seconds(process.pid))
            for start in range(0, num_requests, num_streams):
                list(threads.map(ask, range(start, start + num_streams)))
            count = -(-num_requests // num_streams) * num_streams * options.tokens
            found[num_streams] = (sum(cpu_seconds(process.pid)) - before) / count * 1e6
    return found


def read_stream(port: int, num_tokens: int, number: int) -> None:
    """Request a stream and read it to its end. Raises `RuntimeError` if it ends early."""
    body = json.dumps(
        {
            "messages": [{"role": "user", "content": f"Tell me story {number}."}],
            "stream": True,
            "max_tokens": num_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "num_speculative_tokens": 0,
        }
    ).encode()
    fields = {
        "Host": "127.0.0.1",
        "Connection": "close",
        "Content-Type": "application/json",
        "Content-Length": len(body),
    }
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.sendall(f"POST /v1/chat/completions HTTP/1.1\r\n{head}\r\n".encode() + body)
        data = bytearray()
        while piece := sock.recv(1 << 16):
            data += piece
    if b'"finish_reason":"length"' not in data:
        raise RuntimeError(f"a stream was not read to its end: {bytes(data[-500:])!r}")


if __name__ == "__main__":
    main()
