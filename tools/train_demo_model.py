"""Train octavo's built-in model and its smaller sibling from a seed, without other data.

The steps: write text with `demo_data`, train a byte-level BPE tokenizer on it, train a Qwen3 model on the assistant's
turns (Muon for the matrices, AdamW for the rest), and export a complete Hugging Face directory in bfloat16. A second
stage, `tools`, continues from those weights and teaches tool calls, with text of `demo_tools` and of the first stage.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import demo_data
import demo_tools
import torch
from demo_tokenizer import load_tokenizer, render, train_tokenizer, write_tokenizer
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  the name all torch code has for it

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tokenizers import Tokenizer

EPILOG = """
examples:
  python tools/train_demo_model.py                      train everything
  python tools/train_demo_model.py --resume             go on after an interruption
  python tools/train_demo_model.py --model tools --from FOLDER
                                                        the second stage alone, from the weights of a folder
  python tools/train_demo_model.py --steps 300 --model tools --from FOLDER --work build/trial --output build/trial
                                                        a short trial that leaves the packaged model alone

The same seed, step count and thread count give the same weights on the same machine and torch version. Checkpoints
and logs live in build/demo_model/. Judge the outcome with tools/eval_demo_model.py.
"""


@dataclass(frozen=True)
class Shape:
    """The dimensions of a Qwen3 model and how long it is trained."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    steps: int
    vocab: int = 1536
    rate: float = 1.0  # of the peak learning rate
    batch_tokens: int = 3072
    row_tokens: int = 256
    rope_theta: float = 10000.0
    eps: float = 1e-6


@dataclass
class Batch:
    """Token rows, their successors, and which successors count in the loss."""

    inputs: Tensor
    targets: Tensor
    counted: Tensor


def shape_of(name: str) -> Shape:
    """Return the dimensions of the `main` model, its second stage `tools`, or the `draft` model."""
    main = Shape(hidden=256, layers=4, heads=4, kv_heads=2, head_dim=64, intermediate=384, steps=4000)
    if name == "main":
        return main
    if name == "tools":
        return replace(main, steps=6000, rate=0.5, batch_tokens=1536, row_tokens=384)
    return Shape(hidden=128, layers=2, heads=2, kv_heads=2, head_dim=64, intermediate=192, steps=1600)


class RMSNorm(torch.autograd.Function):
    """y = x / rms(x) * weight over the last dimension; torch's own takes two thirds longer on a CPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Compute the norm; save the normed rows and their scale for the backward pass."""
        square_mean = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square().div_(x.shape[-1])
        scale = square_mean.add_(eps).rsqrt_()
        normed = x * scale
        ctx.save_for_backward(normed, scale, weight)
        weighted: Tensor = normed * weight
        return weighted

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        """Remove the part of the gradient that would change the root mean square."""
        normed, scale, weight = ctx.saved_tensors
        inner = grads[0] * normed
        along = (inner @ weight).div_(-normed.shape[-1]).unsqueeze(-1)
        return torch.addcmul(grads[0] * weight, normed, along).mul_(scale), inner.flatten(0, -2).sum(0), None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise the last dimension of x."""
    return cast("Tensor", RMSNorm.apply(x, weight, eps))  # type: ignore[no-untyped-call]


class Layer(nn.Module):
    """One Qwen3 decoder layer with fused projections."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.split = [q, kv, kv]
        self.input_norm = nn.Parameter(torch.ones(shape.hidden))
        self.post_norm = nn.Parameter(torch.ones(shape.hidden))
        self.q_norm = nn.Parameter(torch.ones(shape.head_dim))
        self.k_norm = nn.Parameter(torch.ones(shape.head_dim))
        self.qkv = nn.Parameter(torch.randn(q + 2 * kv, shape.hidden) * shape.hidden**-0.5)
        self.o = nn.Parameter(torch.zeros(shape.hidden, q))
        self.gate_up = nn.Parameter(torch.randn(2 * shape.intermediate, shape.hidden) * shape.hidden**-0.5)
        self.down = nn.Parameter(torch.zeros(shape.hidden, shape.intermediate))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Add attention and the MLP to the residual stream."""
        shape = self.shape
        rows, length, _ = x.shape
        normed = rms_norm(x, self.input_norm, shape.eps)
        q, k, v = torch.split(F.linear(normed, self.qkv), self.split, dim=-1)
        q = q.reshape(rows, length, shape.heads, shape.head_dim)
        k = k.reshape(rows, length, shape.kv_heads, shape.head_dim)
        v = v.reshape(rows, length, shape.kv_heads, shape.head_dim).transpose(1, 2)
        q = rotate(rms_norm(q, self.q_norm, shape.eps), cos, sin).transpose(1, 2)
        k = rotate(rms_norm(k, self.k_norm, shape.eps), cos, sin).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + F.linear(mixed.transpose(1, 2).reshape(rows, length, -1), self.o)
        return x + self.mlp(rms_norm(x, self.post_norm, shape.eps))

    def mlp(self, x: Tensor) -> Tensor:
        """Return the gated MLP's output for normalised states."""
        gate, up = F.linear(x, self.gate_up).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self.down)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary position embedding to [rows, length, heads, head_dim]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Trunk(nn.Module):
    """A Qwen3 model up to its final norm; the embedding is also the output projection."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Parameter(torch.randn(shape.vocab, shape.hidden) * 0.05)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.Parameter(torch.ones(shape.hidden))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the final hidden states of [rows, length] tokens."""
        half = torch.arange(0, self.shape.head_dim, 2) / self.shape.head_dim
        angles = torch.outer(torch.arange(tokens.shape[1]).float(), self.shape.rope_theta**-half)[:, None, :]
        cos, sin = angles.cos(), angles.sin()
        x = F.embedding(tokens, self.embedding)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return rms_norm(x, self.norm, self.shape.eps)


class Muon:
    """Momentum orthogonalised by Newton-Schulz iterations, over stacks of equally shaped matrices."""

    def __init__(self, params: list[nn.Parameter], momentum: float = 0.95, decay: float = 0.01) -> None:
        self.groups: dict[torch.Size, list[nn.Parameter]] = {}
        for param in params:
            self.groups.setdefault(param.shape, []).append(param)
        self.buffers = {shape: torch.zeros(len(group), *shape) for shape, group in self.groups.items()}
        self.momentum, self.decay = momentum, decay

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Update every matrix from its gradient."""
        for shape, group in self.groups.items():
            grads = torch.stack([param.grad for param in group if param.grad is not None])
            buffer = self.buffers[shape]
            buffer.lerp_(grads, 1 - self.momentum)
            update = orthogonal(grads.lerp(buffer, self.momentum)) * max(1.0, shape[0] / shape[1]) ** 0.5
            for param, delta in zip(group, update, strict=True):
                param.mul_(1 - rate * self.decay).sub_(delta, alpha=rate)


def orthogonal(matrices: Tensor, rounds: int = 5) -> Tensor:
    """Bring the singular values of a stack of matrices near one."""
    tall = matrices.shape[-2] > matrices.shape[-1]
    x: Tensor = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(rounds):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if tall else x


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """Return the id of a token that must be in the vocabulary."""
    found = tokenizer.token_to_id(token)
    assert found is not None
    return int(found)


def encode_rows(tokenizer: Tokenizer, texts: list[str], length: int) -> list[list[int]]:
    """Encode texts and cut them at `length` tokens."""
    return [encoding.ids[:length] for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)]


def counted_positions(ids: list[int], start: list[int], end: int) -> list[bool]:
    """Return True for tokens of the assistant: all after `start` up to and including the next `end`."""
    counted, speaking = [], False
    for index, token in enumerate(ids):
        counted.append(speaking)
        if speaking and token == end:
            speaking = False
        elif not speaking and token == start[-1] and ids[index + 1 - len(start) : index + 1] == start:
            speaking = True
    return counted


def to_batch(rows: list[list[int]], tokenizer: Tokenizer) -> Batch:
    """Pad rows to one length and mark what counts in the loss."""
    start = tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False).ids
    end, pad = token_id(tokenizer, "<|im_end|>"), token_id(tokenizer, "<|endoftext|>")
    width = max(map(len, rows))
    tokens = torch.full((len(rows), width), pad, dtype=torch.long)
    counted = torch.zeros(len(rows), width, dtype=torch.bool)
    for index, row in enumerate(rows):
        tokens[index, : len(row)] = torch.tensor(row)
        counted[index, : len(row)] = torch.tensor(counted_positions(row, start, end))
    return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), counted[:, 1:].contiguous())


def training_text(rng: random.Random, stage: str, phase: int, more: float) -> str:
    """Return one conversation. In the stage `tools` 60 % offer tools, and a few need a tool without offering one."""
    chance = rng.random() if stage == "tools" else 1.0
    if chance < 0.6:
        messages, tools = demo_tools.conversation(rng, more)
        return render(messages, tools=tools)
    if chance < 0.64:
        example = demo_tools.sample(rng, demo_tools.make_untold)
        return render([*example.prompt(), {"role": "assistant", "content": example.answer}])
    return render(demo_data.conversation(rng, more=more, phase=phase))


def training_batch(tokenizer: Tokenizer, seed: int, step: int, stage: str, shape: Shape) -> Batch:
    """Return the batch of one step, a function of the seed: every eighth has 1,024 tokens a row, others have fewer."""
    is_tools = stage == "tools"
    rng = random.Random(f"train:tools:{seed}:{step}" if is_tools else f"train:{seed}:{step}")
    phase = 2 if is_tools else phase_of(step, shape.steps)
    length, more = (1024, 0.9) if step % 8 == 7 else (shape.row_tokens, 0.6)
    texts = []
    for _ in range(shape.batch_tokens // length):
        text = ""
        while len(text) < length * 6:
            text += training_text(rng, stage, phase, more) + "<|endoftext|>"
        texts.append(text)
    rows = encode_rows(tokenizer, texts, length + 1)
    assert all(len(row) == length + 1 for row in rows)
    return to_batch(rows, tokenizer)


@torch.no_grad()
def held_out_accuracy(
    trunk: nn.Module, embedding: Tensor, tokenizer: Tokenizer, count: int, tool_tasks: tuple[str, ...] = ()
) -> dict[str, float]:
    """Return exact match per task: greedy decoding gives the answer exactly if each of its tokens is the likeliest."""
    scores = {}
    for task in (*demo_data.CHECKABLE_TASKS, *tool_tasks):
        examples = (demo_tools if task in tool_tasks else demo_data).questions(task, count, seed=1)
        texts = [render([*e.prompt(), {"role": "assistant", "content": e.answer}], tools=e.tools) for e in examples]
        batch = to_batch(encode_rows(tokenizer, texts, 1024), tokenizer)
        last = last_answer(batch, tokenizer)
        guessed = (trunk(batch.inputs) @ embedding.T).argmax(-1)
        scores[task] = ((guessed == batch.targets) | ~last).all(dim=1).float().mean().item()
    return scores


def last_answer(batch: Batch, tokenizer: Tokenizer) -> Tensor:
    """Return the counted positions of each row's final assistant turn."""
    ends = (batch.targets == token_id(tokenizer, "<|im_end|>")) & batch.counted
    turns_after = ends.flip(1).cumsum(1).flip(1)
    return batch.counted & (turns_after == 1)


def phase_of(step: int, steps: int) -> int:
    """Return the phase of training to which a step belongs: two of 42.5 % each, then a last one of 15 %."""
    return (40 * step >= 17 * steps) + (40 * step >= 34 * steps)


def schedule(step: int, steps: int) -> float:
    """Return the factor of the learning rate: a short warm-up, 1 for a sixth of the steps, then linear to nearly 0."""
    return min(1.0, (step + 1) / 50) * max(0.01, min(1.0, 1.2 * (1 - step / steps)))


class Trainer:
    """One model with its optimizers, its checkpoint file and its log."""

    def __init__(self, name: str, shape: Shape, tokenizer: Tokenizer, args: argparse.Namespace) -> None:
        torch.manual_seed(args.seed)
        self.name, self.shape, self.tokenizer, self.args = name, shape, tokenizer, args
        self.folder = Path(args.work) / name
        self.folder.mkdir(parents=True, exist_ok=True)
        self.trunk = Trunk(shape)
        matrices = [p for n, p in self.trunk.named_parameters() if p.ndim == 2 and n != "embedding"]
        others = [p for n, p in self.trunk.named_parameters() if p.ndim == 1 or n == "embedding"]
        self.muon = Muon(matrices)
        self.adam = torch.optim.AdamW(others, lr=3e-3, betas=(0.9, 0.98), weight_decay=0.0)
        self.step, self.seconds, self.tokens, self.loss = 0, 0.0, 0, math.nan

    def save(self) -> None:
        """Write the checkpoint, replacing the former one only when complete."""
        state = {
            "model": self.trunk.state_dict(),
            "muon": self.muon.buffers,
            "adam": self.adam.state_dict(),
            "progress": (self.step, self.seconds, self.tokens, self.loss, self.args.seed),
        }
        torch.save(state, self.folder / "checkpoint.tmp")
        (self.folder / "checkpoint.tmp").rename(self.folder / "checkpoint.pt")

    def resume(self) -> None:
        """Continue from the checkpoint if there is one."""
        path = self.folder / "checkpoint.pt"
        if not path.exists():
            return
        state = torch.load(path, weights_only=True)
        self.trunk.load_state_dict(state["model"])
        self.muon.buffers = state["muon"]
        self.adam.load_state_dict(state["adam"])
        self.step, self.seconds, self.tokens, self.loss, seed = state["progress"]
        if seed != self.args.seed:
            raise SystemExit(f"{path} was trained with --seed {seed}, not {self.args.seed}")

    def train_step(self) -> float:
        """Do one update; return its loss."""
        shape = self.shape
        batch = training_batch(self.tokenizer, self.args.seed, self.step, self.name, shape)
        factor = shape.rate * schedule(self.step, shape.steps)
        hidden = self.trunk(batch.inputs)[batch.counted]
        loss = F.cross_entropy(F.linear(hidden, self.trunk.embedding), batch.targets[batch.counted])
        torch.autograd.backward(loss)
        self.muon.step(self.args.rate * factor)
        for group in self.adam.param_groups:
            group["lr"] = 3e-3 * factor
        self.adam.step()
        self.trunk.zero_grad()
        self.step += 1
        self.tokens += batch.inputs.numel()
        return loss.item()

    def run(self, deadline: float) -> bool:
        """Train until the last step (returns True) or the deadline (returns False)."""
        last_report = last_save = last_tick = time.monotonic()
        while self.step < self.shape.steps and time.monotonic() < deadline:
            loss = self.train_step()
            self.loss = loss if math.isnan(self.loss) else 0.98 * self.loss + 0.02 * loss
            now = time.monotonic()
            self.seconds, last_tick = self.seconds + now - last_tick, now
            if self.step % 100 == 0:
                self.log(f"loss {self.loss:.4f}")
            if now - last_report > self.args.report_every:
                self.report(self.args.questions)
                last_report = time.monotonic()
            if now - last_save > 240:
                self.save()
                last_save = time.monotonic()
        self.save()
        return self.step == self.shape.steps

    def report(self, count: int) -> dict[str, float]:
        """Log the held-out accuracy per task."""
        tool_tasks = demo_tools.TOOL_TASKS if self.name == "tools" else ()
        scores = held_out_accuracy(self.trunk, self.trunk.embedding, self.tokenizer, count, tool_tasks)
        mean = sum(scores.values()) / len(scores)
        self.log(f"held-out {mean:.1%}: " + " ".join(f"{task} {score:.0%}" for task, score in scores.items()))
        return scores

    def log(self, text: str) -> None:
        """Print a line and append it to the log file."""
        line = (
            f"{self.name} step {self.step}/{self.shape.steps} {self.seconds / 60:.1f} min {self.tokens / 1e6:.2f} Mtok "
            f"{text}"
        )
        print(line, flush=True)
        with (self.folder / "log.txt").open("a") as file:
            file.write(line + "\n")


def named_weights(trunk: Trunk) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights with their Hugging Face names."""
    yield "model.embed_tokens.weight", trunk.embedding
    yield "model.norm.weight", trunk.norm
    for index, layer in enumerate(trunk.layers):
        assert isinstance(layer, Layer)
        prefix = f"model.layers.{index}."
        q, k, v = torch.split(layer.qkv, layer.split)
        gate, up = layer.gate_up.chunk(2)
        attention = {"q_proj": q, "k_proj": k, "v_proj": v, "o_proj": layer.o}
        attention |= {"q_norm": layer.q_norm, "k_norm": layer.k_norm}
        for name, weight in attention.items():
            yield f"{prefix}self_attn.{name}.weight", weight
        for name, weight in {"gate_proj": gate, "up_proj": up, "down_proj": layer.down}.items():
            yield f"{prefix}mlp.{name}.weight", weight
        yield f"{prefix}input_layernorm.weight", layer.input_norm
        yield f"{prefix}post_attention_layernorm.weight", layer.post_norm


@torch.no_grad()
def load_weights(trunk: Trunk, folder: Path) -> None:
    """Load the weights of an exported model."""
    stored = load((folder / "model.safetensors").read_bytes())
    for name, weight in named_weights(trunk):
        weight.copy_(stored[name])


def model_config(shape: Shape, tokenizer: Tokenizer) -> dict[str, object]:
    """Return the content of config.json."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": shape.eps,
        "rope_theta": shape.rope_theta,
        "rope_scaling": None,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": shape.layers,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": token_id(tokenizer, "<|im_end|>"),
        "pad_token_id": token_id(tokenizer, "<|endoftext|>"),
        "torch_dtype": "bfloat16",
    }


def export(trainer: Trainer, folder: Path) -> None:
    """Write the complete Hugging Face directory of a trained model."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: weight.detach().to(torch.bfloat16).contiguous() for name, weight in named_weights(trainer.trunk)}
    (folder / "model.safetensors").write_bytes(save(weights, metadata={"format": "pt"}))
    tokenizer = trainer.tokenizer
    ends = [token_id(tokenizer, "<|im_end|>"), token_id(tokenizer, "<|endoftext|>")]
    generation = {"eos_token_id": ends, "pad_token_id": ends[1], "do_sample": False}
    for name, value in {
        "config.json": model_config(trainer.shape, tokenizer),
        "generation_config.json": generation,
    }.items():
        (folder / name).write_text(json.dumps(value, indent=2) + "\n")
    write_tokenizer(tokenizer, folder)
    size = sum(path.stat().st_size for path in folder.iterdir())
    count = sum(weight.numel() for weight in weights.values())
    trainer.log(f"wrote {folder}: {count:,} parameters, {size:,} bytes")


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", choices=("main", "tools", "draft", "all"), default="all", help="which model or stage (default all)"
    )
    parser.add_argument(
        "--from", dest="start", help="model folder that the stage tools begins with (default: what main wrote)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of text, tokenizer and weights (default 0)")
    parser.add_argument("--steps", type=int, help="updates per model (default: the number of the accepted training)")
    parser.add_argument(
        "--minutes", type=float, help="stop after this many minutes without exporting; --resume goes on"
    )
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoints in the work folder")
    parser.add_argument(
        "--threads", type=int, default=2, help="threads; part of what makes weights reproducible (default 2)"
    )
    parser.add_argument("--rate", type=float, default=0.02, help="Muon's peak learning rate (default 0.02)")
    parser.add_argument("--questions", type=int, default=20, help="held-out questions per task while training")
    parser.add_argument("--report-every", type=float, default=180, help="seconds between held-out reports")
    parser.add_argument("--work", default="build/demo_model", help="folder of checkpoints and logs")
    parser.add_argument("--output", default="src/octavo/assets", help="folder to write demo/ and demo-draft/ into")
    return parser.parse_args()


def main() -> None:
    """Train and export the chosen models."""
    args = parse_arguments()
    torch.set_num_threads(args.threads)
    deadline = time.monotonic() + 60 * args.minutes if args.minutes else math.inf
    work = Path(args.work)
    if not (args.resume and (work / "tokenizer.json").exists()):
        work.mkdir(parents=True, exist_ok=True)
        train_tokenizer(args.seed, shape_of("main").vocab).save(str(work / "tokenizer.json"))
    tokenizer = load_tokenizer(work / "tokenizer.json")
    outputs = {
        "main": work / "main" / "model",
        "tools": Path(args.output) / "demo",
        "draft": Path(args.output) / "demo-draft",
    }
    for name in outputs if args.model == "all" else (args.model,):
        shape = shape_of(name)
        if args.steps:
            shape = replace(shape, steps=args.steps)
        trainer = Trainer(name, shape, tokenizer, args)
        if name == "tools":
            load_weights(trainer.trunk, Path(args.start) if args.start else outputs["main"])
        if args.resume:
            trainer.resume()
        if trainer.run(deadline):
            export(trainer, outputs[name])
            trainer.report(100)
        else:
            print(f"{name}: stopped at step {trainer.step} of {shape.steps}, nothing exported; go on with --resume")


if __name__ == "__main__":
    main()
