"""What a request's way through a router does, step by step, in this process and in virtual time."""

from __future__ import annotations

import asyncio
import json
import logging
from types import SimpleNamespace

import pytest
from router.in_process import URLS, USAGE, Client, answer
from router.virtual_time import run_virtually
from starlette.exceptions import HTTPException

from octavo.errors import DeadlineError
from octavo.router.asked import Asked
from octavo.router.flight import Flight
from octavo.server.access.tenants import EVERYBODY, Tenant
from octavo.server.access.timeouts import TimeoutQueue
from octavo.server.errors import CLIENT_LEFT, EngineLostError

STREAM = "text/event-stream"
EVENT = b'data: {"choices":[{"text":"a"}]}\n\n'
LAST = b"data: [DONE]\n\n"
LONG = {"prompt": [7] * 300, "max_tokens": 4}
CHUNKED = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def hang(_connection) -> None:
    """Answer nothing."""


def error_code(told) -> tuple[int, str]:
    return told[0], json.loads(told[1])["error"]["code"]


def test_whole_answer_is_counted_and_charged():
    async def work(_now):
        client = Client(1)
        charged = []
        client.service.limiter.charge = lambda tenant, num_tokens: charged.append((tenant, num_tokens))
        told = await client.ask()
        assert told == (200, b'{"usage":' + json.dumps(USAGE, separators=(",", ":")).encode() + b"}")
        (engine,) = client.engines
        assert (engine.num_prompt_tokens, engine.num_cached_tokens) == (300, 30)
        assert (engine.num_failures, engine.open_tokens, len(engine.flights)) == (0, 0, 0)
        assert charged == [(EVERYBODY, 300)]
        assert client.state["audit"]["engine"] == engine.url
        assert client.service.limiter.streams.num_held == 0
        client.answers(answer({"error": 1}))
        await client.ask()
        assert len(charged) == 1  # of an answer without counts nothing is charged

    run_virtually(work)


@pytest.mark.parametrize("is_told_all", [False, True])
def test_engine_that_fails_sends_the_request_elsewhere_once(caplog, is_told_all):
    async def work(_now):
        client = Client(3)
        suspected = []
        client.service.suspect = suspected.append
        client.answers(ConnectionResetError("gone"))
        if is_told_all:
            for index in (1, 2):
                client.answers(ConnectionResetError("gone"), of=index)
        told = await client.ask()
        num_tried = 2
        assert len(client.upstream.asked) == num_tried
        assert [engine.num_failures for engine in client.engines] == [1, int(is_told_all), 0]
        assert suspected == [engine for engine, _, _ in client.upstream.asked][: 2 if is_told_all else 1]
        if is_told_all:
            assert error_code(told) == (503, "engine_lost")
        else:
            assert told[0] == 200
            assert client.state["audit"]["engine"] == URLS[1]
        assert caplog.text.count("failed a request of which its client has heard nothing") == 1
        assert "failed a request: ConnectionResetError: gone" in caplog.text

    caplog.set_level(logging.INFO)
    run_virtually(work)


def test_engine_alone_that_fails_is_named_as_lost():
    async def work(_now):
        client = Client(1)
        client.answers(ConnectionResetError("gone"))
        assert error_code(await client.ask()) == (503, "engine_lost")

    run_virtually(work)


def test_soonest_refusal_is_passed_on():
    async def work(_now):
        client = Client(3)
        for index, more in enumerate(("retry-after: 9\r\n", "retry-after: 2\r\n", "")):
            client.answers(answer({"from": index}, 429, more=more), of=index)
        assert await client.ask() == (429, b'{"from":1}')
        assert len(client.upstream.asked) == 3  # an engine that is full has not failed
        start = next(message for message in client.sent if message["type"] == "http.response.start")
        assert (b"retry-after", b"2") in start["headers"]
        assert [engine.num_failures for engine in client.engines] == [0, 0, 0]

    run_virtually(work)


def test_engines_that_close_count_as_failures_of_a_request():
    async def work(_now):
        client = Client(3)
        for index in range(3):
            client.answers(answer({"from": index}, 503), of=index)
        assert await client.ask() == (503, b'{"from":0}')
        assert len(client.upstream.asked) == 2

    run_virtually(work)


def test_no_engine_for_a_request_is_told_with_a_time():
    async def work(_now):
        client = Client(2, health_interval_s=3.0)
        client.engines[0].models, client.engines[1].models = frozenset({"x"}), frozenset({"y"})
        client.engines[1].is_ready = False
        told = await client.ask(model="y", prompt="a")
        assert error_code(told)[0] == 503
        start = next(message for message in client.sent if message["type"] == "http.response.start")
        assert (b"retry-after", b"3") in start["headers"]

    run_virtually(work)


def test_client_that_leaves_is_answered_by_its_status_alone():
    async def work(_now):
        client = Client(1)
        client.answers(hang)
        asking = asyncio.ensure_future(client.ask())
        await asyncio.sleep(1.0)
        client.leaves.set()
        assert await asking == (CLIENT_LEFT, b"")
        (engine,) = client.engines
        assert (engine.num_failures, engine.open_tokens, engine.flights) == (0, 0, set())
        assert client.upstream.transports[0].is_closed

    run_virtually(work)


def test_client_that_leaves_in_mid_stream_gets_no_second_status():
    async def work(_now):
        client = Client(1)

        async def begin(connection):
            connection.data_received(CHUNKED + chunk(EVENT))

        client.answers(begin)
        asking = asyncio.ensure_future(client.ask(stream=True, prompt="a"))
        await asyncio.sleep(1.0)
        client.leaves.set()
        status, _ = await asking
        assert status == 200
        assert sum(message["type"] == "http.response.start" for message in client.sent) == 1
        assert client.engines[0].num_failures == 0

    run_virtually(work)


def test_request_without_time_left_ends_with_its_deadline():
    async def work(now):
        client = Client(1)
        client.answers(hang)
        told = await client.ask(headers=[(b"x-request-timeout", b"7")])
        assert (told[0], b"7 s" in told[1]) == (504, True)
        assert now() == pytest.approx(7.0, abs=0.1)

    run_virtually(work)


@pytest.mark.parametrize(
    ("path", "error"),
    [("/v1/completions", b"data: [DONE]"), ("/v1/messages", b"event: error"), ("/api/chat", b'{"error"')],
)
def test_stream_that_is_cut_ends_with_an_error_event(path, error):
    async def work(_now):
        client = Client(1)
        kind = b"application/x-ndjson" if path.startswith("/api") else b"text/event-stream"
        event = b'{"a":1}\n' if path.startswith("/api") else EVENT

        async def begin(connection):
            connection.data_received(CHUNKED.replace(b"text/event-stream", kind) + chunk(event) + chunk(event[:5]))
            await asyncio.sleep(1.0)
            connection.connection_lost(ConnectionResetError("reset"))

        client.answers(begin)
        suspected = []
        client.service.suspect = suspected.append
        status, body = await client.ask(path, stream=True, prompt="a")
        assert (status, body.startswith(event), body.count(event)) == (200, True, 1)
        assert error in body[len(event) :]
        assert client.sent[-1]["type"] == "http.response.body"
        assert not client.sent[-1].get("more_body")
        assert (client.engines[0].num_failures, suspected) == (1, client.engines)
        assert client.state["error"].code == "engine_lost"

    run_virtually(work)


def test_stream_that_is_cut_after_its_last_event_is_whole():
    async def work(_now):
        client = Client(1)

        async def begin(connection):
            connection.data_received(CHUNKED + chunk(EVENT + LAST))
            await asyncio.sleep(1.0)
            connection.connection_lost(ConnectionResetError("reset"))

        client.answers(begin)
        assert await client.ask(stream=True, prompt="a") == (200, EVENT + LAST)
        assert client.engines[0].num_failures == 0
        assert "error" not in client.state

    run_virtually(work)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/models/x"])
@pytest.mark.parametrize("last", [LAST, b""])
def test_only_the_last_event_ends_a_stream_whose_length_nothing_tells(path, last):
    async def work(_now):
        client = Client(1)
        client.upstream.ends = True
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
        client.answers(head + EVENT + last)
        told = await client.ask(path, stream=True, prompt="a")
        is_cut = path == "/v1/completions" and not last
        assert (b'"engine_lost"' in told[1]) is is_cut
        assert (told == (200, EVENT + last)) is not is_cut

    run_virtually(work)


@pytest.mark.parametrize(("body", "is_whole"), [(b'{"a":1}', True), (b'{"a":', False)])
def test_json_whose_length_nothing_tells_has_to_be_complete(body, is_whole):
    async def work(_now):
        client = Client(1)
        client.upstream.ends = True
        client.answers(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n" + body)
        told = await client.ask()
        assert (told == (200, body)) is is_whole
        assert client.engines[0].num_failures == (not is_whole)

    run_virtually(work)


def test_json_above_the_limit_is_passed_on_as_it_comes_and_counted():
    async def work(_now):
        client = Client(1, max_answer_bytes=1 << 20)
        body = {"text": "x" * (3 << 20), "usage": USAGE}
        data = answer(body)

        async def feed(connection):
            for start in range(0, len(data), 1 << 18):
                connection.data_received(data[start : start + (1 << 18)])
                await asyncio.sleep(0.1)

        client.answers(feed)
        status, told = await client.ask()
        assert (status, json.loads(told)) == (200, body)
        sizes = [len(message["body"]) for message in client.sent if message.get("more_body")]
        assert sizes[0] > 1 << 20
        assert len(sizes) > 2
        assert client.engines[0].num_prompt_tokens == 300

    run_virtually(work)


def test_answer_of_another_kind_is_passed_on_whole():
    async def work(_now):
        client = Client(1)
        client.answers(answer(b"plain" * 1000, kind="text/plain"))
        assert await client.ask("/metrics_of_mine") == (200, b"plain" * 1000)

    run_virtually(work)


def test_own_path_with_another_method_is_refused():
    async def work(_now):
        with pytest.raises(HTTPException) as error:
            await Client(1).ask("/metrics")
        assert error.value.status_code == 405

    run_virtually(work)


def test_key_without_read_metrics_sees_nothing_of_other_keys():
    async def work(_now):
        client = Client(1)
        told = await client.ask("/server_info", tenant=Tenant(name="a"))
        assert (told[0], b"read_metrics" in told[1]) == (403, True)
        assert not client.upstream.asked

    run_virtually(work)


@pytest.mark.parametrize(
    ("method", "path", "num_held"),
    [("POST", "/v1/completions", 3), ("POST", "/tokenize", 3), ("GET", "/v1/completions", 0), ("POST", "/other", 0)],
)
def test_only_requests_that_a_model_serves_take_places(method, path, num_held):
    async def work(_now):
        client, held = Client(1), []

        async def look(connection):
            held.append(client.service.limiter.streams.num_held)
            connection.data_received(answer({}))

        client.answers(look)
        assert (await client.ask(path, method=method, prompt="a", n=3))[0] == 200
        assert held == [num_held]
        assert client.service.limiter.streams.num_held == 0

    run_virtually(work)


def test_get_has_a_limit_of_time_only_if_it_asks_for_one():
    """The answer of a dashboard has no end."""

    async def work(now):
        client = Client(1, request_timeout_s=5.0)

        async def late(connection):
            await asyncio.sleep(20.0)
            connection.data_received(answer({}))

        client.answers(late)
        assert (await client.ask("/x", method="GET"))[0] == 200
        assert (await client.ask("/x", method="HEAD"))[0] == 200
        begun_at = now()
        assert (await client.ask("/x", method="GET", headers=[(b"x-request-timeout", b"9")]))[0] == 504
        assert now() == pytest.approx(begun_at + 5.0, abs=0.1)
        assert (await client.ask("/x"))[0] == 504

    run_virtually(work)


# --- pairs of engines ---------------------------------------------------------------------------------------------


def pair_of(**options) -> Client:
    client = Client(2, **options)
    client.engines[0].role, client.engines[1].role = "prefill", "decode"
    return client


def test_prefill_that_takes_too_long_for_its_length_is_given_up(caplog):
    async def work(now):
        client = pair_of()
        prefill, decode = client.engines
        client.answers(hang)

        async def look(connection):
            await asyncio.sleep(0.01)
            status = 500 if prefill.flights else 200  # it ends before the other one answers
            connection.data_received(answer({"usage": USAGE}, status))

        client.answers(look, of=1)
        assert (await client.ask(**LONG))[0] == 200
        assert now() == pytest.approx(5.0 + 0.002 * 300, abs=0.05)
        assert (prefill.num_failed_prefills, decode.num_paired) == (1, 0)
        assert prefill.prefills_from == pytest.approx(now() + 1.0, abs=0.05)
        text = f"{prefill.url} computed no prompt for {decode.url}, which does it itself: nothing within 5.6 s"
        assert text in caplog.text

    run_virtually(work)


@pytest.mark.parametrize("status", [200, 400, 429, 499, 500, 503])
def test_decode_engine_hears_of_kv_only_if_the_prefill_was_computed(status):
    async def work(_now):
        client = pair_of()
        client.answers(answer({"usage": USAGE}, status, more="retry-after: 7\r\n"))
        assert (await client.ask(**LONG))[0] == 200
        prefill, decode = client.engines
        (_, first, _), (_, second, _) = client.upstream.asked
        names = [name for name, _ in second["headers"]]
        assert (b"x-kv-transfer-id" in names) is (status == 200) is (decode.num_paired == 1)
        assert dict(first["headers"])[b"x-kv-transfer-role"] == b"prefill"
        assert prefill.num_failed_prefills == (status in {429, 500, 503})
        assert prefill.num_prefill_tokens == (300 if status == 200 else 0)
        assert prefill.num_prefills == 1
        client.answers(answer({}, status))
        prefill.prefills_from = 0.0
        await client.ask(**LONG)
        assert prefill.num_prefill_tokens == (300 if status == 200 else 0)  # this one says nothing of its prompt

    run_virtually(work)


@pytest.mark.parametrize("trouble", [ConnectionResetError("gone"), RuntimeError("a fault")])
@pytest.mark.parametrize("is_in_body", [False, True])
def test_prefill_that_fails_leaves_the_prompt_to_the_decode_engine(trouble, is_in_body, caplog):
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
        assert ("a prompt was not computed for another engine" in caplog.text) is not is_lost

    run_virtually(work)


def test_lost_prefill_engine_fails_only_its_half():
    async def work(_now):
        client = pair_of()
        client.answers(hang)
        asking = asyncio.ensure_future(client.ask(**LONG))
        await asyncio.sleep(1.0)
        client.service.pool.lost(client.engines[0])
        assert (await asking)[0] == 200
        assert (client.engines[0].num_failed_prefills, client.engines[1].num_paired) == (1, 0)

    run_virtually(work)


# --- a request's flight -------------------------------------------------------------------------------------------


def test_end_between_two_guarded_blocks_is_raised_at_the_next_one():
    async def work(_now):
        flight = Flight(Asked(), EVERYBODY)
        async with flight.guarded():
            pass
        flight.end(EngineLostError())
        flight.end(DeadlineError("later"))
        with pytest.raises(EngineLostError):
            async with flight.guarded():
                pytest.fail("the block is not entered")
        async with flight.guarded():
            pass  # it was told once

    run_virtually(work)


def test_task_that_was_ended_may_be_cancelled_again():
    async def work(_now):
        flight = Flight(Asked(), EVERYBODY)
        task = asyncio.current_task()
        asyncio.get_running_loop().call_later(1.0, flight.end, EngineLostError())
        with pytest.raises(EngineLostError):
            async with flight.guarded():
                await asyncio.sleep(10.0)
        assert task.cancelling() == 0
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await asyncio.sleep(10.0)

    run_virtually(work)


def test_cancellation_from_outside_passes_a_guarded_block():
    async def work(_now):
        flight = Flight(Asked(), EVERYBODY)

        async def wait():
            async with flight.guarded():
                await asyncio.sleep(10.0)

        task = asyncio.ensure_future(wait())
        await asyncio.sleep(1.0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert task.cancelled()

    run_virtually(work)


def test_limit_of_time_ends_with_its_block():
    async def work(_now):
        flight = Flight(Asked(), EVERYBODY)
        with flight.limited(TimeoutQueue(), 1.0):
            pass
        with flight.limited(TimeoutQueue(), None):
            await asyncio.sleep(100.0)
        async with flight.guarded():
            await asyncio.sleep(5.0)

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
def test_pair_notes_whether_kv_came_if_enough_was_new(usage, known, noted):
    """Enough: 256 tokens, of which the decode engine was not expected to have any."""

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


def test_pair_whose_answer_or_prefill_failed_notes_nothing():
    async def work(_now):
        for of, given in ((0, answer(None, 500)), (1, answer(None, 400)), (1, ConnectionResetError())):
            client = pair_of()
            client.answers(given, of=of)
            client.service.pool.partners = SimpleNamespace(may_pair=lambda *_: True)  # anything else is an error
            await client.ask(**LONG)

    run_virtually(work)
