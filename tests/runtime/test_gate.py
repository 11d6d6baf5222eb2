"""One task at a time, in turns of tenants, even if some waiters are cancelled."""

from __future__ import annotations

import asyncio

from octavo.runtime.gate import Gate


def test_gate_admits_one_task_and_alternates_tenants() -> None:
    gate, order, inside = Gate(), list[str](), 0

    async def enter(tenant: str) -> None:
        nonlocal inside
        async with gate.turn(tenant):
            inside += 1
            assert inside == 1
            await asyncio.sleep(0)
            order.append(tenant)
            inside -= 1

    async def ask() -> None:
        await asyncio.gather(*map(enter, ["greedy"] * 5 + ["modest"] * 2))

    asyncio.run(ask())
    assert order == ["greedy", "greedy", "modest", "greedy", "modest", "greedy", "greedy"]  # the first one came alone


def test_cancelled_holder_and_waiter_do_not_block_gate() -> None:
    gate, entered = Gate(), list[str]()

    async def enter(name: str) -> None:
        async with gate.turn(""):
            entered.append(name)
            await asyncio.sleep(30)

    async def ask() -> None:
        inside, waiting = asyncio.create_task(enter("inside")), asyncio.create_task(enter("waiting"))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.sleep(0)
        inside.cancel()
        async with asyncio.timeout(10), gate.turn(""):
            entered.append("next")
        await asyncio.gather(inside, waiting, return_exceptions=True)

    asyncio.run(ask())
    assert entered == ["inside", "next"]


def test_waiter_cancelled_after_grant_releases_turn() -> None:
    gate = Gate()

    async def pass_through() -> None:
        async with gate.turn(""):
            pass

    async def ask() -> None:
        async with gate.turn(""):
            leaving = asyncio.create_task(pass_through())
            await asyncio.sleep(0)
            leaving.cancel()  # it is cancelled after its turn was granted, before it runs
        async with asyncio.timeout(10):
            await pass_through()
        await asyncio.gather(leaving, return_exceptions=True)

    asyncio.run(ask())
