"""Prefill/decode pairs of engines in one process, with the requests that a router would send."""

from __future__ import annotations

from dataclasses import replace

from octavo.data.kv_transfer_params import KVTransferParams


def add_prefill(engine, index, request, salt=None):
    """Add a request that computes a prompt for another engine, as a server does. salt: shared only with an equal
    salt.
    """
    prompt, params = request
    only_prompt = replace(params, max_tokens=1, logprobs=None)
    pair = KVTransferParams(f"t-{index}", is_prefill=True)
    engine.add_request(
        f"p-{index}", {"prompt_token_ids": prompt}, only_prompt, cache_salt=salt, kv_transfer_params=pair
    )


def add_decode(engine, index, request, source=None, salt=None):
    """Add a request that uses the KV that another engine computes for it."""
    prompt, params = request
    pair = KVTransferParams(f"t-{index}", source=source)
    engine.add_request(
        str(index),
        {"prompt_token_ids": prompt},
        params,
        priority=index % 3,
        cache_salt=salt,
        tenant=str(index % 4),
        kv_transfer_params=pair,
    )


def prefill(engine, requests):
    """Compute all prompts and finish their saves."""
    for index, request in enumerate(requests):
        add_prefill(engine, index, request)
    while engine.has_unfinished_requests():
        engine.step()


def decode(engine, requests, source=None, *, salts=None, also=lambda: None):
    """Add requests a few at a time; return (token ids, logprobs) of each, and how many tokens each found.

    salts: one for each request; also: called between steps.
    """
    finished, pending = {}, list(enumerate(requests))
    while pending or engine.has_unfinished_requests():
        for index, request in pending[:5]:
            add_decode(engine, index, request, source, salts and salts[index])
        del pending[:5]
        also()
        for output in engine.step():
            if output.finished:
                finished[int(output.request_id)] = output
    found = [finished[index] for index in range(len(requests))]
    told = [(each.outputs[0].token_ids, each.outputs[0].logprobs) for each in found]
    return told, [each.num_cached_tokens for each in found]
