"""The core against a model whose tokens show any wrong, stale or unwritten KV slot.

The content of a slot hashes the content of the slot before it, read through the block table; the next token is a
function of the last slot. A token that differs from the oracle's means that somebody read what was not its own.
"""

from __future__ import annotations

import random

import pytest

from octavo.model_output import ModelOutput

VOCAB = 1 << 16


def mix(previous: int, token: int, position: int) -> int:
    return hash((previous, token, position)) & (2**61 - 1)


def oracle(prompt: list[int], num_tokens: int) -> list[int]:
    content, tokens = 0, []
    for position, token in enumerate(prompt):
        content = mix(content, token, position)
    for index in range(num_tokens):
        tokens.append(content % VOCAB)
        content = mix(content, tokens[-1], len(prompt) + index)
    return tokens


class HashWorker:
    """Keeps slots, block tables and tokens exactly as told by the scheduler's outputs."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.slots: dict[int, int] = {}
        self.tokens: dict[str, list[int]] = {}
        self.tables: dict[str, list[int]] = {}
        self.computed: dict[str, int] = {}

    def execute(self, scheduled) -> ModelOutput:
        for request_id in (*scheduled.finished_req_ids, *scheduled.preempted_req_ids):
            for store in (self.tokens, self.tables, self.computed):
                store.pop(request_id, None)
        for data in scheduled.scheduled_new_reqs:
            self.tokens[data.request_id] = list(data.token_ids)
            self.tables[data.request_id] = list(data.block_ids)
            self.computed[data.request_id] = data.num_computed_tokens
        cached = scheduled.scheduled_cached_reqs
        for request_id, tokens, blocks, computed in zip(
            cached.req_ids, cached.new_token_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            self.tokens[request_id] += tokens
            self.tables[request_id] += blocks
            self.computed[request_id] = computed
        return ModelOutput(
            scheduled.step,
            {
                request_id: [self.compute(request_id, count) % VOCAB]
                for request_id, count in scheduled.num_scheduled_tokens.items()
                if self.computed[request_id] + count == len(self.tokens[request_id])
            }
            | {
                request_id: []
                for request_id, count in scheduled.num_scheduled_tokens.items()
                if self.computed[request_id] + count < len(self.tokens[request_id]) and self.compute(request_id, count)
            },
        )

    def slot(self, request_id: str, position: int) -> int:
        return self.tables[request_id][position // self.block_size] * self.block_size + position % self.block_size

    def compute(self, request_id: str, count: int) -> int:
        start = self.computed[request_id]
        content = self.slots[self.slot(request_id, start - 1)] if start else 0
        for position in range(start, start + count):
            content = mix(content, self.tokens[request_id][position], position)
            self.slots[self.slot(request_id, position)] = content
        return content

    def poison(self, block_ids: set[int]) -> None:
        for block_id in block_ids:
            for offset in range(self.block_size):
                self.slots[block_id * self.block_size + offset] = -1


def check_blocks(core) -> None:
    """Free, cached and owned partition all blocks; references are what the block tables say."""
    pool = core.scheduler.kv_cache_manager.pool
    references = [0] * pool.num_blocks
    for request in core.scheduler.requests.values():
        for block_id in request.sequence.block_table:
            references[block_id] += 1
    assert references == [block.ref_count for block in pool.blocks]
    assert pool.free_block_ids() == {block.block_id for block in pool.blocks if block.ref_count == 0}
    assert all(pool._index[block.hash] is block for block in pool.blocks if block.hash is not None)
    assert len(pool._index) == sum(block.hash is not None for block in pool.blocks)


@pytest.mark.parametrize("seed", range(24))
def test_tokens_never_depend_on_the_schedule(make_core, seed):
    rng = random.Random(seed)
    block_size = rng.choice([1, 2, 4, 7])
    core = make_core(
        num_blocks=rng.randint(-(-40 // block_size), 3 * (-(-40 // block_size))),
        block_size=block_size,
        max_num_seqs=rng.randint(1, 6),
        max_num_batched_tokens=rng.randint(6, 40),
        policy=rng.choice(["fcfs", "priority"]),
        enable_prefix_caching=rng.random() < 0.7,
        enable_chunked_prefill=rng.random() < 0.7,
    )
    worker = HashWorker(block_size)
    expected: dict[str, list[int]] = {}
    produced: dict[str, list[int]] = {}
    prefixes = [[rng.randrange(50) for _ in range(12)] for _ in range(3)]
    for step in range(400):
        if len(expected) < 40 and rng.random() < 0.4:
            name = f"r{len(expected)}"
            prompt = rng.choice(prefixes)[: rng.randint(0, 12)] + [rng.randrange(50) for _ in range(rng.randint(1, 8))]
            num_tokens = rng.randint(1, 18)
            core.add(name, prompt, max_tokens=num_tokens, priority=rng.randrange(3))
            expected[name] = oracle(prompt, num_tokens)
            produced[name] = []
        if core.scheduler.requests and rng.random() < 0.05:
            core.scheduler.abort_request(rng.choice(list(core.scheduler.requests)))
        scheduled = core.scheduler.schedule()
        for output in core.scheduler.update_from_output(scheduled, worker.execute(scheduled)):
            produced[output.request_id] += output.new_token_ids
            if output.finish_reason is not None:
                core.finished[output.request_id] = output.finish_reason
        check_blocks(core)
        pool = core.scheduler.kv_cache_manager.pool
        worker.poison({b.block_id for b in pool.blocks if b.ref_count == 0 and b.hash is None})
        if step > 60 and len(expected) == 40 and not core.scheduler.has_work():
            break
    core.run()
    assert not core.scheduler.requests
    assert all(produced[name] == tokens[: len(produced[name])] for name, tokens in expected.items())
    assert sum(core.finished.get(name) == "length" for name in expected) > 20
    assert all(produced[name] == expected[name] for name, reason in core.finished.items() if reason == "length")
