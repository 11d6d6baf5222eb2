"""Train a small mixture of experts, and a dense model of the same active size, to measure quantized experts.

    python tools/train_mixture.py build/mixture --steps 600
    python benchmarks/perplexity.py build/mixture/mixture --text build/mixture/held_out.txt --skip-speed

The text is that of the built-in model (`demo_data`), and every token counts in the loss. The mixture has the Qwen3-MoE
architecture, the dense model Qwen3's. Both read the same tokens in the same order, and a token passes the same number
of MLP columns in both. Writes the folders `mixture` and `dense` in Hugging Face's layout, the file `held_out.txt`
with text of another seed, and `report.json` with the models' losses on that text and the mixture's routing.

Routing is reported for each layer: the entropy of the experts' shares of all choices, divided by the entropy of equal
shares; and the mean entropy of a token's probabilities over the experts, divided likewise.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import train_demo_model as demo
from demo_tokenizer import load_tokenizer, train_tokenizer, write_tokenizer
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  the name all torch code has for it

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tokenizers import Tokenizer

NUM_EXPERTS, NUM_CHOSEN = 16, 4
BALANCE = 0.01  # weight of the loss that balances the experts (Fedus et al. 2021, "Switch Transformers", section 2.2)
HELD_OUT_ROWS = 64  # of 512 tokens


@dataclass
class Routing:
    """The choices of one layer during a forward pass."""

    probabilities: Tensor  # [tokens, experts]
    chosen: Tensor  # [tokens, NUM_CHOSEN]


class MixtureLayer(demo.Layer):
    """A decoder layer whose MLP is divided among experts."""

    def __init__(self, shape: demo.Shape) -> None:
        super().__init__(shape)
        del self.gate_up, self.down
        width, columns = shape.hidden, shape.intermediate // NUM_CHOSEN
        self.router = nn.Parameter(torch.randn(NUM_EXPERTS, width) * width**-0.5)
        self.gate_ups = nn.ParameterList(torch.randn(2 * columns, width) * width**-0.5 for _ in range(NUM_EXPERTS))
        self.downs = nn.ParameterList(torch.randn(width, columns) * 0.1 * columns**-0.5 for _ in range(NUM_EXPERTS))
        self.routing: Routing | None = None

    def mlp(self, x: Tensor) -> Tensor:
        """Return the weighted sum of the chosen experts' outputs."""
        return self.chosen_experts(x.flatten(0, -2)).view(x.shape)

    def chosen_experts(self, x: Tensor) -> Tensor:
        """Do the same for rows [tokens, hidden], and remember the routing."""
        probabilities = F.linear(x, self.router).softmax(-1)
        weights, chosen = probabilities.topk(NUM_CHOSEN, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        self.routing = Routing(probabilities, chosen)
        out = torch.zeros_like(x)
        for expert in range(NUM_EXPERTS):
            token, place = (chosen == expert).nonzero(as_tuple=True)
            gate, up = F.linear(x[token], self.gate_ups[expert]).chunk(2, dim=-1)
            product = F.linear(F.silu(gate) * up, self.downs[expert])
            out = out.index_add(0, token, product * weights[token, place, None])
        return out

    def balance_loss(self) -> Tensor:
        """Return 1 if the experts are chosen equally often, more if they are not."""
        assert self.routing is not None
        shares = F.one_hot(self.routing.chosen, NUM_EXPERTS).float().mean((0, 1))
        return NUM_EXPERTS * (shares * self.routing.probabilities.mean(0)).sum()


class MixtureTrunk(demo.Trunk):
    """The model with `MixtureLayer`s."""

    def __init__(self, shape: demo.Shape) -> None:
        super().__init__(shape)
        self.layers = nn.ModuleList(MixtureLayer(shape) for _ in range(shape.layers))


@dataclass
class Run:
    """One model in training."""

    name: str
    trunk: demo.Trunk
    losses: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        matrices, others = list[nn.Parameter](), list[nn.Parameter]()
        for name, each in self.trunk.named_parameters():
            is_matrix = each.ndim == 2 and name != "embedding" and not name.endswith("router")
            (matrices if is_matrix else others).append(each)
        self.muon = demo.Muon(matrices)
        self.adam = torch.optim.AdamW(others, lr=3e-3, betas=(0.9, 0.98), weight_decay=0.0)

    def step(self, tokens: Tensor, factor: float) -> None:
        """Update the model from rows [rows, length + 1]."""
        loss = self.loss(tokens)
        self.losses.append(loss.item())
        for layer in self.trunk.layers:
            if isinstance(layer, MixtureLayer):
                loss = loss + BALANCE * layer.balance_loss()
        for each in self.trunk.parameters():  # an expert that no token chose has no gradient
            each.grad = torch.zeros_like(each)
        torch.autograd.backward(loss)
        self.muon.step(0.02 * factor)
        for group in self.adam.param_groups:
            group["lr"] = 3e-3 * factor
        self.adam.step()

    def loss(self, tokens: Tensor) -> Tensor:
        """Return the mean negative log likelihood of the tokens after the first of each row, in nats."""
        hidden = self.trunk(tokens[:, :-1])
        return F.cross_entropy(F.linear(hidden, self.trunk.embedding).flatten(0, 1), tokens[:, 1:].flatten())


def rows_of_text(tokenizer: Tokenizer, rng: random.Random, rows: int, length: int) -> tuple[Tensor, str]:
    """Return tokens [rows, length] and their text, conversations one after another."""
    text = ""
    while len(text) < rows * length * 6:
        text += demo.training_text(rng, "main", 0, 0.6) + "<|endoftext|>"
    ids = tokenizer.encode(text, add_special_tokens=False).ids[: rows * length]
    assert len(ids) == rows * length
    return torch.tensor(ids).view(rows, length), text


def entropy(shares: Tensor) -> Tensor:
    """Return the entropy of the last dimension divided by that of equal shares."""
    return -(shares * shares.clamp_min(1e-20).log()).sum(-1) / math.log(shares.shape[-1])


def routing_report(trunk: demo.Trunk) -> list[dict[str, float]]:
    """Return the routing of the last forward pass, for each layer."""
    reports = []
    for layer in trunk.layers:
        assert isinstance(layer, MixtureLayer)
        assert layer.routing is not None
        shares = F.one_hot(layer.routing.chosen, NUM_EXPERTS).float().mean((0, 1))
        reports.append(
            {
                "entropy_of_shares": round(entropy(shares).item(), 4),
                "entropy_of_a_token": round(entropy(layer.routing.probabilities).mean().item(), 4),
                "largest_share_of_mean": round((shares.max() * NUM_EXPERTS).item(), 3),
            }
        )
    return reports


def expert_weights(trunk: demo.Trunk) -> Iterator[tuple[str, Tensor]]:
    """Yield the mixture's weights with their Hugging Face names."""
    yield "model.embed_tokens.weight", trunk.embedding
    yield "model.norm.weight", trunk.norm
    for index, layer in enumerate(trunk.layers):
        assert isinstance(layer, MixtureLayer)
        prefix = f"model.layers.{index}."
        q, k, v = torch.split(layer.qkv, layer.split)
        attention = {"q_proj": q, "k_proj": k, "v_proj": v, "o_proj": layer.o}
        for name, weight in (attention | {"q_norm": layer.q_norm, "k_norm": layer.k_norm}).items():
            yield f"{prefix}self_attn.{name}.weight", weight
        yield f"{prefix}mlp.gate.weight", layer.router
        for expert in range(NUM_EXPERTS):
            gate, up = layer.gate_ups[expert].chunk(2)
            for name, weight in {"gate_proj": gate, "up_proj": up, "down_proj": layer.downs[expert]}.items():
                yield f"{prefix}mlp.experts.{expert}.{name}.weight", weight
        yield f"{prefix}input_layernorm.weight", layer.input_norm
        yield f"{prefix}post_attention_layernorm.weight", layer.post_norm


def config_of(run: Run, tokenizer: Tokenizer) -> dict[str, object]:
    """Return the content of the model's config.json."""
    config = demo.model_config(run.trunk.shape, tokenizer)
    if run.name == "dense":
        return config
    return config | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": NUM_EXPERTS,
        "num_experts_per_tok": NUM_CHOSEN,
        "moe_intermediate_size": run.trunk.shape.intermediate // NUM_CHOSEN,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def export(run: Run, tokenizer: Tokenizer, folder: Path) -> None:
    """Write a model's directory."""
    folder.mkdir(parents=True, exist_ok=True)
    named = demo.named_weights(run.trunk) if run.name == "dense" else expert_weights(run.trunk)
    weights = {name: weight.detach().to(torch.bfloat16).contiguous() for name, weight in named}
    (folder / "model.safetensors").write_bytes(save(weights, metadata={"format": "pt"}))
    (folder / "config.json").write_text(json.dumps(config_of(run, tokenizer), indent=2) + "\n")
    write_tokenizer(tokenizer, folder)


def main() -> None:
    """Train both models in turns and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--steps", type=int, default=600, help="of 3,072 tokens (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    options.output.mkdir(parents=True, exist_ok=True)
    shape = replace(demo.shape_of("main"), steps=options.steps)
    train_tokenizer(options.seed, shape.vocab).save(str(options.output / "tokenizer.json"))
    tokenizer = load_tokenizer(options.output / "tokenizer.json")
    held_out, text = rows_of_text(tokenizer, random.Random(f"held out:{options.seed}"), HELD_OUT_ROWS, 512)
    (options.output / "held_out.txt").write_text(text, encoding="utf-8")
    runs = [Run("mixture", MixtureTrunk(shape)), Run("dense", demo.Trunk(shape))]
    begin = time.monotonic()
    for step in range(options.steps):
        rng = random.Random(f"mixture:{options.seed}:{step}")
        tokens, _ = rows_of_text(tokenizer, rng, 12, 257)
        for run in runs:
            run.step(tokens, demo.schedule(step, options.steps))
        if (step + 1) % 25 == 0:
            last = ", ".join(f"{run.name} {sum(run.losses[-25:]) / 25:.4f}" for run in runs)
            print(f"step {step + 1}/{options.steps}, {(time.monotonic() - begin) / 60:.1f} min: {last}", flush=True)
    report: dict[str, object] = {"steps": options.steps, "tokens": options.steps * 12 * 256}
    with torch.no_grad():
        for run in runs:
            export(run, tokenizer, options.output / run.name)
            parameters = sum(each.numel() for each in run.trunk.parameters())
            report[run.name] = {"parameters": parameters, "held_out_loss": round(run.loss(held_out).item(), 4)}
    report["routing"] = routing_report(runs[0].trunk)
    (options.output / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
