"""After 10,000 requests, the blocks that were stored and not removed are those that lookups find."""

from __future__ import annotations

import random

import pytest
from core.conftest import Core
from kv_event_subscriber import Contents, Subscriber

from octavo.config import KVEventsConfig
from octavo.data.kv_event_figures import KVEventFigures
from octavo.kv_events import KVEventLog, KVEventPublisher
from octavo.kv_events.event_log import short_hash

NUM_REQUESTS = 10_000


@pytest.mark.slow
def test_contents_after_ten_thousand_requests_with_evictions(tmp_path):
    config = KVEventsConfig(
        enable_kv_cache_events=True,
        endpoint=f"ipc://{tmp_path}/events",
        replay_endpoint=f"ipc://{tmp_path}/replays",
        buffer_steps=1_000_000,
    )
    log = KVEventLog(KVEventPublisher(config, KVEventFigures()))
    core = Core(num_blocks=200, num_host_blocks=100, max_num_seqs=32, max_num_batched_tokens=512, cache_listener=log)
    manager, rng = core.scheduler.kv_cache_manager, random.Random(0)
    prefixes = [[rng.randrange(1000) for _ in range(64)] for _ in range(20)]
    for number in range(NUM_REQUESTS):
        prompt = [*rng.choice(prefixes)[: rng.randrange(64)], *(rng.randrange(1000) for _ in range(rng.randint(1, 9)))]
        core.add(str(number), prompt, max_tokens=rng.randint(1, 6))
        while len(core.scheduler.requests) >= 48:
            core.step()
            log.end_step()
    core.run()
    log.end_step()
    assert len(core.finished) == NUM_REQUESTS
    with Subscriber(config.endpoint, config.replay_endpoint) as subscriber:
        batches = subscriber.all_batches(log.figures.num_batches)
    log.close()
    for contents, pool in ((Contents("GPU"), manager.pool), (Contents("CPU"), manager.host)):
        for batch in batches:
            contents.take(batch)
        assert contents.num_removed > 10_000
        assert contents.num_stored - contents.num_removed == pool.num_cached_blocks
        assert {short_hash(name): block.token_ids for name, block in pool._index.items()} == {
            name: tokens for name, (_, tokens) in contents.blocks.items()
        }
