"""Ragged batches over a paged cache with NaN in its unwritten slots."""

import torch
import torch.nn.functional as F  # noqa: N812
from kernel_accuracy import assert_as_exact_as_torch

from octavo.kernels import AttentionBatch
from octavo.kernels.quantization import kv_scales, round_kv_rows
from octavo.models.kv_layout import KVLayout, KVShape
from octavo.worker.kv_cache import PagedKVCache


def paged_batch(sequences, block_size, num_kv_heads, head_dim, dtype, generator, history=None):
    """Return (batch, k_cache, v_cache) for sequences of (KV length, query length).

    Blocks are scattered, and the caches are views of one block-major tensor as in the worker. history: for each
    sequence the keys and values [length, 2, num_kv_heads, head_dim] to write; default random.
    """
    counts = [-(-length // block_size) for length, _ in sequences]
    order = torch.randperm(sum(counts) + 3, generator=generator)
    cache = torch.full((len(order), 2, num_kv_heads, block_size, head_dim), float("nan")).to(dtype)
    tables = torch.full((len(sequences), max(counts) + 1), 2**30, dtype=torch.int32)  # past the end: must not be read
    starts, positions, slots, used = [0], [], [], 0
    for i, (length, queries) in enumerate(sequences):
        table = order[used : used + counts[i]]
        used += counts[i]
        tables[i, : counts[i]] = table.int()
        written = torch.arange(length)
        if history is None:
            values = torch.randn(length, 2, num_kv_heads, head_dim, generator=generator).to(dtype)
        else:
            values = history[i][:length]
        cache[table[written // block_size], :, :, written % block_size] = values
        where = written[length - queries :]
        positions.append(where)
        slots.append(table[where // block_size] * block_size + where % block_size)
        starts.append(starts[-1] + queries)
    batch = AttentionBatch(
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor([length for length, _ in sequences], dtype=torch.int32),
        tables,
        torch.cat(positions),
        torch.cat(slots),
        block_size,
    )
    return batch, cache[:, 0], cache[:, 1]


def keys_and_values(batch, i, k_cache, v_cache):
    """Return keys and values of sequence i: [length, num_kv_heads, head_dim] each."""
    position = torch.arange(int(batch.seq_lens[i]))
    block = batch.block_tables[i][position // batch.block_size].long()
    offset = position % batch.block_size
    return k_cache[block, :, offset], v_cache[block, :, offset]


def rounded_caches(*caches, dtype=torch.int8):
    """Round float caches to int8 or float8_e4m3fn; rows with NaN get the scale NaN."""
    num_blocks, num_kv_heads, block_size, head_dim = caches[0].shape
    made = PagedKVCache(
        KVLayout((KVShape(num_kv_heads, head_dim),) * 3),
        num_blocks=[num_blocks], block_size=block_size, dtype=dtype, device=caches[0].device,
    )  # fmt: skip
    made.groups[0].blocks.view(torch.int8).random_(-128, 128)
    layer = made.layer(1)
    for rounded, cache in zip(layer, caches, strict=True):
        values, scales = round_kv_rows(cache.flatten(0, 2), dtype)
        rounded.copy_(values.view(cache.shape))
        kv_scales(rounded).copy_(scales.view(cache.shape[:3]))
    return layer


def floats(cache):
    """Return the dequantized values of a rounded cache."""
    return cache.float() * kv_scales(cache).unsqueeze(-1)


def dense_attention(q, batch, k_cache, v_cache, scale, window, kind, softcap=None, sinks=None):
    """Compute causal attention, sequence by sequence, in the dtype `kind`."""
    parts = []
    for i in range(len(batch.seq_lens)):
        keys, values = keys_and_values(batch, i, k_cache, v_cache)
        rows = slice(int(batch.query_start[i]), int(batch.query_start[i + 1]))
        group = q.shape[1] // keys.shape[1]
        keys, values = (x.to(kind).repeat_interleave(group, dim=1).transpose(0, 1) for x in (keys, values))
        distance = batch.positions[rows].unsqueeze(1) - torch.arange(keys.shape[1])
        seen = (distance >= 0) & (distance < (window or 2**30))
        queries = q[rows].to(kind).transpose(0, 1)
        if softcap is None and sinks is None:
            part = F.scaled_dot_product_attention(queries, keys, values, attn_mask=seen, scale=scale)
        else:
            scores = queries @ keys.transpose(1, 2) * scale
            scores = scores if softcap is None else (scores / softcap).tanh() * softcap
            scores = scores.masked_fill(~seen, -torch.inf)
            if sinks is not None:
                scores = torch.cat([scores, sinks.to(kind)[:, None, None].expand(-1, scores.shape[1], 1)], dim=-1)
            part = scores.softmax(dim=-1)[..., : keys.shape[1]] @ values
        parts.append(part.transpose(0, 1).flatten(1))
    return torch.cat(parts)


def assert_attention_is_as_exact(result, q, batch, caches, window, softcap=None, sinks=None):
    """Check attention with the usual scale against the errors of plain torch in float32, rounded to the dtype of
    `q`.
    """
    exact, plain = (
        dense_attention(q, batch, *caches, q.shape[2] ** -0.5, window, kind, softcap, sinks)
        for kind in (torch.float64, torch.float32)
    )
    heads = (each.unflatten(1, (q.shape[1], -1)) for each in (result, plain.to(q.dtype), exact))
    assert_as_exact_as_torch(*heads)
