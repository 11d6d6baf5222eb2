"""Queue times from metrics of engines."""

from __future__ import annotations

import http.server
import threading

import pytest

from octavo.ray.figures import LoadReader, read_figures

TEXT = """# HELP octavo:num_requests_running Requests that are running.
octavo:num_requests_running{model_name="m"} 3.0
octavo:num_requests_waiting{model_name="m"} 2.0
octavo:max_num_seqs{model_name="m"} 8.0
octavo:request_queue_time_seconds_bucket{le="1.0",model_name="m"} 4.0
octavo:request_queue_time_seconds_count{model_name="m"} 5.0
octavo:request_queue_time_seconds_sum{model_name="m"} 2.5
other_total 7.0
"""


def figures(sum_s=0.0, count=0.0, running=0.0, waiting=0.0, limit=8.0):
    text = (
        f"octavo:request_queue_time_seconds_sum {sum_s}\noctavo:request_queue_time_seconds_count {count}\n"
        f"octavo:num_requests_running {running}\noctavo:num_requests_waiting {waiting}\n"
    )
    return read_figures((text + (f"octavo:max_num_seqs {limit}\n" if limit else "")).encode())


VLLM = TEXT.replace("octavo:", "vllm:").replace("vllm:max_num_seqs", "octavo:max_num_seqs")


@pytest.mark.parametrize("text", [TEXT, VLLM, TEXT + TEXT.replace("octavo:", "vllm:")], ids=["octavo", "vllm", "both"])
def test_metrics_are_read_with_each_prefix(text):
    read = read_figures(text.encode())
    names = ("request_queue_time_seconds_sum", "request_queue_time_seconds_count", "num_requests_running")
    assert [read[name.encode()] for name in (*names, "num_requests_waiting", "max_num_seqs")] == [
        2.5,
        5.0,
        3.0,
        2.0,
        8.0,
    ]
    assert len(read) == 5


def test_queue_time_is_mean_since_previous_reading():
    reader = LoadReader(None)
    assert reader.load({"a": figures(100.0, 10)}, 0.0).queue_time_s == 0.0
    assert reader.load({"a": figures(106.0, 12)}, 1.0).queue_time_s == 3.0
    assert reader.load({"a": figures(106.0, 12)}, 2.0).queue_time_s == 0.0


def test_standing_queue_counts_as_its_age():
    reader = LoadReader(None)
    waits = [reader.load({"a": figures(waiting=1)}, float(now)).queue_time_s for now in range(4)]
    assert waits == [0.0, 1.0, 2.0, 3.0]
    assert reader.load({"a": figures(3.0, 1, waiting=1)}, 4.0).queue_time_s == 3.0  # one has begun to run
    assert reader.load({"a": figures(3.0, 1, waiting=1)}, 5.0).queue_time_s == 1.0
    assert reader.load({"a": figures(3.0, 1)}, 6.0).queue_time_s == 0.0


def test_restarted_engine_begins_anew():
    reader = LoadReader(None)
    reader.load({"a": figures(100.0, 10)}, 0.0)
    assert reader.load({"a": figures(1.0, 1)}, 1.0).queue_time_s == 0.0
    assert reader.load({"a": figures(3.0, 2)}, 2.0).queue_time_s == 2.0


def test_load_has_longest_queue_time_and_sums():
    reader = LoadReader(None)
    reader.load({"a": figures(), "b": figures()}, 0.0)
    load = reader.load({"a": figures(1.0, 1, running=2), "b": figures(4.0, 1, running=3, waiting=1)}, 1.0)
    assert (load.queue_time_s, load.num_running, load.max_num_running_each) == (4.0, 5.0, 8.0)
    assert [reader.num_open(url) for url in "abc"] == [2.0, 4.0, 0.0]
    reader.load({"a": figures(1.0, 1)}, 2.0)
    assert reader.num_open("b") == 0.0


def test_missing_metrics_count_as_zero():
    load = LoadReader(None).load({"a": {}, "b": figures(running=1)}, 5.0)
    assert (load.at, load.queue_time_s, load.num_running, load.max_num_running_each) == (5.0, 0.0, 1.0, None)
    reader = LoadReader(None)
    reader.load({"a": {}}, 5.0)
    assert reader.num_open("a") == 0.0
    assert reader.load({"a": figures(2.0, 1)}, 6.0).queue_time_s == 2.0


def test_limit_is_unknown_if_an_engine_does_not_tell_it():
    assert LoadReader(None).load({"a": figures(), "b": figures(limit=0)}, 0.0).max_num_running_each is None


@pytest.fixture
def engine():
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            is_allowed = self.headers["Authorization"] == "Bearer key" and self.path == "/metrics"
            self.send_response(200 if is_allowed else 401)
            self.end_headers()
            self.wfile.write(TEXT.encode())

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_metrics_are_fetched_with_key(engine):
    load = LoadReader("key").read([engine], 0.0)
    assert load is not None
    assert (load.num_running, load.max_num_running_each) == (3.0, 8.0)
    assert LoadReader(None).read([engine], 0.0) is None  # 401


def test_silent_engine_counts_as_a_queue_and_hides_the_capacity(engine):
    load = LoadReader("key").read([engine, "http://127.0.0.1:1"], 0.0)
    assert load is not None
    assert (load.queue_time_s, load.num_running, load.max_num_running_each) == (0.0, 3.0, None)
    assert LoadReader("key").read(["http://127.0.0.1:1"], 0.0) is None
    assert LoadReader("key").read([], 0.0) is None


def test_queue_time_of_a_silent_engine_is_its_silence():
    reader = LoadReader(None)
    answers = [None, figures(), None, None, figures(9.0, 3), None]
    waits = [reader.load({"a": figures(), "b": each}, float(now)).queue_time_s for now, each in enumerate(answers)]
    assert waits == [0.0, 0.0, 1.0, 2.0, 3.0, 1.0]
    reader.load({"a": figures()}, 6.0)  # another engine with this address
    assert reader.load({"a": figures(), "b": None}, 7.0).queue_time_s == 0.0
