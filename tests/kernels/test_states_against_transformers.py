"""Kernels with recurrent states give the numbers of transformers' functions in float32.

transformers adds the terms of sums in another order, so each result differs by some roundings. A sum of n products has
an error of about sqrt(n) 2^-24 of its terms; the limits are several times that for n = 128 and 20 rows.
"""

import importlib

import pytest
import torch
from state_cases import state_batch, state_columns

from octavo.kernels.operations.gated_delta import gated_delta
from octavo.kernels.operations.gated_norm import gated_norm
from octavo.kernels.operations.mamba2 import mamba2
from octavo.kernels.operations.short_conv import short_conv
from octavo.kernels.state_batch import matrix_states

NUM_ROWS = 20
LIMITS = {"rtol": 2**-17, "atol": 2**-17}


def modeling(name):
    """Import a model of transformers, which takes seconds."""
    return importlib.import_module(f"transformers.models.{name}.modeling_{name}")


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5"])
def test_gated_delta_equals_transformers(name, kernels, generator):
    their = modeling(name)
    key_heads, heads, depth, columns = 2, 4, 128, 64
    width = key_heads * depth
    qkv = torch.randn(NUM_ROWS, 2 * width + heads * columns, generator=generator)
    a, b = torch.randn(2, NUM_ROWS, heads, generator=generator)
    log_decay, dt_bias = torch.randn(2, heads, generator=generator)
    state = matrix_states(1, heads, depth, columns).normal_(generator=generator)
    before = state_columns(state).clone()
    out = torch.empty(NUM_ROWS, heads * columns)
    batch = state_batch([NUM_ROWS], [0], [0])
    kept = qkv[:0], a[:0], b[:0]
    gated_delta(kernels, qkv, a, b, *kept, -log_decay.exp(), dt_bias, state, batch, key_heads, False, out)
    query, key, value = qkv.unsqueeze(0).split([width, width, heads * columns], dim=2)
    expected, after = their.torch_recurrent_gated_delta_rule(
        query.unflatten(2, (key_heads, depth)),
        key.unflatten(2, (key_heads, depth)),
        value.unflatten(2, (heads, columns)),
        g=(-log_decay.exp() * torch.nn.functional.softplus(a + dt_bias)).unsqueeze(0),
        beta=b.sigmoid().unsqueeze(0),
        initial_state=before,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    torch.testing.assert_close(out, expected[0].flatten(1), **LIMITS)
    torch.testing.assert_close(state_columns(state), after, **LIMITS)


@pytest.mark.parametrize("name", ["mamba2", "granitemoehybrid"])
def test_mamba2_equals_transformers(name, kernels, generator):
    their = modeling(name)
    groups, heads, depth, columns = 2, 4, 128, 64
    xbc = torch.randn(NUM_ROWS, heads * columns + 2 * groups * depth, generator=generator)
    dt = torch.randn(NUM_ROWS, heads, generator=generator)
    log_decay, dt_bias, skip = torch.randn(3, heads, generator=generator)
    state = matrix_states(1, heads, depth, columns).normal_(generator=generator)
    expected_state = state_columns(state).mT.contiguous()
    out = torch.empty(NUM_ROWS, heads * columns)
    batch, decay = state_batch([NUM_ROWS], [0], [0]), -log_decay.exp()
    limits = 0.0, float("inf")
    mamba2(kernels, xbc, dt, xbc[:0], dt[:0], dt_bias, decay, skip, *limits, state, batch, groups, out)
    x, keys, queries = xbc.split([heads * columns, groups * depth, groups * depth], dim=1)
    for row in range(NUM_ROWS):
        expected = their.mamba2_selective_state_update(
            expected_state,
            x[row].view(1, heads, columns),
            dt[row].view(1, heads, 1).expand(-1, -1, columns),
            decay.view(heads, 1, 1).expand(-1, columns, depth),
            keys[row].view(1, groups, depth),
            queries[row].view(1, groups, depth),
            D=skip.unsqueeze(1),
            dt_bias=dt_bias.unsqueeze(1),
            dt_softplus=True,
        )
        torch.testing.assert_close(out[row], expected.flatten(), rtol=2**-17, atol=2**-13)  # terms of about 10
    torch.testing.assert_close(state_columns(state).mT, expected_state, rtol=2**-17, atol=2**-17)


def test_convolution_equals_transformers(kernels, generator):
    their = modeling("qwen3_next")
    channels, width = 80, 4
    x, weight = torch.randn(NUM_ROWS, channels, generator=generator), torch.randn(channels, width, generator=generator)
    bias, expected_state = torch.randn(channels, generator=generator), torch.zeros(1, channels, width - 1)
    state, out = torch.full((1, width - 1, channels), 3.0), torch.empty(NUM_ROWS, channels)
    taps = weight.t().contiguous()
    for rows, read in ((slice(0, 7), -1), (slice(7, 9), 0), (slice(9, NUM_ROWS), 0)):
        batch = state_batch([rows.stop - rows.start], [read], [0])
        short_conv(kernels, x[rows], x[:0], taps, bias, state, batch, True, out[rows])
        inputs = x[rows].t().unsqueeze(0)
        expected = their.causal_conv1d_update(inputs, expected_state, weight, bias, "silu")
        torch.testing.assert_close(out[rows], expected[0].t(), rtol=2**-21, atol=2**-21)
        assert torch.equal(state[0], expected_state[0].t())
    whole = their.causal_conv1d_fn(x.t().unsqueeze(0), weight, bias, "silu")
    torch.testing.assert_close(out, whole[0].t(), rtol=2**-21, atol=2**-21)


def test_gated_norms_equal_transformers(kernels, generator):
    x, gate = torch.randn(2, NUM_ROWS, 256, generator=generator)
    weight, found = torch.rand(256, generator=generator), torch.empty(NUM_ROWS, 256)
    after = modeling("qwen3_next").Qwen3NextRMSNormGated(64, eps=1e-6)
    after.weight.data.copy_(weight[:64])
    gated_norm(kernels, x, gate, weight[:64], 1e-6, 64, False, found)
    expected = after(x.view(-1, 64), gate.view(-1, 64)).view(x.shape)
    torch.testing.assert_close(found, expected.detach(), rtol=2**-20, atol=2**-24)
    before = modeling("mamba2").MambaRMSNormGated(256, 128, eps=1e-6)
    before.weight.data.copy_(weight)
    gated_norm(kernels, x, gate, weight, 1e-6, 128, True, found)
    torch.testing.assert_close(found, before(x, gate).detach(), rtol=2**-20, atol=2**-24)
