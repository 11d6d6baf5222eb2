"""Both halves of a request with prefill on another engine, in this process and in virtual time."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from router.in_process import USAGE, Client, answer
from router.virtual_time import run_virtually

LONG = {"prompt": [7] * 300, "max_tokens": 4}


async def hang(_connection) -> None:
    """Never answer."""


def pair_of(**options) -> Client:
    client = Client(2, **options)
    client.engines[0].role, client.engines[1].role = "prefill", "decode"
    return client


def test_slow_remote_prefill_times_out_by_prompt_length(caplog):
    async def work(now):
        client = pair_of()
        prefill, decode = client.engines
        client.answers(hang)

        async def look(connection):
            await asyncio.sleep(0.01)
            status = 500 if prefill.routed_requests else 200  # the prefill ends before the decode engine answers
            connection.data_received(answer({"usage": USAGE}, status))

        client.answers(look, of=1)
        assert (await client.ask(**LONG))[0] == 200
        assert now() == pytest.approx(5.0 + 0.002 * 300, abs=0.05)
        assert (prefill.num_failed_prefills, decode.num_paired) == (1, 0)
        assert prefill.prefills_from == pytest.approx(now() + 1.0, abs=0.05)
        text = (
            f"{prefill.url} did not compute a prompt for {decode.url}, which computes it itself: no answer within 5.6 s"
        )
        assert text in caplog.text

    run_virtually(work)


@pytest.mark.parametrize("status", [200, 400, 429, 499, 500, 503])
def test_decode_gets_transfer_id_only_after_successful_prefill(status):
    async def work(_now):
        client = pair_of()
        client.answers(answer({"usage": USAGE}, status, more="retry-after: 7\r\n"))
        assert (await client.ask(**LONG))[0] == 200
        prefill, decode = client.engines
        (_, first, _), (_, second, _) = client.upstream.summary
        names = [name for name, _ in second["headers"]]
        assert (b"x-kv-transfer-id" in names) is (status == 200) is (decode.num_paired == 1)
        assert dict(first["headers"])[b"x-kv-transfer-role"] == b"prefill"
        assert prefill.num_failed_prefills == (status in {429, 500, 503})
        assert prefill.num_prefill_tokens == (300 if status == 200 else 0)
        assert (prefill.num_prompt_tokens, prefill.num_cached_tokens) == ((300, 30) if status == 200 else (0, 0))
        assert prefill.num_prefills == 1
        client.answers(answer({}, status))
        prefill.prefills_from = 0.0
        await client.ask(**LONG)
        assert prefill.num_prefill_tokens == (300 if status == 200 else 0)  # the second answer reports no prompt tokens

    run_virtually(work)


@pytest.mark.parametrize("trouble", [ConnectionResetError("gone"), RuntimeError("a fault")])
@pytest.mark.parametrize("is_in_body", [False, True])
def test_failed_prefill_falls_back_to_decode_engine(trouble, is_in_body, caplog):
    async def work(_now):
        client = pair_of()

        async def cut(connection):
            connection.data_received(answer({"usage": USAGE})[:-5])
            await asyncio.sleep(0)
            connection._answer._fail(trouble)
            connection._answer._wake()

        client.answers(cut if is_in_body else trouble)
        suspected = []
        client.service.suspect = suspected.append
        assert (await client.ask(**LONG))[0] == 200
        prefill, decode = client.engines
        assert (prefill.num_failed_prefills, decode.num_paired) == (1, 0)
        is_lost = isinstance(trouble, OSError)
        assert suspected == ([prefill] if is_lost else [])
        assert ("a prefill failed" in caplog.text) is not is_lost

    run_virtually(work)


def test_lost_prefill_engine_keeps_request_on_decode_engine():
    async def work(_now):
        client = pair_of()
        client.answers(hang)
        asking = asyncio.ensure_future(client.ask(**LONG))
        await asyncio.sleep(1.0)
        client.service.pool.lost(client.engines[0])
        assert (await asking)[0] == 200
        assert (client.engines[0].num_failed_prefills, client.engines[1].num_paired) == (1, 0)

    run_virtually(work)


@pytest.mark.parametrize(
    ("usage", "known", "noted"),
    [
        ((600, 300), 0.0, ("usage", 0.5, 0.0)),
        ((600, 0), 0.5, ("usage", 0.0, 0.5)),
        ((600, None), 0.5, ("figures", 600, 300.0)),
        ((None, None), 0.5, ("figures", 600, 300.0)),
        ((400, 0), 0.5, None),
        ((511, 0), 0.5, None),
        ((512, 0), 0.5, ("usage", 0.0, 0.5)),
    ],
)
def test_pair_records_kv_arrival_if_enough_tokens_are_new(usage, known, noted):
    """Enough is 256 prompt tokens that the decode engine was not expected to have."""

    async def work(_now):
        client = pair_of()
        client.service.pool.sent = lambda *_: known
        heard = []
        client.service.pool.partners = SimpleNamespace(
            may_pair=lambda *_: True,
            ended=lambda _prefill, _decode, share, known, _now: heard.append(("usage", share, known)),
            ended_without_usage=lambda _prefill, _decode, _before, *told: heard.append(("figures", *told)),
        )
        prompt, cached = usage
        told = {"usage": {"total_tokens": 1, **({} if prompt is None else {"prompt_tokens": prompt})}}
        if cached is not None:
            told["usage"]["prompt_tokens_details"] = {"cached_tokens": cached}
        client.answers(answer(told), of=1)
        assert (await client.ask(prompt=[7] * 600))[0] == 200
        assert heard == ([] if noted is None else [noted])

    run_virtually(work)


def test_failed_prefill_or_answer_is_not_recorded_for_pair():
    async def work(_now):
        for of, given in ((0, answer(None, 500)), (1, answer(None, 400)), (1, ConnectionResetError())):
            client = pair_of()
            client.answers(given, of=of)
            client.service.pool.partners = SimpleNamespace(may_pair=lambda *_: True)  # any other call would raise
            await client.ask(**LONG)

    run_virtually(work)
