"""`octavo serve --tensor-parallel-size 2` under load, with a rank that is killed or suspended."""

from __future__ import annotations

import re
import signal
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

import httpx
import psutil
import pytest
from serving_process import Served, serve

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.slow
OPTIONS = ("--max-num-seqs", "8", "--num-gpu-blocks-override", "400", "--log-level", "warning", "--num-threads", "2")
NUM_CLIENTS = 12
TERMINAL_S = 10.0
FAULTS = [(rank, how) for how in (signal.SIGKILL, signal.SIGSTOP) for rank in (0, 1)]


def body_of(client: int) -> dict[str, object]:
    return {"prompt": f"Story {client}. Once upon a time", "max_tokens": 48, "temperature": 0.8, "seed": client,
            "ignore_eos": True}  # fmt: skip


@dataclass
class Clients:
    """Clients that ask the same questions again and again, and compare the answers."""

    server: Served
    expected: list[str]
    began: dict[int, float] = field(default_factory=dict)
    num_answers: int = 0
    num_errors: int = 0
    wrong: list[str] = field(default_factory=list)
    slowest_s: float = 0.0
    _is_over: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Self:
        self._threads = [threading.Thread(target=self._ask, args=[number]) for number in range(NUM_CLIENTS)]
        for each in self._threads:
            each.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for each in self._threads:
            each.join()

    def _ask(self, number: int) -> None:
        while not self._is_over.is_set():
            self.began[number] = time.monotonic()
            try:
                answer = self.server.http.post("/v1/completions", json=body_of(number))
            except httpx.TransportError as error:
                self.wrong.append(f"no answer: {error}")
                return
            finally:
                del self.began[number]
            if answer.status_code == 200 and answer.json()["choices"][0]["finish_reason"] == "length":
                self.num_answers += 1
                if (text := answer.json()["choices"][0]["text"]) != self.expected[number]:
                    self.wrong.append(f"client {number}: {text}")
            else:
                self.num_errors += 1
                time.sleep(0.1)

    def oldest(self) -> float:
        """Return when the oldest open request began."""
        return min(list(self.began.values()), default=time.monotonic())


@pytest.fixture(scope="module")
def expected() -> list[str]:
    with serve(*OPTIONS) as alone:
        return [
            alone.http.post("/v1/completions", json=body_of(number)).json()["choices"][0]["text"]
            for number in range(NUM_CLIENTS)
        ]


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serve(*OPTIONS, "--tensor-parallel-size", "2") as server:
        yield server


def ranks_of(server: Served) -> list[psutil.Process]:
    """Return the processes of ranks 0 and 1."""
    family = psutil.Process(server.process.pid).children(recursive=True)
    names = ("octavo.startup.engine_main", "octavo.ranks.main")
    return [next(each for each in family if name in each.cmdline()) for name in names]


@pytest.mark.parametrize("repetition", range(5))
@pytest.mark.parametrize(("rank", "how"), FAULTS)
def test_lost_rank_ends_requests_and_all_ranks_start_again(server, expected, rank, how, repetition):
    with Clients(server, expected) as clients:
        server.wait_for(lambda: clients.num_answers >= NUM_CLIENTS)
        ranks, num_answers = ranks_of(server), clients.num_answers
        num_failures = sum(map(int, re.findall(r"rank_failures_total\{.*\} (\d+)", server.http.get("/metrics").text)))
        ranks[rank].send_signal(how)
        fault = time.monotonic()
        server.wait_for(lambda: clients.oldest() > fault)  # every request that was open has ended
        terminal_s = time.monotonic() - fault
        server.wait_for(lambda: not server.is_ready() or all(not each.is_running() for each in ranks))
        server.wait_for(lambda: clients.num_answers > num_answers + NUM_CLIENTS)
        failures = re.findall(r'rank_failures_total\{.*rank="(\d+)"\} (\d+)', server.http.get("/metrics").text)
        assert rank == 0 or int(dict(failures)["1"]) > num_failures
    assert clients.wrong == []
    assert clients.num_errors > 0
    assert psutil.wait_procs(ranks, timeout=10)[1] == [], "no orphan is left"
    assert terminal_s < TERMINAL_S, f"rank {rank} {how.name} {repetition}: terminal after {terminal_s:.1f} s"
