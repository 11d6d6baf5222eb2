"""Hidden states of a prompt as one vector: sums continue over steps, and restart when the prompt does."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch

from octavo import SamplingParams
from octavo.outputs import ErrorCode
from octavo.worker.host_copies import SharedMemory
from octavo.worker.pooler import Pooler

HIDDEN = torch.from_numpy(np.random.default_rng(1).normal(size=(24, 8)).astype(np.float32))


def pool(pooler: Pooler, position: int, count: int, *, pooling: str | None = "mean", is_complete: bool = False) -> dict:
    """Pool one step of one request."""
    request = SimpleNamespace(request_id="a", row=0, sampling_params=SamplingParams(max_tokens=1, pooling=pooling))
    inputs = SimpleNamespace(requests=[request], output_start=np.array([0, count]), sampled=[0] if is_complete else [])
    batch = SimpleNamespace(num_computed_tokens=np.array([position]))
    errors: dict[str, str] = {}
    hidden = HIDDEN[position : position + count].clone()
    taken = pooler.take(inputs, hidden, batch, SharedMemory(), errors)  # type: ignore[arg-type]
    hidden.fill_(np.nan)  # as the next step may do, which is launched before this one is read
    return pooler.pool(taken, errors) | errors


def values(result: dict) -> np.ndarray:
    return np.frombuffer(result["a"], np.float32)


def test_mean_pooling_does_not_depend_on_chunks():
    whole = pool(Pooler(), 0, 24, is_complete=True)
    np.testing.assert_allclose(values(whole), HIDDEN.numpy().mean(axis=0), rtol=1e-5)
    for cuts in ([1] * 24, [7, 7, 7, 3], [23, 1]):
        pooler, position = Pooler(), 0
        for count in cuts:
            result = pool(pooler, position, count, is_complete=position + count == 24)
            position += count
        assert result == whole


def test_last_pooling_returns_last_hidden_state():
    pooler = Pooler()
    assert pool(pooler, 0, 20, pooling="last") == {}
    result = pool(pooler, 20, 4, pooling="last", is_complete=True)
    assert values(result).tolist() == HIDDEN[23].tolist()
    assert pool(pooler, 0, 24, pooling=None, is_complete=True) == {}


def test_recomputed_prompt_restarts_mean_pooling(caplog):
    whole = pool(Pooler(), 0, 24, is_complete=True)
    pooler = Pooler()
    pool(pooler, 0, 9)
    assert pool(pooler, 0, 24, is_complete=True) == whole  # preempted, its KV released
    pool(pooler, 0, 5)
    pooler.forget(["a"])
    assert pool(pooler, 5, 3) == {"a": ErrorCode.REQUEST_FAILED}
    assert "5 positions of a" in caplog.text
