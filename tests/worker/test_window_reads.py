"""Layers with a window find the positions they see in window blocks, and never read blocks before the window.

`Steps` replaces the core: after each step, it takes away blocks that no later row reads, fills them with NaN, and
replaces their table entries by blocks that do not exist.
"""

from dataclasses import dataclass, field, replace

import pytest
import torch
from kernel_backends import ISAS, compiled_kernels

from octavo.data.scheduler_output import CachedRequestData, NewRequestData, SchedulerOutput
from octavo.kernels.reference import ReferenceKernels
from octavo.models.loader import load_model
from octavo.models.random_weights import tiny_config, write_checkpoint
from octavo.models.registry import read_architecture
from octavo.models.weight_source import FolderWeights
from octavo.sampling_params import SamplingParams
from octavo.worker.kv_cache import PagedKVCache
from octavo.worker.model_runner import ModelRunner

CPU = torch.device("cpu")
BLOCK_SIZE, MOST_TOKENS, MAX_MODEL_LEN = 16, 64, 256
WINDOW = 37
NOWHERE = 2**30


@pytest.fixture(autouse=True)
def one_thread():
    """As in the worker: torch's threads would spin on the cores that the kernels use."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@dataclass
class Running:
    """The core's view of a request."""

    tokens: list[int]
    block_ids: list[int]
    num_computed: int = 0
    window_ids: list[list[int]] = field(default_factory=list)  # by bounded group


class Steps:
    """A runner, and the window blocks of its requests. frees_blocks: take blocks away once they are before the
    window.
    """

    def __init__(self, model, kernels, kv_dtype, *, frees_blocks):
        layout = model.architecture.kv_layout
        self.frees_blocks = frees_blocks
        self.kinds = [group.kind for group in layout.kv_groups[1:]]
        num_window_blocks = 14 if frees_blocks else 60
        self.cache = PagedKVCache(
            layout,
            num_blocks=[60, *(num_window_blocks for _ in self.kinds)],
            block_size=BLOCK_SIZE,
            dtype=kv_dtype,
            device=CPU,
        )
        for each in self.cache.memory:
            each.view(torch.uint8).fill_(0xFF)  # NaN, and scales of NaN
        self.runner = ModelRunner(
            model, kernels, self.cache,
            max_num_seqs=4, max_num_batched_tokens=MOST_TOKENS, max_model_len=MAX_MODEL_LEN,
        )  # fmt: skip
        self.requests: dict[str, Running] = {}
        self.free = [list(range(num_window_blocks)) for _ in self.kinds]
        self.num_steps = 0
        self.most_held = 0

    def start(self, name, tokens, block_ids, num_computed=0, like=None):
        """Add a request. like: a request with window blocks that hold the computed tokens of this one."""
        window_ids = [[] for _ in self.kinds]
        self.requests[name] = Running([*tokens], block_ids, num_computed, window_ids)
        if like is not None:
            for kind, own, found in zip(self.kinds, window_ids, self.requests[like].window_ids, strict=True):
                first, end = self.first_seen(kind, num_computed), -(-num_computed // BLOCK_SIZE)
                own.extend([-1] * first + found[first:end])
        return name

    def first_seen(self, kind, num_computed):
        """Return the first block that the row at this position reads."""
        return kind.first_position(num_computed) // BLOCK_SIZE

    def step(self, new=(), **counts):
        """Compute the given number of tokens of each request; return hidden states and the requests to sample."""
        cached = CachedRequestData([], [[], *([] for _ in self.kinds)], [])
        for name, count in counts.items():
            request = self.requests[name]
            if name not in new:
                cached.req_ids.append(name)
                cached.new_block_ids[0].append([])
                cached.num_computed_tokens.append(request.num_computed)
            for ids, free, told in zip(request.window_ids, self.free, cached.new_block_ids[1:], strict=True):
                num_missing = -(-(request.num_computed + count) // BLOCK_SIZE) - len(ids)
                taken = [free.pop(self.num_steps % len(free)) for _ in range(num_missing)]
                ids.extend(taken)
                if name not in new:
                    told.append(taken)
        scheduled = SchedulerOutput(
            self.num_steps, [self.new_data(name) for name in new], cached, counts, sum(counts.values())
        )
        seen, forward = [], type(self.runner).forward
        self.runner.forward = lambda inputs: (seen.append(forward(self.runner, inputs)), seen[0])[1]
        sampled = self.runner.execute(scheduled).sampled_token_ids
        for name, count in counts.items():
            self.requests[name].num_computed += count
            self.requests[name].tokens += sampled.get(name, [])
        self.num_steps += 1
        for group in range(len(self.kinds)):
            held = self.held(group)
            self.most_held = max(self.most_held, len(held))
            if self.frees_blocks:
                self.free_behind_windows(group, held)
        return seen[0].clone(), sampled

    def new_data(self, name):
        request = self.requests[name]
        return NewRequestData(
            name, request.tokens, len(request.tokens), SamplingParams(temperature=0.0), 0, 0, frozenset(),
            [request.block_ids, *request.window_ids], request.num_computed,
        )  # fmt: skip

    def held(self, group):
        return {index for request in self.requests.values() for index in request.window_ids[group] if index >= 0}

    def free_behind_windows(self, group, held):
        for name, request in self.requests.items():
            behind = self.first_seen(self.kinds[group], request.num_computed)
            request.window_ids[group][:behind] = [-1] * behind
            row = self.runner.batch.requests[name].row
            tables = self.runner.batch.block_tables[group + 1]
            tables[row, : max(behind - 1, 0)] = NOWHERE  # the last of them stays unchanged
        for index in held - self.held(group):
            self.cache.groups[group + 1].blocks[index].view(torch.uint8).fill_(0xFF)
            self.free[group].append(index)


def architecture_of(kind, path):
    """A window in every other layer ("two": the third layer has another one), or in all."""
    if kind == "all":
        return read_architecture(
            write_checkpoint(path, tiny_config("MistralForCausalLM", sliding_window=WINDOW), std=0.1)
        )
    layer_types = ["sliding_attention", "full_attention"] * 2
    config = tiny_config("Gemma3ForCausalLM", num_hidden_layers=4, layer_types=layer_types, sliding_window=WINDOW)
    architecture = read_architecture(write_checkpoint(path, config, std=0.1))
    layers = list(architecture.layers)
    if kind == "two":
        layers[2] = replace(layers[2], attention=replace(layers[2].attention, window=5))
    if kind == "last":
        layers.append(layers.pop(0))
    return replace(architecture, layers=tuple(layers))


@pytest.mark.sweep(32)
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("kind", ["mixed", "last", "all", "two"])
@pytest.mark.parametrize("name", ["reference", *ISAS])
def test_blocks_before_window_are_never_read(name, kind, kv_dtype, tmp_path):
    """The bits equal those of a run in which every block stays, with the model's own code instead of its recording."""
    kernels = ReferenceKernels() if name == "reference" else compiled_kernels(name)
    architecture = architecture_of(kind, tmp_path)
    model = load_model(
        FolderWeights(tmp_path), architecture, kernels, dtype="bfloat16", device=CPU, max_model_len=MAX_MODEL_LEN,
        load_format="dummy",
    )  # fmt: skip
    frees, keeps = (Steps(model, kernels, kv_dtype, frees_blocks=each) for each in (True, False))
    keeps.runner.forward_pass._is_recorded = True
    tokens = torch.randint(2, 500, (3, 200), generator=torch.Generator().manual_seed(5)).tolist()

    def both(new=(), **counts):
        results = [steps.step(new, **counts) for steps in (frees, keeps)]
        assert results[0][0].isfinite().all()
        assert torch.equal(results[0][0], results[1][0]), counts
        assert results[0][1] == results[1][1]

    def start(*args, **options):
        keeps.start(*args, **options)
        return frees.start(*args, **options)

    both([start("a", tokens[0][:150], list(range(12)))], a=40)
    both([start("b", tokens[1][:20], list(range(12, 20)))], a=43, b=20)
    both(a=13, b=1)
    # Another request finds a's first 96 tokens, of which its layers with a window see the last 36.
    both([start("c", tokens[0][:96] + tokens[2][:9], [*range(6), *range(20, 30)], 96, like="a")], a=1, b=1, c=5)
    both(a=53, b=1, c=4)
    for _ in range(20):
        both(a=1, b=1, c=1)
    assert (frees.runner.forward_pass.recorded is None) == (name == "reference")
    assert keeps.runner.forward_pass.recorded is None
    assert frees.most_held <= 14 < keeps.most_held
