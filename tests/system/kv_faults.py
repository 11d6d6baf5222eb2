# ruff: noqa: T201
"""Report what happens to requests if a process fails: `python tests/system/kv_faults.py engine --times 20`.

A case has real processes on the built-in model under a steady load. One of them is repeatedly killed, frozen (SIGSTOP)
or restarted (SIGTERM). The right answers, with log probabilities, come from one engine without any store.

For each case and fault a line reports:

- the number of requests, and how they ended
- the longest time from the fault (or from the request's own beginning, if later) to a request's end
- wrong tokens, and anything sent twice
- the time until everything works as before
- processes that remained

The exit status is 1 if a case does not keep its promise.

- donor: an engine that lends memory to a Mooncake pool. Another engine reads everything from it, even if computing is
  cheaper (always_load).
- master: the pool's master.
- engine: a server of a router, with all its processes. stuck: one that is never resumed.
- core: the server's engine process only.
- router: `octavo route` with two servers.
- replicas: the process of `octavo serve --replicas 2`.
- prefill, decode: an engine of a pair with a router.

A router has no second router in front of it. If it dies, its clients see a closed connection. If it is frozen, it is
resumed after less than the 10 s. On a busy machine requests take long without a fault, so a line also reports how long
they take before the fault.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import re
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from known_answers import Load, Outcome, right_answers
from programs import Stage, free_port, is_gone, octavo
from raw_http import Connection

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    import psutil

TERMINAL_S = 10.0
RECOVERED_S = STARTED_S = 300.0  # starting processes takes long on a busy machine
ORPHAN_S = 10.0
CALM_S = 3.0
FIGURES_S = 1.0  # an engine's figures may be this old
FAMILY = 5  # a router, two servers, their engine processes
ROUNDS_EACH = 10  # then everything is restarted, because the pauses between restarts grow
KILL, FREEZE, RESTART = "kill", "freeze", "restart"
SMALL = ("--max-num-seqs", "8", "--num-gpu-blocks-override", "120", "--log-level", "warning")
SERVER = ("serve", "--shutdown-timeout", "0", *SMALL)
ROUTER = ("route", "--shutdown-timeout", "0")


async def get(port: int, path: str) -> bytes | None:
    """Return the body of an answer with status 200, otherwise None."""
    try:
        async with asyncio.timeout(3), Connection(("127.0.0.1", port)) as connection:
            answer = await connection.ask(path, method="GET")
    except (OSError, TimeoutError, asyncio.IncompleteReadError, ValueError, IndexError):
        return None
    return answer.body if answer.status == 200 else None


async def until(condition: Callable[[], Awaitable[bool]], seconds: float, what: str) -> float:
    """Wait for a condition. Return the time that it took in s. Raises `TimeoutError` after `seconds`."""
    start = time.monotonic()
    while not await condition():
        if time.monotonic() - start > seconds:
            raise TimeoutError(f"{what}: not within {seconds:g} s")
        await asyncio.sleep(0.1)
    return time.monotonic() - start


class Case:
    """Programs, one of which fails. ports: addresses of the load. may_see: allowed kinds of outcomes."""

    troubles: ClassVar[tuple[str, ...]] = (KILL, FREEZE, RESTART)
    may_see: ClassVar[frozenset[str]] = frozenset({"whole"})
    frozen_s: ClassVar[float] = 12.0
    is_thawed: ClassVar[bool] = True
    num_clients: ClassVar[int] = 3  # at each port
    is_salted: ClassVar[bool] = False
    ports: Sequence[int]

    def victims(self) -> list[psutil.Process]:
        """Return the processes that fail; the one to be killed is the first."""
        raise NotImplementedError

    def start_again(self) -> None:
        """Restart ended programs, as their supervisor would."""

    async def is_whole(self) -> bool:
        """Return True if everything works as at the beginning."""
        raise NotImplementedError

    def note(self) -> str:
        """Return evidence that the fault was the intended one."""
        return ""


class LoadedBlocks:
    """The number of blocks that an engine loaded from a store, and whether it loads more again."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.count = self._num_before = 0
        self._look_again_at: float | None = None

    async def grows(self) -> bool:
        """Return True if the number has grown since the first call after the last True."""
        text = (await get(self._port, "/metrics") or b"").decode()
        found = re.findall(r"^octavo:kv_tier_loaded_blocks_total{[^}]*} (\S+)$", text, re.MULTILINE)
        if text and not found:
            raise RuntimeError("/metrics does not tell how many blocks came from a tier")
        self.count = int(sum(map(float, found)))
        now = time.monotonic()
        if self._look_again_at is None:
            self._look_again_at = now + FIGURES_S
        if now < self._look_again_at:  # before this time the figures may be old
            self._num_before = self.count
        has_grown = self.count > self._num_before
        if has_grown:
            self._look_again_at = None
        return has_grown

    def __str__(self) -> str:
        return f"{self.count} blocks loaded"


class PoolCase(Case):
    """A donor with all the memory of a pool, and an engine that reads."""

    def __init__(self, stage: Stage) -> None:
        package = importlib.util.find_spec("mooncake")
        if package is None or package.origin is None:
            raise RuntimeError("there is no Mooncake: install octavo[mooncake]")
        self.address = f"127.0.0.1:{free_port()}"
        self.metrics_port = free_port()
        self.master = stage.run(
            str(Path(package.origin).parent / "mooncake_master"),
            f"--rpc_port={self.address.rpartition(':')[2]}",
            "--rpc_address=127.0.0.1",
            f"--metrics_port={self.metrics_port}",
        )
        self.donor_port, self.reader_port = free_port(), free_port()
        pool = ("--kv-mooncake", self.address, "--kv-mooncake-segment-bytes")
        self.donor = stage.run(*octavo(*SERVER, "--port", str(self.donor_port), *pool, "64M"))
        reader = octavo(*SERVER, "--port", str(self.reader_port), *pool, "0")
        self.reader = stage.run(*reader, PYTHONPATH=str(Path(__file__).with_name("always_load")))
        self.loaded = LoadedBlocks(self.reader_port)

    async def is_whole(self) -> bool:
        """Return True if the donor serves, and the reader loads blocks from the pool again."""
        return await get(self.donor_port, "/ready") is not None and await self.loaded.grows()

    def note(self) -> str:
        return str(self.loaded)


class DonorCase(PoolCase):
    def __init__(self, stage: Stage) -> None:
        super().__init__(stage)
        self.ports = [self.reader_port]

    def victims(self) -> list[psutil.Process]:
        return self.donor.family()

    def start_again(self) -> None:
        self.donor.start()


class MasterCase(PoolCase):
    def __init__(self, stage: Stage) -> None:
        super().__init__(stage)
        self.ports = [self.reader_port, self.donor_port]

    def victims(self) -> list[psutil.Process]:
        return self.master.family()

    def start_again(self) -> None:
        self.master.start()


async def are_ready(port: int, count: int) -> bool:
    """Return True if a router has `count` ready engines, and each of them reports itself as ready."""
    told = await get(port, "/router/engines")
    engines = json.loads(told)["engines"] if told is not None else []
    ready = [int(engine["url"].rpartition(":")[2]) for engine in engines if engine["ready"]]
    return len(ready) == count and await all_answer(ready)


class ReplicasCase(Case):
    """The parent process of two servers, which is the router."""

    may_see = frozenset({"whole", "error", "refused", "cut", "unreachable"})
    frozen_s = 4.0

    def __init__(self, stage: Stage) -> None:
        self.port = free_port()
        self.ports = [self.port]
        self.program = stage.run(*octavo(*SERVER, "--replicas", "2", "--port", str(self.port)))

    def victims(self) -> list[psutil.Process]:
        first, *others = self.program.family()
        return [first, *others]

    def start_again(self) -> None:
        self.program.start()

    async def is_whole(self) -> bool:
        return await are_ready(self.port, 2)


class EngineCase(ReplicasCase):
    """One of these servers, with its engine process."""

    may_see = frozenset({"whole", "error"})
    frozen_s = 12.0

    def __init__(self, stage: Stage) -> None:
        super().__init__(stage)
        self.num_rounds = 0

    def victims(self) -> list[psutil.Process]:
        self.num_rounds += 1
        servers = self.program.family()[0].children()
        server = servers[self.num_rounds % len(servers)]
        return [server, *server.children(recursive=True)]

    def start_again(self) -> None:
        """Do nothing: the parent restarts it."""

    async def is_whole(self) -> bool:
        """Return True if each server runs with an engine process, and is ready."""
        return len(self.program.family()) == FAMILY and await super().is_whole()


class StuckCase(EngineCase):
    """One of these servers, frozen forever: its parent has to replace it."""

    troubles = (FREEZE,)
    is_thawed = False


class CoreCase(EngineCase):
    """The engine process of one of these servers."""

    troubles = (KILL, FREEZE)

    def victims(self) -> list[psutil.Process]:
        return super().victims()[1:]


class RouterCase(Case):
    """A router with two servers that are started separately."""

    may_see = ReplicasCase.may_see
    frozen_s = ReplicasCase.frozen_s

    def __init__(self, stage: Stage) -> None:
        servers = [free_port(), free_port()]
        for port in servers:
            stage.run(*octavo(*SERVER, "--port", str(port)))
        self.port = free_port()
        self.ports = [self.port]
        named = (word for port in servers for word in ("--engine", f"http://127.0.0.1:{port}"))
        self.program = stage.run(*octavo(*ROUTER, "--port", str(self.port), *named))

    def victims(self) -> list[psutil.Process]:
        return self.program.family()

    def start_again(self) -> None:
        self.program.start()

    async def is_whole(self) -> bool:
        return await are_ready(self.port, 2)


class PairCase(Case):
    """A router with a prefill and a decode engine. No prompt is in a cache before its request."""

    is_salted = True

    def __init__(self, stage: Stage) -> None:
        ports = [free_port(), free_port()]
        self.prefill, self.decode = (
            stage.run(*octavo(*SERVER, "--port", str(port), "--role", role, "--kv-direct"))
            for port, role in zip(ports, ("prefill", "decode"), strict=True)
        )
        self.port = free_port()
        self.ports = [self.port]
        named = (word for port in ports for word in ("--engine", f"http://127.0.0.1:{port}"))
        stage.run(*octavo(*ROUTER, "--port", str(self.port), "--min-prefill-tokens", "64", *named))
        self.loaded = LoadedBlocks(ports[1])

    async def is_whole(self) -> bool:
        """Return True if both are ready, and the decode engine loads blocks from the prefill engine again."""
        return await are_ready(self.port, 2) and await self.loaded.grows()

    def note(self) -> str:
        return str(self.loaded)


class PrefillCase(PairCase):
    def victims(self) -> list[psutil.Process]:
        return self.prefill.family()

    def start_again(self) -> None:
        self.prefill.start()


class DecodeCase(PairCase):
    may_see = EngineCase.may_see

    def victims(self) -> list[psutil.Process]:
        return self.decode.family()

    def start_again(self) -> None:
        self.decode.start()


CASES: dict[str, type[Case]] = {
    "donor": DonorCase,
    "master": MasterCase,
    "engine": EngineCase,
    "stuck": StuckCase,
    "core": CoreCase,
    "router": RouterCase,
    "replicas": ReplicasCase,
    "prefill": PrefillCase,
    "decode": DecodeCase,
}


@dataclass(slots=True)
class Verdict:
    """Observations of a case and a fault over all rounds. broken: violations of its promise."""

    num_rounds: int = 0
    note: str = ""  # of the last round
    kinds: Counter[str] = field(default_factory=Counter)
    num_troubled: int = 0  # requests that were open when the fault came
    longest_s: float = 0.0
    calm_s: float = 0.0  # the longest time of a request before a fault
    num_wrong: int = 0
    num_double: int = 0
    recovered_s: list[float] = field(default_factory=list)
    orphans: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)

    def take(self, outcomes: list[Outcome], start: float, may_see: frozenset[str]) -> None:
        """Add the outcomes of the requests that ended since a fault began."""
        self.num_rounds += 1
        for outcome in outcomes:
            self.kinds[outcome.kind] += 1
            self.num_troubled += outcome.begun < start
            took = outcome.ended - max(outcome.begun, start)
            self.longest_s = max(self.longest_s, took)
            self.num_wrong += outcome.is_wrong
            self.num_double += outcome.is_double
            if took > TERMINAL_S:
                self.broken.append(f"round {self.num_rounds}: {outcome.kind} after {took:.1f} s")
            if outcome.is_wrong or outcome.is_double or outcome.kind not in may_see:
                what = "wrong" if outcome.is_wrong else "double" if outcome.is_double else outcome.kind
                self.broken.append(f"round {self.num_rounds}: {what}: {outcome.words}")

    def line(self, name: str, trouble: str) -> str:
        kinds = ", ".join(f"{kind} {count}" for kind, count in self.kinds.most_common())
        back = sorted(self.recovered_s) or [0.0]
        cells = (
            name,
            trouble,
            self.num_rounds,
            f"{sum(self.kinds.values())} ({kinds}); {self.num_troubled} under way{self.note and '; ' + self.note}",
            f"{self.longest_s:.1f} ({self.calm_s:.1f})",
            self.num_wrong,
            self.num_double,
            f"{back[len(back) // 2]:.1f}, at most {back[-1]:.1f}",
            len(self.orphans),
            "no" if self.broken else "yes",
        )
        return f"| {' | '.join(map(str, cells))} |"


async def make_trouble(case: Case, trouble: str, verdict: Verdict) -> float:
    """Cause the fault and wait for its end. Return the time at which the recovery began.

    After a kill, the process and its children have ended. Children that remain are noted as orphans.
    """
    victims = case.victims()
    if trouble == FREEZE:
        for process in victims:
            process.suspend()
        await asyncio.sleep(case.frozen_s)
        for process in victims:
            if case.is_thawed and not is_gone(process):
                process.resume()
        return time.monotonic()
    start = time.monotonic()
    victims[0].kill() if trouble == KILL else victims[0].terminate()

    async def are_gone() -> bool:
        return is_gone(victims[0])

    await until(are_gone, TERMINAL_S + 10, "the end of what was killed")
    case.start_again()

    async def all_are_gone() -> bool:
        return all(map(is_gone, victims))

    try:
        await until(all_are_gone, ORPHAN_S, "the end of its children")
    except TimeoutError:
        verdict.orphans += [" ".join(each.cmdline())[:200] for each in victims if not is_gone(each)]
    return start


async def one_round(case: Case, load: Load, trouble: str, verdict: Verdict) -> None:
    """Cause the fault once, and wait until everything works as before."""
    calm = time.monotonic()
    await asyncio.sleep(CALM_S)
    start = time.monotonic()
    verdict.calm_s = max(verdict.calm_s, *(each.ended - each.begun for each in load.since(calm)), 0.0)
    back = await make_trouble(case, trouble, verdict)
    await until(case.is_whole, RECOVERED_S, "all is as before")
    begun = time.monotonic()
    verdict.note = case.note()

    async def has_served() -> bool:
        whole = {outcome.port for outcome in load.outcomes if outcome.kind == "whole" and outcome.begun >= begun}
        return whole == set(load.ports) and not any(each < begun for each in load.open.values())

    verdict.recovered_s.append(begun - back)
    await until(has_served, RECOVERED_S, "answers as before")
    verdict.take(load.since(start), start, case.may_see)


async def run_some(
    name: str, trouble: str, num_rounds: int, right: list[list[tuple[str, float]]], verdict: Verdict
) -> None:
    """Start a case, and run some rounds."""
    with Stage() as stage:
        case = CASES[name](stage)
        load = Load(case.ports, right, case.num_clients, is_salted=case.is_salted)
        try:
            await until(lambda: all_answer(case.ports), STARTED_S, "the start")
            load.start()
            await until(case.is_whole, STARTED_S, "the beginning")
            for _ in range(num_rounds):
                await one_round(case, load, trouble, verdict)
                if verdict.broken:
                    break
        except TimeoutError as error:
            verdict.broken.append(str(error))
        finally:
            await load.stop()
        for program in stage.programs if verdict.broken else ():
            print(program.log[-4000:], file=sys.stderr)
    verdict.orphans += stage.orphans


async def all_answer(ports: Sequence[int]) -> bool:
    return all([await get(port, "/ready") is not None for port in ports])


async def run(
    name: str, trouble: str, num_rounds: int, right: list[list[tuple[str, float]]], verdict: Verdict
) -> Verdict:
    """Run all rounds of a case and a fault, while the case keeps its promise."""
    for begun in range(0, num_rounds, ROUNDS_EACH):
        await run_some(name, trouble, min(ROUNDS_EACH, num_rounds - begun), right, verdict)
        if verdict.broken:
            break
    verdict.broken += [f"left over: {each}" for each in verdict.orphans]
    return verdict


async def answers_of_one_engine() -> list[list[tuple[str, float]]]:
    with Stage() as stage:
        port = free_port()
        stage.run(*octavo(*SERVER, "--port", str(port)))
        await until(lambda: all_answer([port]), STARTED_S, "the start")
        return await right_answers(port)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)}; default: all")
    parser.add_argument("--troubles", nargs="+", choices=(KILL, FREEZE, RESTART), default=(KILL, FREEZE, RESTART))
    parser.add_argument("--times", type=int, default=20)
    arguments = parser.parse_args()
    right = asyncio.run(answers_of_one_engine())
    print("| what | trouble | times | requests | longest, s (before) | wrong | twice | back, s | left over | holds |")
    print("|---|---|---|---|---|---|---|---|---|---|", flush=True)
    is_broken = False
    for name in arguments.cases or CASES:
        for trouble in CASES[name].troubles:
            if trouble not in arguments.troubles:
                continue
            verdict = Verdict()
            try:
                asyncio.run(run(name, trouble, arguments.times, right, verdict))
            finally:  # also if the run is interrupted
                print(verdict.line(name, trouble), flush=True)
                for each in verdict.broken[:10]:
                    print(f"    {each}", flush=True)
            is_broken |= bool(verdict.broken)
    return int(is_broken)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # exit normally, so that started programs are ended
    sys.exit(main())
