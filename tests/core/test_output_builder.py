from __future__ import annotations


def test_a_request_is_sent_whole_once_and_then_only_what_is_new(make_core):
    core = make_core()
    core.add("a", 4)
    first = core.step()
    assert [(data.request_id, len(data.token_ids), data.block_ids) for data in first.scheduled_new_reqs] == [
        ("a", 4, [0])
    ]
    assert first.scheduled_cached_reqs.req_ids == []
    cached = core.step().scheduled_cached_reqs
    assert (cached.req_ids, cached.new_token_ids, cached.num_computed_tokens) == (["a"], [[7]], [4])
    assert cached.new_block_ids == [[1]]
    assert core.step().scheduled_cached_reqs.new_block_ids == [[]]


def test_tokens_of_steps_in_which_it_got_nothing_are_sent_later(make_core):
    core = make_core(batching="prefill_first")
    core.add("a", 4)
    core.step()
    core.add("b", 4)
    assert list(core.step().num_scheduled_tokens) == ["b"]
    cached = core.step().scheduled_cached_reqs
    assert (cached.req_ids, cached.new_token_ids) == (["a", "b"], [[7], [7]])


def test_what_was_sent_is_a_copy(make_core):
    core = make_core()
    request = core.add("a", 4)
    [data] = core.scheduler.schedule().scheduled_new_reqs
    request.sequence.token_ids.append(99)
    request.sequence.block_table.append(99)
    assert (len(data.token_ids), data.block_ids) == (4, [0])


def test_drafts_are_sent_as_far_as_the_step_has_room_for_them(make_core):
    core = make_core(max_num_batched_tokens=4, max_num_seqs=2)
    core.add("a", 2, max_tokens=50)
    core.add("b", 2, max_tokens=50)
    core.step()
    core.scheduler.update_draft_token_ids({"a": [1, 2, 3, 4], "b": [5, 6]})
    scheduled = core.scheduler.schedule()
    assert scheduled.num_scheduled_tokens == {"a": 3, "b": 1}
    assert scheduled.scheduled_spec_decode_tokens == {"a": [1, 2]}
    assert scheduled.scheduled_cached_reqs.new_token_ids == [[7], [7]]  # drafts are not known tokens


def test_endings_are_told_once_and_again_when_the_step_failed(make_core):
    core = make_core()
    core.add("a", 4)
    core.step()
    core.scheduler.abort_request("a")
    scheduled = core.scheduler.schedule()
    assert scheduled.finished_req_ids == {"a"}
    core.scheduler.fail_step(scheduled, "broken")
    assert core.scheduler.has_work()
    assert core.scheduler.schedule().finished_req_ids == {"a"}
    assert core.scheduler.schedule().is_empty
    assert not core.scheduler.has_work()


def test_a_step_that_only_waits_for_loads_says_so(make_core):
    class Store:
        def get_num_new_matched_tokens(self, request, num_computed_tokens):
            return 8 if request.request_id == "loads" else 0

        def update_state_after_alloc(self, request, block_ids, num_external_tokens):
            pass

        def request_finished(self, request, block_ids):
            pass

    core = make_core(connector=Store())
    core.add("runs", 4, max_tokens=2)
    assert not core.step().only_waits_for_loads
    core.add("loads", 12)
    scheduled = core.step()
    assert (scheduled.num_scheduled_tokens, scheduled.num_pending_loads) == ({"runs": 1}, 1)
    assert not scheduled.only_waits_for_loads
    assert core.step().only_waits_for_loads
