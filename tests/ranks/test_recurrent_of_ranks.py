"""Ranks divide recurrent layers by heads and channels, and give the tokens and log probabilities of one process."""

from __future__ import annotations

from dataclasses import replace

import pytest
from gguf_files import write_gguf
from rank_threads import RankThread
from safetensors.torch import load_file, save_file
from scripted_drafts import ScriptedProposer, let_propose, verify_all
from test_exactness import SCHEDULES, Schedule, answers, make_engine, make_requests, needs_kernels
from test_tokens_of_ranks import results
from typer.testing import CliRunner

from octavo import LLM
from octavo.cli import app
from octavo.errors import ConfigError
from octavo.kernels import quantization
from octavo.models.random_weights import tiny_config, write_checkpoint
from octavo.models.registry import read_architecture
from octavo.models.share import Share
from octavo.ranks import leader
from octavo.worker import worker
from octavo.worker.kv_cache import PagedKVCache

pytestmark = needs_kernels
FORMATS = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int4": {"dtype": "bfloat16", "quantization": "int4"},
}
DELTA, CONV, MIXTURE = "Qwen3_5ForCausalLM", "Lfm2ForCausalLM", "Lfm2MoeForCausalLM"
GRANITE, NEMOTRON = "GraniteMoeHybridForCausalLM", "NemotronHForCausalLM"
MODELS = {
    "gated delta net": (DELTA, {}),
    "heads that do not divide evenly": (
        DELTA,
        {"linear_num_key_heads": 5, "linear_num_value_heads": 10, "num_attention_heads": 8, "num_key_value_heads": 4},
    ),
    "ranks with the same key head": (DELTA, {"linear_num_key_heads": 1, "linear_num_value_heads": 7}),
    "biases of attention": (DELTA, {"attention_bias": True}),
    "convolutions": (CONV, {"conv_bias": True}),
    "channels that do not divide evenly": (CONV, {"hidden_size": 72, "num_attention_heads": 4}),
    "convolutions and experts": (MIXTURE, {}),
    "a norm over the heads of all ranks": (GRANITE, {"mamba_proj_bias": True}),
    "groups with own norms": (NEMOTRON, {"n_groups": 4, "use_bias": True, "mlp_bias": True}),
    "latent inputs of experts": (NEMOTRON, {"moe_latent_size": 72, "mlp_bias": True}),
    "groups that do not divide evenly": (NEMOTRON, {"n_groups": 5, "mamba_num_heads": 10}),
    "ranks with the same group": (NEMOTRON, {"n_groups": 1, "mamba_num_heads": 10}),
    "gated delta nets and experts": ("Qwen3_5MoeForCausalLM", {}),
    "inputs of key heads together": ("Qwen3NextForCausalLM", {"linear_num_key_heads": 4, "linear_num_value_heads": 8}),
}
CHOSEN = {"crowd", "chunks_of_1", "chunks_of_7", "few_blocks", "swapped", "warm_cache", "ahead_few_blocks"}
SCHEDULES_AND_METHODS = [
    pytest.param(each, method, id=f"{each.name}-{method}")
    for each in SCHEDULES
    for method in ("none", "suffix")
    if each.name in CHOSEN and (method == "none" or not each.name.startswith("ahead"))
]
NUM_TRIED = 12


@pytest.fixture(autouse=True)
def _ranks_are_threads(monkeypatch):
    monkeypatch.setattr(leader, "start_process", RankThread)


def write(path, family, **changes):
    return write_checkpoint(path / "model", tiny_config(family, **{"vocab_size": 500} | changes), std=0.1)


@pytest.mark.sweep(12)
@pytest.mark.parametrize("number_format", FORMATS)
@pytest.mark.parametrize("model", MODELS)
def test_ranks_of_recurrent_models_give_tokens_of_one_process(model, number_format, tmp_path):
    family, changes = MODELS[model]
    path, options = write(tmp_path, family, **changes), FORMATS[number_format]
    expected = results(path, 1, **options)
    for count in (2, 4):
        assert results(path, count, **options) == expected, count


@pytest.mark.sweep(6)
@pytest.mark.parametrize("number_format", FORMATS)
@pytest.mark.parametrize("family", [MIXTURE, "Qwen3_5MoeForCausalLM", "Qwen3NextForCausalLM", GRANITE, NEMOTRON])
def test_ranks_of_recurrent_models_with_own_experts_give_tokens_of_one_process(family, number_format, tmp_path):
    key = {GRANITE: "num_local_experts", NEMOTRON: "n_routed_experts"}.get(family, "num_experts")
    latents = {"moe_latent_size": 72} if family == NEMOTRON else {}
    path, options = write(tmp_path, family, **{key: 7}, **latents), FORMATS[number_format]
    expected = results(path, 1, **options)
    for count in (2, 4):
        assert results(path, count, enable_expert_parallel=True, **options) == expected, count


@pytest.mark.sweep(5)
@pytest.mark.parametrize("kind", ["BF16", "Q8_0"])
@pytest.mark.parametrize("heads", [(2, 4), (1, 6), (3, 9), (2, 8), (5, 5)])
def test_ranks_of_gguf_files_with_tiled_heads_give_tokens_of_one_process(heads, kind, tmp_path):
    """Among four ranks and with 3 key heads, a rank has value heads of two tiles."""
    sizes = dict(zip(("linear_num_key_heads", "linear_num_value_heads"), heads, strict=True))
    folder = write(tmp_path, DELTA, linear_key_head_dim=32, linear_value_head_dim=32, vocab_size=320, **sizes)
    path = write_gguf(folder, tmp_path / "model.gguf", kind=kind)
    expected = results(path, 1)
    for count in (2, 4):
        assert results(path, count) == expected, count


@pytest.mark.sweep(2)
@pytest.mark.parametrize("kind", ["BF16", "Q8_0"])
def test_ranks_of_gguf_files_with_convolutions_give_tokens_of_one_process(kind, tmp_path):
    folder = write(tmp_path, CONV, vocab_size=320, hidden_size=128, head_dim=32)
    path = write_gguf(folder, tmp_path / "model.gguf", kind=kind, kinds={"conv": "F32"})
    expected = results(path, 1)
    for count in (2, 4):
        assert results(path, count) == expected, count


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Models with several recurrent layers, and attention between them."""
    kinds = ["linear_attention", "full_attention", "linear_attention"]
    of_conv = ["conv" if kind != "full_attention" else kind for kind in kinds]
    layers = {DELTA: kinds, CONV: of_conv, MIXTURE: of_conv, GRANITE: kinds}
    changes = {family: {"num_hidden_layers": 3, "layer_types": types} for family, types in layers.items()}
    changes[NEMOTRON] = {"hybrid_override_pattern": "M-ME*E-M", "num_hidden_layers": 8}
    return {
        family: write(tmp_path_factory.mktemp("recurrent"), family, vocab_size=1500, **each)
        for family, each in changes.items()
    }


@pytest.fixture(scope="module")
def alone(checkpoints):
    known = {}

    def run(family, dtype):
        if (family, dtype) not in known:
            schedule = Schedule("alone", max_num_seqs=1, prefix_caching=False)
            engine = make_engine(checkpoints[family], dtype, schedule, "cpu")
            known[family, dtype] = answers(engine, make_requests()[:NUM_TRIED])
        return known[family, dtype]

    return run


@pytest.mark.sweep(96)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("family", [DELTA, CONV, MIXTURE, GRANITE, NEMOTRON])
@pytest.mark.parametrize(("schedule", "method"), SCHEDULES_AND_METHODS)
def test_ranks_of_recurrent_models_give_equal_tokens_in_every_schedule(
    checkpoints, alone, schedule, method, family, count, dtype
):
    """Method suffix drafts the answers of the first round in the second one."""
    by_expert, rounds = family in {MIXTURE, NEMOTRON} and count == 2, 2 if method == "suffix" else schedule.rounds
    device = ("tensor_parallel_size", count), ("enable_expert_parallel", by_expert), ("rank_timeout_s", 60.0)
    engine = make_engine(checkpoints[family], dtype, replace(schedule, method=method, device=device), "cpu")
    requests, expected = make_requests()[:NUM_TRIED], alone(family, dtype)
    for _ in range(rounds):
        got = answers(engine, requests)
        for index, (_, params) in enumerate(requests):
            if rounds == 1 or params.seed is not None or params.is_greedy:
                assert got[index] == expected[index], index
    stats = engine.core.metrics.stats
    engine.shutdown()
    assert (stats.num_preemptions > 0) == (schedule.num_blocks is not None)
    assert stats.prefix_cache_hits > 0 or schedule.threshold == 1 or not schedule.prefix_caching


@pytest.mark.parametrize("family", [DELTA, NEMOTRON])
def test_ranks_replay_the_rows_of_accepted_drafts(checkpoints, alone, family):
    requests = make_requests()[:NUM_TRIED]
    texts = {str(index): prompt + alone(family, "bfloat16")[index][0] for index, (prompt, _) in enumerate(requests)}
    device = ("tensor_parallel_size", 2), ("rank_timeout_s", 60.0)
    engine = make_engine(checkpoints[family], "bfloat16", Schedule("drafts", device=device, method="suffix"), "cpu")
    let_propose(engine, ScriptedProposer(texts, 2, 0.7))
    verify_all(engine)
    assert answers(engine, requests) == alone(family, "bfloat16")
    drafts = engine.core.metrics.stats.drafts
    engine.shutdown()
    assert drafts.num_draft_tokens > drafts.num_accepted_tokens > 20


def test_ranks_swap_their_states(checkpoints, alone, monkeypatch):
    copy, groups = PagedKVCache.copy, {"swap_out": set(), "swap_in": set()}

    def watch(cache, copies):
        for name, seen in groups.items():
            seen.update((cache.groups[-1].block_bytes, group) for group, *_ in getattr(copies, name))
        return copy(cache, copies)

    monkeypatch.setattr(PagedKVCache, "copy", watch)
    (swapped,) = [each for each in SCHEDULES if each.name == "swapped"]
    device = ("tensor_parallel_size", 2), ("rank_timeout_s", 60.0)
    engine = make_engine(checkpoints[DELTA], "bfloat16", replace(swapped, device=device), "cpu")
    assert answers(engine, make_requests()[:NUM_TRIED]) == alone(DELTA, "bfloat16")
    (states,) = {cache.groups[-1].block_bytes for cache in engine.core.executor.worker.runner.kv_caches}
    engine.shutdown()
    assert groups["swap_out"] == groups["swap_in"] == {(states, 0), (states, 1)}


def test_choice_of_minima_does_not_depend_on_the_order_of_rows(tmp_path, monkeypatch):
    """Gates are stored between queries, and minima pay only for gates. One process samples a query and a gate."""
    path = write(tmp_path, DELTA)
    (file,) = path.glob("*.safetensors")
    tensors = load_file(file)
    (name,) = [each for each in tensors if each.endswith("q_proj.weight")]
    gates = tensors[name].view(4, 2, -1, tensors[name].shape[1])[:, 1]
    gates.abs_().add_(1.0)
    save_file(tensors, file)
    monkeypatch.setattr(quantization, "_SAMPLED_ROWS", 2)
    assert results(path, 2, **FORMATS["int4"]) == results(path, 1, **FORMATS["int4"])


# --- memory


@pytest.mark.parametrize("family", [DELTA, CONV, NEMOTRON])
def test_each_rank_has_its_part_of_the_states(family, checkpoints):
    whole = read_architecture(checkpoints[family])
    layout, shares = whole.kv_layout, [whole.split(Share(rank, 2)).kv_layout for rank in range(2)]
    assert [2 * each.kept_bytes("float32") for each in shares] == [layout.kept_bytes("float32")] * 2
    assert [2 * each.state_bytes("float32") for each in shares] == [layout.state_bytes("float32")] * 2


def test_states_of_all_ranks_are_within_the_configured_memory(checkpoints):
    infos = []
    for count in (1, 2):
        llm = LLM(
            str(checkpoints[DELTA]), tensor_parallel_size=count, skip_tokenizer_init=True, max_model_len=160,
            num_threads=1, kv_cache_memory_bytes=3 << 20, max_num_seqs=8, rank_timeout_s=60.0,
        )  # fmt: skip
        infos.append(llm.llm_engine.core.executor.worker.info)
        llm.llm_engine.shutdown()
    one, two = infos
    assert one.kv_groups[-1] == two.kv_groups[-1]
    assert one.kv_cache_bytes == two.kv_cache_bytes


def test_ranks_share_the_free_memory_for_states(checkpoints, monkeypatch):
    layout = read_architecture(checkpoints[DELTA]).split(Share(0, 2)).kv_layout
    size = layout.state_bytes("float32") + layout.kept_bytes("float32")
    monkeypatch.setattr(worker, "free_bytes", lambda _: 20 * size)
    schedule = Schedule("two", num_blocks=8, device=(("tensor_parallel_size", 2),), method="none")
    engine = make_engine(checkpoints[DELTA], "float32", schedule, "cpu")
    assert engine.core.executor.worker.scheduler_config.max_num_seqs == 5
    engine.shutdown()


# --- reports and errors


def test_models_command_shows_the_state_of_a_rank(checkpoints):
    shown = CliRunner().invoke(app, ["models", str(checkpoints[DELTA]), "-tp", "2"]).output
    (whole,), (part,) = ([line for line in shown.splitlines() if name in line] for name in ("  state ", "2 ranks"))
    sizes = [float(line.partition("state")[2].split()[0]) for line in (whole, part)]
    assert sizes[0] == pytest.approx(2 * sizes[1], rel=0.01)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        (DELTA, {"linear_num_key_heads": 3, "linear_num_value_heads": 6}, "6 value heads and 3 key heads: choose a"),
        (DELTA, {"linear_num_key_heads": 1, "linear_num_value_heads": 2}, "2 value heads and 1 key heads: choose a"),
        (NEMOTRON, {"n_groups": 3, "mamba_num_heads": 6}, "6 heads and 3 groups of heads: choose a"),
    ],
)
def test_heads_that_ranks_cannot_divide_are_refused(family, changes, message, tmp_path):
    with pytest.raises(ConfigError, match=f"tensor_parallel_size 4 does not suit a model with {message}"):
        results(write(tmp_path, family, **changes), 4)
