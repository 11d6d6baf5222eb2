"""Models with Mamba-2: tokens are `==` in every schedule, with every number of threads and instruction set."""

import pytest
from kernels_available import INSTRUCTION_SETS
from test_exactness import SCHEDULES, Schedule, answers, check, make_engine, make_requests, needs_kernels
from test_recurrent_models import CHOSEN, NUM_TRIED

from octavo.models.random_weights import tiny_config, write_checkpoint

pytestmark = needs_kernels
CONFIGS = {
    "granite": (
        "GraniteMoeHybridForCausalLM",
        {"layer_types": ["mamba", "attention", "mamba"], "num_hidden_layers": 3},
    ),
    "nemotron": ("NemotronHForCausalLM", {"hybrid_override_pattern": "M-ME*E-M", "num_hidden_layers": 8}),
}


@pytest.fixture(scope="module", params=CONFIGS)
def checkpoint(request, tmp_path_factory):
    name, changes = CONFIGS[request.param]
    config = tiny_config(name, vocab_size=1500, **changes)
    return write_checkpoint(tmp_path_factory.mktemp("mamba") / "model", config, std=0.1)


@pytest.fixture(scope="module")
def alone(checkpoint):
    known = {}

    def run(dtype, isa="auto"):
        if (dtype, isa) not in known:
            engine = make_engine(checkpoint, dtype, Schedule("alone", max_num_seqs=1, prefix_caching=False), "cpu", isa)
            known[dtype, isa] = answers(engine, make_requests()[:NUM_TRIED])
        return known[dtype, isa]

    return run


@pytest.mark.sweep(16)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int4", "bfloat16 with int8 KV"])
@pytest.mark.parametrize("schedule", [each for each in SCHEDULES if each.name in CHOSEN], ids=lambda each: each.name)
def test_tokens_of_mamba_are_equal_in_every_schedule(checkpoint, alone, schedule, dtype):
    engine = make_engine(checkpoint, dtype, schedule, "cpu")
    assert answers(engine, make_requests()[:NUM_TRIED]) == alone(dtype)


@pytest.mark.sweep(8)
@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
@pytest.mark.parametrize("num_threads", [1, 3])
def test_tokens_of_mamba_are_equal_with_every_number_of_threads(checkpoint, alone, isa, num_threads):
    schedule = Schedule("chunks_of_7", threshold=7, num_threads=num_threads)
    check(make_engine(checkpoint, "bfloat16", schedule, "cpu", isa), schedule, alone("bfloat16", isa))
