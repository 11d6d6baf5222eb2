"""octavo gives the tokens of transformers: random weights, float32, greedy, many prompts in a batch."""

import copy
import inspect

import pytest
import torch
from sdks import transformers
from transformers_cases import CASES, make_prompts

from octavo import LLMEngine, ModelConfig, SamplingParams, SchedulerConfig
from octavo.models.random_weights import write_checkpoint

NUM_TOKENS = 64
MIN_GAP = 1e-4  # between the two best logits of a step; both sides compute them to about 1e-5
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@pytest.mark.sweep(48)
@every_case
def test_greedy_tokens_equal_transformers(case, tmp_path):
    """The oracle reads each prompt followed by octavo's answer, and must choose every token of the answer itself."""
    path = write_checkpoint(tmp_path / "model", case.full_config, seed=case.seed, std=0.1)
    prompts = make_prompts(case.seed)
    oracle = load_oracle(path)
    tokens = generate_staggered(path, prompts)
    for prompt, answer in zip(prompts, tokens, strict=True):
        assert len(answer) == NUM_TOKENS
        assert follows(oracle, prompt, answer, min_gap=MIN_GAP)
        assert len(prompt) < 40 or len(set(answer)) >= 30
    longest = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))[-3:]
    for feature in case.altered:
        altered = ALTERATIONS[feature](oracle)
        same = [follows(altered, prompts[index], tokens[index]) for index in longest]
        assert not any(same), f"the oracle gives the same tokens with another {feature}"


@pytest.mark.turn(8)
@pytest.mark.sweep(112)
@every_case
def test_tokens_equal_transformers_incremental_generation(case, tmp_path):
    """The oracle generates by itself, with its own KV cache, without octavo's answer.

    There are fewer tokens, because 24 prompts one by one take long. The effect of another position or window is visible
    in the 64 tokens of the test above.
    """
    path = write_checkpoint(tmp_path / "model", case.full_config, seed=case.seed, std=0.1)
    prompts = make_prompts(case.seed)
    oracle, num_tokens = load_oracle(path), 20
    assert generate_staggered(path, prompts, num_tokens) == [greedy(oracle, prompt, num_tokens) for prompt in prompts]


def generate_staggered(path, prompts, num_tokens=NUM_TOKENS, max_model_len=None):
    """Add one or two prompts at each step, into batches too small for all of them; return the tokens."""
    engine = LLMEngine(
        model_config=ModelConfig(
            model=str(path), dtype="float32", skip_tokenizer_init=True, max_model_len=max_model_len
        ),
        scheduler_config=SchedulerConfig(max_num_seqs=9, max_num_batched_tokens=150),
    )
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    waiting = list(enumerate(prompts))
    tokens = {}
    while waiting or engine.has_unfinished_requests():
        for index, prompt in waiting[: 1 + len(waiting) % 2]:
            engine.add_request(str(index), {"prompt_token_ids": prompt}, params)
        del waiting[: 1 + len(waiting) % 2]
        for output in engine.step():
            if output.finished:
                tokens[int(output.request_id)] = list(output.outputs[0].token_ids)
    return [tokens[index] for index in range(len(prompts))]


def load_oracle(path):
    return transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    ).eval()


@torch.inference_mode()
def greedy(model, prompt, num_tokens=NUM_TOKENS):
    """Generate one by one with the KV cache of transformers; asserts that no choice is close."""
    is_renamed = "cache" in inspect.signature(model.forward).parameters  # since transformers 5.24
    name = "cache" if is_renamed else "past_key_values"
    ids, cache, tokens = torch.tensor([prompt]), None, []
    for _ in range(num_tokens):
        output = model(input_ids=ids, **{name: cache}, use_cache=True, logits_to_keep=1)
        best = output.logits[0, -1].topk(2)
        assert (best.values[0] - best.values[1]).item() > MIN_GAP
        cache, ids = output[name], best.indices[None, :1]
        tokens.append(best.indices[0].item())
    return tokens


@torch.inference_mode()
def follows(model, prompt, tokens, *, min_gap=None):
    """Return whether greedy generation gives these tokens: by induction, each is the choice after those before it.

    min_gap: asserts that no choice is closer.
    """
    output = model(input_ids=torch.tensor([prompt + tokens[:-1]]), logits_to_keep=len(tokens))
    best = output.logits[0].topk(2)
    if min_gap is not None:
        assert (best.values[:, 0] - best.values[:, 1]).min().item() > min_gap
    return best.indices[:, 0].tolist() == tokens


def with_config(model, **changes):
    """Return the same weights with another configuration."""
    config = copy.deepcopy(model.config)
    for key, value in changes.items():
        setattr(config, key, value)
    config = transformers.AutoConfig.for_model(**config.to_dict())
    altered = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    altered.load_state_dict(model.state_dict())
    return altered.eval()


def with_rope(model, **changes):
    return with_config(model, rope_parameters=model.config.rope_parameters | changes)


def without_scaling(model):
    theta = model.config.rope_parameters["rope_theta"]
    return with_config(model, rope_parameters={"rope_type": "default", "rope_theta": theta})


def without_window(model):
    if not hasattr(model.config, "layer_types"):
        return with_config(model, sliding_window=None)
    layer_types = ["full_attention"] * model.config.num_hidden_layers
    return with_config(model, layer_types=layer_types, sliding_window=None, use_sliding_window=False)


def with_swapped_layer_types(model):
    return with_config(model, layer_types=model.config.layer_types[::-1])


@torch.no_grad()
def with_weights(model, changed, change):
    """Return a copy in which the parameters with these names are changed."""
    altered = copy.deepcopy(model)
    for name, parameter in altered.named_parameters():
        if name.endswith(changed):
            parameter.copy_(change(parameter))
    return altered


def with_inputs(model, part, change):
    """Return a copy in which the rows of z (part 0), xBC (1) or dt (2) of Mamba-2's `in_proj` are changed."""
    mamba = next(each for each in model.modules() if hasattr(each, "A_log"))

    def changed(p):
        parts = list(p.split([mamba.intermediate_size, mamba.conv_dim, mamba.num_heads]))
        parts[part] = change(parts[part])
        return torch.cat(parts)

    return with_weights(model, ("in_proj.weight",), changed)


def with_attribute(model, name, change):
    """Return a copy in which an attribute of modules that is set when they are made is changed."""
    altered = copy.deepcopy(model)
    for module in altered.modules():
        if hasattr(module, name):
            setattr(module, name, change(getattr(module, name)))
    return altered


def with_other_grouping(model):
    """Make each group of query heads read the keys and values of the next group."""
    heads = model.config.num_key_value_heads
    names = tuple(f"{p}_proj.{kind}" for p in "kv" for kind in ("weight", "bias"))
    return with_weights(model, names, lambda p: p.unflatten(0, (heads, -1)).roll(1, 0).flatten(0, 1))


def untied(model):
    altered = copy.deepcopy(model)
    altered.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.flip(1))
    return altered


def with_embeddings_of_another_scale(model):
    altered = copy.deepcopy(model)
    altered.model.embed_tokens.embed_scale *= 2
    return altered


def with_other_grouping_of_fused(model):
    """The same for a matrix of queries, keys and values."""
    config, changed = model.config, ("qkv_proj.weight",)
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads

    def change(p):
        q, k, v = p.unflatten(0, (-1, config.head_dim)).split([heads, kv_heads, kv_heads])
        turned = k.roll(1, 0) if kv_heads > 1 else k.roll(1, 1)
        return torch.cat([q, turned, v]).flatten(0, 1)

    return with_weights(model, changed, change)


def with_other_pairs(model):
    """Rotate other pairs of dimensions of a head."""
    size, names = model.config.head_dim, ("q_proj.weight", "k_proj.weight")
    return with_weights(model, names, lambda p: p.unflatten(0, (-1, size)).roll(1, 1).flatten(0, 1))


def with_rope_of(model, kind, **changes):
    return with_rope(model, **{kind: model.config.rope_parameters[kind] | changes})


def without(model, *norms):
    """Make the norms of these parts' outputs return zeros."""
    return with_weights(model, tuple(f"{norm}.weight" for norm in norms), torch.zeros_like)


QK_NORMS = tuple(f"{name}.weight" for name in ("q_norm", "k_norm", "q_layernorm", "k_layernorm"))
ROUTERS = tuple(f"{name}.weight" for name in ("mlp.gate", "mlp.router", "feed_forward.gate", "mixer.gate"))
EXPERTS = ("experts.gate_up_proj", "experts.down_proj")


def with_kv_of_first(model):
    """Let the layers without keys read those of the first layers of their types."""
    altered = copy.deepcopy(model)
    stored = set()
    for layer in altered.model.layers:
        attention = layer.self_attn
        if not attention.is_kv_shared_layer:
            attention.store_full_length_kv = attention.layer_type not in stored
            stored.add(attention.layer_type)
    return altered


ALTERATIONS = {
    "kv_of_first": with_kv_of_first,
    "rotated_share": lambda model: with_rope_of(model, "full_attention", partial_rotary_factor=1.0),
    "stream_scale": lambda model: with_attribute(model, "layer_scalar", lambda scale: 1.5 * scale),
    "value_norm": lambda model: with_attribute(model, "v_norm", lambda _: torch.nn.Identity()),
    "layer_types_of_values": lambda model: with_weights(model, ("layers.1.self_attn.k_norm.weight",), lambda p: -p),
    "layer_table": lambda model: with_weights(model, ("embed_tokens_per_layer.weight",), lambda p: p.roll(1, 0)),
    "layer_projection": lambda model: with_weights(model, ("per_layer_model_projection.weight",), torch.zeros_like),
    "layer_gate": lambda model: with_weights(model, ("per_layer_input_gate.weight",), lambda p: -p),
    "layer_norm": lambda model: without(model, "post_per_layer_input_norm"),
    "gemma_router": lambda model: with_weights(model, ("router.proj.weight",), lambda p: p.roll(1, 0)),
    "router_scale": lambda model: with_weights(model, ("router.scale",), lambda p: 3 * p),
    "expert_scale": lambda model: with_weights(model, ("router.per_expert_scale",), lambda p: 1 / p.roll(1) - 2),
    "branch_norms": lambda model: without(model, "post_feedforward_layernorm_1", "pre_feedforward_layernorm_2"),
    "experts": lambda model: with_weights(model, EXPERTS, lambda p: p.roll(1, 0)),
    "router": lambda model: with_weights(model, ROUTERS, lambda p: p.roll(1, 0)),
    "granite_experts": lambda model: with_weights(model, EXPERTS, lambda p: p.roll(1, 0)),
    "granite_router": lambda model: with_weights(model, ("moe.router.weight",), lambda p: p.roll(1, 0)),
    "router_bias": lambda model: with_weights(model, ("mlp.router.bias",), lambda p: -3 * p),
    "expert_bias": lambda model: with_weights(model, ("up_proj_bias", "down_proj_bias"), torch.zeros_like),
    "gate_slope": lambda model: with_config(model, swiglu_alpha=0.8),
    "sinks": lambda model: with_weights(model, ("self_attn.sinks",), lambda p: p + 3),
    "normalizing": lambda model: with_config(model, norm_topk_prob=not model.config.norm_topk_prob),
    "choice_bias": lambda model: with_attribute(model, "e_score_correction_bias", lambda bias: bias.roll(1) * 5),
    "expert_choice_bias": lambda model: with_attribute(model, "expert_bias", lambda bias: bias.roll(1) * 5),
    "groups": lambda model: with_config(model, topk_group=1),
    "routed_scale": lambda model: with_config(model, routed_scaling_factor=4.0),
    "score_scale": lambda model: with_attribute(model, "scaling", lambda scale: scale / 1.2),
    "shared_experts": lambda model: with_weights(model, ("shared_experts.down_proj.weight",), torch.zeros_like),
    "latents": lambda model: with_weights(model, ("fc1_latent_proj.weight",), lambda p: p.roll(1)),
    "bias_after_latents": lambda model: with_weights(model, ("fc2_latent_proj.bias",), torch.zeros_like),
    "latent_norm": lambda model: with_weights(model, ("kv_a_layernorm.weight",), lambda p: p.roll(1)),
    "head_keys": lambda model: with_weights(model, ("kv_b_proj.weight",), lambda p: p.roll(1, 0)),
    "bias_of_latents": lambda model: with_weights(model, ("kv_a_proj_with_mqa.bias",), torch.zeros_like),
    "rope_pairs": lambda model: with_config(model, rope_interleave=not model.config.rope_interleave),
    "shared": lambda model: with_weights(model, ("shared_expert.down_proj.weight",), torch.zeros_like),
    "shared_gate": lambda model: with_weights(model, ("shared_expert_gate.weight",), lambda p: -p),
    "embedding_multiplier": lambda model: with_config(model, embedding_multiplier=1.0),
    "logits_scaling": lambda model: with_config(model, logits_scaling=1.0),
    "residual": lambda model: with_config(model, residual_multiplier=1.0),
    "attention_scale": lambda model: with_config(model, attention_multiplier=model.config.head_dim**-0.5),
    "decay": lambda model: with_weights(model, ("A_log",), lambda p: p + 1.5),
    "taps": lambda model: with_weights(model, ("conv1d.weight", "conv.conv.weight"), lambda p: p.flip(2)),
    "delta_gate": lambda model: with_weights(model, ("in_proj_z.weight",), lambda p: -p),
    "conv_bias": lambda model: with_weights(model, ("conv.conv.bias", "conv1d.bias"), torch.zeros_like),
    "conv_gates": lambda model: with_weights(model, ("conv.in_proj.weight",), lambda p: p.roll(len(p) // 3, 0)),
    "conv_output": lambda model: with_weights(model, ("conv.out_proj.weight",), lambda p: p.roll(1, 0)),
    "delta_norm": lambda model: with_weights(model, ("linear_attn.norm.weight",), lambda p: p.roll(1)),
    "output_gate": lambda model: with_weights(model, ("q_proj.weight",), lambda p: p.flip(0)),
    "rates": lambda model: with_weights(model, ("in_proj_b.weight", "in_proj_a.weight"), lambda p: p.roll(1, 0)),
    "key_heads": lambda model: with_weights(model, ("in_proj_qkv.weight",), lambda p: p.roll(len(p) // 4, 0)),
    "mamba_gate": lambda model: with_inputs(model, 0, lambda z: -z),
    "mamba_inputs": lambda model: with_inputs(model, 1, lambda xbc: xbc.roll(1, 0)),
    "mamba_steps": lambda model: with_inputs(model, 2, lambda dt: dt.roll(1, 0)),
    "mamba_norm": lambda model: with_weights(model, ("mamba.norm.weight", "mixer.norm.weight"), lambda p: p.roll(1)),
    "mamba_skip": lambda model: with_weights(model, ("mamba.D", "mixer.D"), torch.zeros_like),
    "mamba_bias": lambda model: with_weights(model, ("in_proj.bias", "out_proj.bias"), torch.zeros_like),
    "step_bias": lambda model: with_weights(model, ("dt_bias",), lambda p: p + 2),
    "step_limits": lambda model: with_config(model, time_step_limit=(0.0, float("inf"))),
    "shared_mlp": lambda model: with_weights(model, ("shared_mlp.output_linear.weight",), torch.zeros_like),
    "least_step": lambda model: with_config(model, time_step_min=1e-6),
    "up_projection": lambda model: with_weights(model, ("mixer.up_proj.weight",), lambda p: -p),
    "epsilon": lambda model: with_config(model, layer_norm_epsilon=1e-6),
    "rotation": lambda model: with_config(model, position_embedding_type=None),
    "joined_rates": lambda model: with_weights(model, ("in_proj_ba.weight",), lambda p: p.roll(1, 0)),
    "joined_inputs": lambda model: with_weights(model, ("in_proj_qkvz.weight",), lambda p: p.roll(len(p) // 4, 0)),
    "short_factor": lambda model: with_rope(model, short_factor=model.config.rope_parameters["long_factor"]),
    "long_factor": lambda model: with_rope(model, long_factor=model.config.rope_parameters["short_factor"]),
    "partial": lambda model: with_rope(model, partial_rotary_factor=1.0),
    "pairs": with_other_pairs,
    "grouping_fused": with_other_grouping_of_fused,
    "rope_everywhere": lambda model: with_config(model, no_rope_layers=[1] * model.config.num_hidden_layers),
    "query_scale": lambda model: with_rope(model, llama_4_scaling_beta=0.0),
    "rope_type": lambda model: with_rope(model, rope_type="default", type="default"),
    "wide_window": lambda model: with_config(model, sliding_window=4096),
    "window_of_all": lambda model: with_config(model, sliding_window=None),
    "after_only": lambda model: without(model, "post_attention_layernorm", "post_feedforward_layernorm"),
    "behind": lambda model: without(model, "post_self_attn_layernorm", "post_mlp_layernorm"),
    "full_scaling": lambda model: with_rope_of(model, "full_attention", rope_type="default"),
    "sliding_theta": lambda model: with_rope_of(model, "sliding_attention", rope_theta=1e3),
    "gelu": lambda model: with_config(model, hidden_act="silu", hidden_activation="silu"),
    "attention_softcap": lambda model: with_config(model, attn_logit_softcapping=None),
    "logit_softcap": lambda model: with_config(model, final_logit_softcapping=None),
    "norm_offset": lambda model: with_weights(model, ("input_layernorm.weight",), lambda p: p - 0.5),
    "embedding_scale": with_embeddings_of_another_scale,
    "query_scalar": lambda model: with_config(model, query_pre_attn_scalar=2 * model.config.query_pre_attn_scalar),
    "scaling": without_scaling,
    "truncate": lambda model: with_rope(model, truncate=True),
    "mscale": lambda model: with_rope(model, mscale=None, mscale_all_dim=None),
    "theta": lambda model: with_rope(model, rope_theta=2.0 * model.config.rope_parameters["rope_theta"]),
    "window": without_window,
    "layer_types": with_swapped_layer_types,
    "bias": lambda model: with_weights(model, ("_proj.bias",), torch.zeros_like),
    "grouping": with_other_grouping,
    "qk_norm": lambda model: with_weights(model, QK_NORMS, torch.ones_like),
    "tied": untied,
}
