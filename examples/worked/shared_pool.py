"""Worked case (i): two engines over one pool of KV. The second one finds the blocks that the first one computed.

A prompt of 100 tokens has 6 whole blocks of 16. Engine A computes all of it and publishes the blocks. Engine B copies
them, computes the last 4 tokens of the prompt, and gives the same answer. A third node gets copies by a transfer.
"""

from __future__ import annotations

from functools import partial

from octavo import CacheConfig, LLMEngine, ModelConfig, SamplingParams, SchedulerConfig
from octavo.kv_transfer.memory import GlobalKVPool, MemoryStore

PROMPT = [40 + index % 50 for index in range(100)]
PARAMS = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)


def make_engine(pool: GlobalKVPool, node_id: str) -> LLMEngine:
    """Make an engine that is a node of the pool."""

    def make_store(block_bytes: int) -> MemoryStore:
        return MemoryStore(pool, node_id, block_bytes, block_size=16)

    return LLMEngine(
        ModelConfig(),
        SchedulerConfig(kv_lookup_timeout_s=10.0),  # a busy machine may take long to look up
        cache_config=CacheConfig(num_gpu_blocks=64, block_size=16),
        kv_store=make_store,
    )


def answer(engine: LLMEngine) -> tuple[list[int], int, list[bytes]]:
    """Answer the prompt; return the answer, the number of cached tokens, and the hashes of the prompt's blocks."""
    engine.add_request("request", {"prompt_token_ids": PROMPT}, PARAMS)
    request = engine.core.scheduler.requests["request"]
    outputs = []
    while engine.core.has_work():  # until the last block is published
        outputs += engine.step()
    return outputs[-1].outputs[0].token_ids, outputs[-1].num_cached_tokens, request.block_hashes[:6]


def run() -> dict[str, object]:
    """Run both engines; return their cached tokens and the content of the pool."""
    pool = GlobalKVPool(max_blocks_per_node=100)
    first, second = map(partial(make_engine, pool), "AB")
    told: list[tuple[str, bool]] = []
    answer_of_a, found_by_a, hashes = answer(first)
    published = pool.query(hashes)
    answer_of_b, found_by_b, _ = answer(second)
    pool.async_transfer("copy", hashes, "C", lambda request_id, *, success: told.append((request_id, success)))
    pool.wait_for_transfer("copy", timeout_s=10)
    copy = pool.get(hashes[0], "C")
    for engine in (first, second):
        engine.shutdown()
    return {
        "found_by_a": found_by_a,
        "published": published,
        "found_by_b": found_by_b,
        "same_answer": answer_of_a == answer_of_b,
        "told": told,
        "copy_of": None if copy is None else (copy.node_id, copy.token_count),
        "blocks_of_b_and_c": [pool.num_cached_blocks(node_id) for node_id in "BC"],
    }


if __name__ == "__main__":
    for name, value in run().items():
        print(f"{name}: {value}")
