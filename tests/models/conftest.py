"""Shared by tests of models: one sequence through a model without an engine, on one thread."""

import pytest
import torch

from octavo.kernels.interface import AttentionBatch
from octavo.kernels.state_batch import StateBatch
from octavo.models.kv_layout import StateShape
from octavo.worker.kv_cache import make_states


@pytest.fixture(autouse=True)
def one_thread():
    """Steps of tiny models are faster on one thread, especially on a busy machine."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


class OneSequenceCache:
    """KV blocks of one sequence, in an arbitrary order."""

    def __init__(self, model, num_blocks, block_size):
        dtype = str(model.dtype).removeprefix("torch.")
        self.layers = []
        layout = model.architecture.kv_layout
        _, states = make_states(layout, 1, 0, model.dtype)
        for number, spec in enumerate(layout.layers):
            if spec.shared_layer is not None:
                self.layers.append(self.layers[spec.shared_layer])
                continue
            if isinstance(spec, StateShape):
                self.layers.append(states[number])
                continue
            size = spec.block_bytes(block_size, dtype) // model.dtype.itemsize
            self.layers.append(spec.views(torch.full((num_blocks, size), float("nan"), dtype=model.dtype), block_size))

    def layer(self, index):
        return self.layers[index]


@pytest.fixture
def prompt_logits():
    """Return a function: (model, token ids, tokens a step) -> logits of every position, float32 [len, vocab].

    cache: with as many blocks as the tokens need; None for a new one.
    """

    def compute(model, token_ids, step=10**9, block_size=16, cache=None):
        num_blocks = -(-len(token_ids) // block_size)
        cache = cache or OneSequenceCache(model, num_blocks, block_size)
        table = torch.arange(num_blocks, dtype=torch.int32).flip(0)
        hidden = []
        for start in range(0, len(token_ids), step):
            end = min(start + step, len(token_ids))
            positions = torch.arange(start, end)
            query_start = torch.tensor([0, end - start], dtype=torch.int32)
            slots = (torch.tensor([slot], dtype=torch.int32) for slot in (0 if start else -1, 0))
            batch = AttentionBatch(
                query_start=query_start,
                seq_lens=torch.tensor([end], dtype=torch.int32),
                block_tables=table[None],
                positions=positions,
                slot_mapping=table[positions // block_size].long() * block_size + positions % block_size,
                block_size=block_size,
                states=StateBatch.plain(query_start, *slots),
            )
            hidden.append(model.forward(torch.tensor(token_ids[start:end]), batch, cache))
        return model.compute_logits(torch.cat(hidden))

    return compute


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)
