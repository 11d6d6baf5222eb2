"""Times of attention for `octavo doctor`."""

from types import SimpleNamespace

import pytest
import torch
from alone_and_crowd import needs_kernels

from octavo.kernels.limits import Limits
from octavo.models.attention import AttentionConfig
from octavo.worker import attention_report
from octavo.worker.attention_report import Attention, AttentionTiming, attention_shapes, measure_attention

LIMITS = Limits(flops=1e12, byte_ops=8e12, bfloat16_flops=4e12, bytes_read=1e10)


def test_shapes_are_those_of_layers_with_paged_attention_each_once():
    many, few = (AttentionConfig(num_heads=n, num_kv_heads=2, head_dim=16, rope=None) for n in (4, 2))
    local = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=16, rope=None, window=9)
    layers = [SimpleNamespace(attention=each) for each in (many, few, None, local, many)]
    assert attention_shapes(SimpleNamespace(layers=layers)) == [(4, 2, 16), (2, 2, 16)]


@needs_kernels
@pytest.mark.parametrize(("kv", "row_bytes"), [("bfloat16", 32), ("float32", 64), ("int8", 20)])
def test_each_timed_call_reads_all_positions_of_other_blocks(kv, row_bytes, monkeypatch):
    from octavo.kernels.cpu import CpuKernels

    calls = []

    class Kernels(CpuKernels):
        def paged_attention(self, q, k_cache, v_cache, batch, *rest):
            calls.append((len(q), int(batch.seq_lens), int(batch.block_tables.min())))
            assert q.shape[1:] == (4, 16)
            result = super().paged_attention(q, k_cache, v_cache, batch, *rest)
            assert torch.isfinite(result).all()
            return result

    monkeypatch.setattr(attention_report, "cold_bytes", lambda: 2 * 8192 * 4 * row_bytes)
    found = list(measure_attention((4, 2, 16), kv, Kernels(num_threads=1)))
    assert [(each.positions, each.rows) for each in found] == [(1024, 1), (1024, 512), (8192, 1), (8192, 512)]
    assert [each.num_bytes for each in found] == [each.positions * 4 * row_bytes for each in found]
    assert all(each.seconds > 0 for each in found)
    assert {call[:2] for call in calls} == {(each.rows, each.positions) for each in found}
    assert {first for rows, length, first in calls if length == 8192} == {0, 512}


@pytest.mark.parametrize(
    ("rows", "kv", "seconds", "share"),
    [(1, "bfloat16", 1.024e-4, 0.5), (512, "bfloat16", 1.6116e-3, 0.125), (512, "float32", 1.6116e-3, 0.5)],
)
def test_share_is_of_the_nearer_limit(rows, kv, seconds, share):
    timing = AttentionTiming(8, 2, 64, kv, rows, 1024, seconds, 512_000)
    found = Attention.of(timing, LIMITS)
    assert found.bytes_per_s == pytest.approx(512_000 / seconds)
    assert found.of_limit == pytest.approx(share, rel=0.01)
