"""FlashInfer and FlashAttention 3 as far as octavo calls them, in plain torch: what they are given alone decides.

The signatures are those of flashinfer-python 0.6.4, of hopper/flash_attn_interface.py in Dao-AILab/flash-attention and
of vllm_flash_attn/flash_attn_interface.py in vllm-project/flash-attention, which `parameters` reads out of sources.
Like these, they read whole pages from the first one on that they are given, up to the length, and nothing behind it.
"""

import ast
import types
from pathlib import Path
from typing import ClassVar

import torch


def parameters(path, name, of_class=None):
    """Return the parameters of the last definition of a function in a file: names to defaults, in order."""
    body = ast.parse(Path(path).read_text(encoding="utf-8")).body
    if of_class is not None:
        body = next(each for each in body if isinstance(each, ast.ClassDef) and each.name == of_class).body
    found = [each for each in body if isinstance(each, ast.FunctionDef) and each.name == name][-1].args
    by_place, by_name = [*found.posonlyargs, *found.args], found.kwonlyargs
    defaults = [None] * (len(by_place) - len(found.defaults)) + found.defaults + found.kw_defaults
    pairs = zip([*by_place, *by_name], defaults, strict=True)
    return {each.arg: None if default is None else ast.unparse(default) for each, default in pairs}


def require(is_so):
    """Raise `ValueError` for what a library would refuse, or misread."""
    if not is_so:
        raise ValueError("the library is not called like this")


def dense(q, keys, values, scale, window_left, softcap):
    """Return causal attention of rows [rows, heads, dim], the last of a sequence [length, KV heads, dim]."""
    group = q.shape[1] // keys.shape[1]
    keys, values = (each.float().repeat_interleave(group, dim=1).transpose(0, 1) for each in (keys, values))
    scores = q.float().transpose(0, 1) @ keys.transpose(1, 2) * scale
    if softcap > 0:
        scores = (scores / softcap).tanh() * softcap
    rows, length = q.shape[0], keys.shape[1]
    distance = torch.arange(length - rows, length).unsqueeze(1) - torch.arange(length)
    seen = (distance >= 0) & ((distance <= window_left) | (window_left < 0))
    return (scores.masked_fill(~seen, -torch.inf).softmax(dim=-1) @ values).transpose(0, 1)


class BatchPrefillWithPagedKVCacheWrapper:
    made: ClassVar[list] = []  # those of a test

    def __init__(
        self,
        float_workspace_buffer,
        kv_layout="NHD",
        use_cuda_graph=False,
        qo_indptr_buf=None,
        paged_kv_indptr_buf=None,
        paged_kv_indices_buf=None,
        paged_kv_last_page_len_buf=None,
        custom_mask_buf=None,
        mask_indptr_buf=None,
        backend="auto",
        jit_args=None,
        jit_kwargs=None,
    ):
        require((kv_layout, backend, use_cuda_graph) == ("HND", "auto", False))
        require(float_workspace_buffer.dtype == torch.uint8)
        self.workspace, self.num_plans, self.num_runs = float_workspace_buffer, 0, 0
        self.made.append(self)

    def plan(
        self,
        qo_indptr,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim_qk,
        page_size,
        head_dim_vo=None,
        custom_mask=None,
        packed_custom_mask=None,
        causal=False,
        pos_encoding_mode="NONE",
        use_fp16_qk_reduction=False,
        sm_scale=None,
        window_left=-1,
        logits_soft_cap=None,
        rope_scale=None,
        rope_theta=None,
        q_data_type="float16",
        kv_data_type=None,
        o_data_type=None,
        non_blocking=True,
        prefix_len_ptr=None,
        token_pos_in_items_ptr=None,
        token_pos_in_items_len=0,
        max_item_len_ptr=None,
        seq_lens=None,
        seq_lens_q=None,
        block_tables=None,
        max_token_per_sequence=None,
        max_sequence_kv=None,
        fixed_split_size=None,
        disable_split_kv=False,
    ):
        require(causal)
        require(head_dim_qk in (64, 128, 256))
        require(q_data_type == kv_data_type)
        require(q_data_type in (torch.float16, torch.bfloat16))
        offsets = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        require(all(each.dtype == torch.int32 for each in offsets))
        require(len(qo_indptr) == len(paged_kv_indptr) == len(paged_kv_last_page_len) + 1)
        require(len(paged_kv_indices) == paged_kv_indptr[-1])
        require(paged_kv_last_page_len.min() >= 1)
        require(paged_kv_last_page_len.max() <= page_size)
        self.offsets = [each.tolist() for each in offsets]
        self.shape = (num_qo_heads, num_kv_heads, head_dim_qk, page_size, q_data_type)
        self.options = (sm_scale, window_left, logits_soft_cap or 0.0)
        self.num_plans += 1

    def run(
        self,
        q,
        paged_kv_cache,
        *args,
        q_scale=None,
        k_scale=None,
        v_scale=None,
        out=None,
        lse=None,
        return_lse=False,
        enable_pdl=None,
        window_left=None,
        sinks=None,
        skip_softmax_threshold_scale_factor=None,
    ):
        k_cache, v_cache = paged_kv_cache
        num_kv_heads, page_size, head_dim = k_cache.shape[1:]
        require(self.shape == (q.shape[1], num_kv_heads, head_dim, page_size, q.dtype))
        require(k_cache.stride() == v_cache.stride())
        require(k_cache.stride(3) == q.stride(2) == 1)
        require((out.shape, out.dtype) == (q.shape, q.dtype))
        starts, page_starts, indices, last_page_lens = self.offsets
        for sequence, last_page_len in enumerate(last_page_lens):
            pages = indices[page_starts[sequence] : page_starts[sequence + 1]]
            length = (len(pages) - 1) * page_size + last_page_len
            keys, values = (cache[pages].transpose(1, 2).flatten(0, 1)[:length] for cache in (k_cache, v_cache))
            rows = slice(starts[sequence], starts[sequence + 1])
            out[rows] = dense(q[rows], keys, values, *self.options).to(q.dtype)
        self.num_runs += 1
        return out


def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    qv=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens=None,
    cache_batch_idx=None,
    cache_leftpad=None,
    page_table=None,
    cu_seqlens_q=None,
    cu_seqlens_k_new=None,
    max_seqlen_q=None,
    rotary_seqlens=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    rotary_interleaved=True,
    scheduler_metadata=None,
    num_splits=0,
    pack_gqa=None,
    sm_margin=0,
    return_softmax_lse=False,
):
    require(causal)
    return _varlen(
        q, k_cache, v_cache, page_table, cache_seqlens, cu_seqlens_q, max_seqlen_q,
        softmax_scale, window_size, softcap, num_splits,
    )  # fmt: skip


def flash_attn_varlen_func(
    q,
    k,
    v,
    max_seqlen_q,
    cu_seqlens_q,
    max_seqlen_k,
    cu_seqlens_k=None,
    seqused_k=None,
    q_v=None,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=None,
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
    return_softmax_lse=False,
    out=None,
    scheduler_metadata=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    num_splits=0,
    fa_version=2,
    s_aux=None,
    cp_world_size=1,
    cp_rank=0,
    cp_tot_seqused_k=None,
):
    require((causal, fa_version, cu_seqlens_k) == (True, 3, None))
    require(max_seqlen_k == block_table.shape[1] * k.shape[1])
    return _varlen(
        q, k, v, block_table, seqused_k, cu_seqlens_q, max_seqlen_q, softmax_scale, window_size, softcap, num_splits
    )


def _varlen(q, k_cache, v_cache, table, lengths, starts, max_rows, scale, window, softcap, num_splits):
    """As on a device nothing is read on the host; what no program writes is NaN."""
    require(q.dtype == k_cache.dtype)
    require(q.dtype in (torch.float16, torch.bfloat16))
    require(q.stride(2) == k_cache.stride(3) == v_cache.stride(3) == 1)
    for each in (table, lengths, starts):
        require((each.dtype, each.stride(-1)) == (torch.int32, 1))
    (num_rows, num_heads, head_dim), page_size = q.shape, k_cache.shape[1]
    require(num_splits == 1 or 1 < num_splits * num_rows * num_heads * (head_dim + 1) * 4 <= 128 << 20)
    place, row = torch.arange(table.shape[1] * page_size), torch.arange(num_rows)
    is_there = place < lengths.unsqueeze(1)
    pages = table[:, place // page_size].masked_fill(~is_there, 0).long()
    group = num_heads // k_cache.shape[2]
    keys, values = (
        cache[pages, place % page_size].float().masked_fill(~is_there[:, :, None, None], 0.0)
        .repeat_interleave(group, dim=2)
        for cache in (k_cache, v_cache)
    )  # fmt: skip
    sequence = (row.unsqueeze(1) >= starts[1:]).sum(1)
    is_behind, sequence = sequence == len(lengths), sequence.clamp(max=len(lengths) - 1)
    of_sequence = row - starts[sequence]
    position = lengths[sequence] - starts.diff()[sequence] + of_sequence
    distance = position.unsqueeze(1) - place
    seen = is_there[sequence] & (distance >= 0) & ((distance <= window[0]) | (window[0] < 0))
    scores = torch.einsum("rhd,rlhd->rhl", q.float(), keys[sequence]) * scale
    if softcap > 0:
        scores = (scores / softcap).tanh() * softcap
    weights = scores.masked_fill(~seen.unsqueeze(1), -torch.inf).softmax(dim=-1)
    weights = weights.masked_fill(~seen.any(1)[:, None, None], 0.0)
    out = torch.einsum("rhl,rlhd->rhd", weights, values[sequence]).to(q.dtype)
    return out.masked_fill((is_behind | (of_sequence >= max_rows))[:, None, None], torch.nan)


def modules():
    """Return stand-ins by the names that are imported."""
    flash_attn_interface = types.ModuleType("flash_attn_interface")
    flash_attn_interface.flash_attn_with_kvcache = flash_attn_with_kvcache
    vllm_flash_attn = types.ModuleType("vllm.vllm_flash_attn")
    vllm_flash_attn.flash_attn_varlen_func = flash_attn_varlen_func
    flashinfer = types.ModuleType("flashinfer")
    flashinfer.BatchPrefillWithPagedKVCacheWrapper = BatchPrefillWithPagedKVCacheWrapper
    return {each.__name__: each for each in (flash_attn_interface, vllm_flash_attn, flashinfer)}
