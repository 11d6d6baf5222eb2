"""Train the small Qwen3.5 of `tests/hybrid_conversations` from a seed, without other data.

Its layers are two gated delta nets, gated attention, and a gated delta net. Transformers computes them. The text is
conversations of `demo_tools` with eight tools, in which answers of the last turn begin with reasoning. The tokenizer,
and the directions of the first embedding, are the built-in model's.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import demo_data
import demo_tools
import torch
from demo_text import SYSTEM_PROMPTS
from demo_tokenizer import CHAT_TEMPLATE, load_tokenizer, write_tokenizer
from demo_tool_text import KINDS
from demo_tools import Tool, ToolExample, ToolParameter
from safetensors.torch import load, save
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  the name all torch code has for it
from train_demo_model import Batch, Muon, encode_rows, schedule, to_batch, token_id
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from octavo.assets import built_in_model_path
from octavo.engine.chat_template import ChatTemplate

if TYPE_CHECKING:
    from demo_data import Message
    from tokenizers import Tokenizer

STEPS, ROWS, ROW_TOKENS = 1500, 6, 512
TOOLS = {
    "weather": Tool("weather", "get_weather", (ToolParameter("place", "city", "string"),)),
    "time": Tool("time", "get_time", (ToolParameter("place", "city", "string"),)),
    "add": Tool("add", "add", (ToolParameter("a", "a", "integer"), ToolParameter("b", "b", "integer"))),
    "define": Tool("define", "define_word", (ToolParameter("word", "word", "string"),)),
    "timer": Tool("timer", "set_timer", (ToolParameter("minutes", "minutes", "integer"),)),
    "alarm": Tool("alarm", "set_alarm", (ToolParameter("clock", "time", "string"),)),
    "play": Tool("play", "play_song", (ToolParameter("title", "title", "string"),)),
    "stock": Tool("stock", "get_stock_price", (ToolParameter("symbol", "symbol", "string"),)),
}
_MESSAGE = "{{- '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') }}"
_MESSAGE_WITH_REASONING = """{{- '<|im_start|>' + message['role'] + '\\n' }}
        {%- if message.reasoning_content and loop.index0 > turn.start %}
            {{- '<think>\\n' + message.reasoning_content.strip() + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- message['content'] or '' }}"""
_LAST_TURN = """\
{%- set turn = namespace(start=-1) %}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}
        {%- set turn.start = loop.index0 %}
    {%- endif %}
{%- endfor %}
"""
_GENERATION = "{{- '<|im_start|>assistant\\n' }}"
_GENERATION_WITH_REASONING = "{{- '<|im_start|>assistant\\n<think>\\n' }}"


def hybrid_template() -> str:
    """Return the built-in model's chat template with reasoning, which only the last turn keeps."""
    template = CHAT_TEMPLATE.replace(_MESSAGE, _MESSAGE_WITH_REASONING).replace(_GENERATION, _GENERATION_WITH_REASONING)
    return _LAST_TURN + template


def conversation(rng: random.Random) -> tuple[list[Message], list[dict[str, Any]]]:
    """Return a training conversation of one to ten turns, and its tools."""
    offer = tuple(rng.sample([*TOOLS.values()], rng.randint(2, 6)))
    messages: list[Message] = []
    if rng.random() < 0.5:
        messages.append({"role": "system", "content": rng.choice(SYSTEM_PROMPTS)})
    last = None
    for _ in range(1 if rng.random() < 0.5 else rng.randint(2, 10)):
        last = next_turn(rng, offer, last)
        messages += turn_messages(last)
    return messages, [tool.described for tool in offer]


def next_turn(rng: random.Random, offer: tuple[Tool, ...], last: ToolExample | None) -> ToolExample:
    """Return the next turn: a question about a tool of the last one, one or two calls, or small talk."""
    chance = rng.random()
    if chance < 0.15:
        example = demo_data.sample(rng, "chat")
        return ToolExample("no_call", example.question, example.answer, (), example.history, offer)
    if chance < 0.3 and last and len(last.asks) == 1 and KINDS[last.asks[0].tool.kind].again:
        return demo_tools.answered(rng, demo_tools.again(rng, last))
    maker = demo_tools.make_two_calls if chance > 0.9 else demo_tools.make_call
    return demo_tools.answered(rng, maker(rng, offer))


def turn_messages(example: ToolExample) -> list[Message]:
    """Return the messages of a turn. Reasoning names the calls, or says that results follow."""
    messages = example.prompt()
    thought = "I say the result." if example.results else "I need no tool."
    for message in messages:
        if message["role"] == "assistant" and message["content"] == example.call:
            message["reasoning_content"] = f"I call {' and '.join(ask.tool.name for ask in example.asks)}."
    return [*messages, {"role": "assistant", "content": example.answer, "reasoning_content": thought}]


def training_batch(tokenizer: Tokenizer, template: ChatTemplate, seed: int, step: int) -> Batch:
    """Return the batch of one step, a function of the seed: every fourth has rows of twice the length."""
    rng = random.Random(f"hybrid:{seed}:{step}")
    times, texts = 1 + (step % 4 == 3), []
    for _ in range(ROWS // times):
        text = ""
        while len(text) < ROW_TOKENS * times * 6:
            messages, tools = conversation(rng)
            text += template.render(messages, add_generation_prompt=False, tools=tools) + "<|endoftext|>"
        texts.append(text)
    return to_batch(encode_rows(tokenizer, texts, ROW_TOKENS * times + 1), tokenizer)


def make_model(tokenizer: Tokenizer) -> Qwen3_5ForCausalLM:
    """Return an untrained model."""
    embedding = load((built_in_model_path() / "model.safetensors").read_bytes())["model.embed_tokens.weight"].float()
    config = Qwen3_5TextConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=4,
        layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention"],
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        linear_num_key_heads=1,
        linear_num_value_heads=2,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        tie_word_embeddings=True,
        eos_token_id=token_id(tokenizer, "<|im_end|>"),
        pad_token_id=token_id(tokenizer, "<|endoftext|>"),
        dtype="bfloat16",
    )
    model = Qwen3_5ForCausalLM(config).float()
    with torch.no_grad():
        left, sizes, _ = torch.linalg.svd(embedding - embedding.mean(0), full_matrices=False)
        directions = (left * sizes)[:, : config.hidden_size]
        model.model.embed_tokens.weight.copy_(0.05 * directions / directions.std())
        for layer in model.model.layers:
            mixer = layer.linear_attn.out_proj if hasattr(layer, "linear_attn") else layer.self_attn.o_proj
            mixer.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return model


def is_matrix(name: str, weight: Tensor) -> bool:
    """Return True for the weights that Muon updates."""
    return weight.ndim == 2 and min(weight.shape) > 2 and "embed" not in name


def train(model: Qwen3_5ForCausalLM, tokenizer: Tokenizer, args: argparse.Namespace) -> None:
    """Train the model; print the mean loss of every 50 steps."""
    template = ChatTemplate(hybrid_template())
    named = [*model.named_parameters()]
    muon = Muon([weight for name, weight in named if is_matrix(name, weight)])
    adam = torch.optim.AdamW(
        [weight for name, weight in named if not is_matrix(name, weight)], lr=3e-3, betas=(0.9, 0.98), weight_decay=0.0
    )
    start, losses = time.monotonic(), list[float]()
    for step in range(args.steps):
        batch = training_batch(tokenizer, template, args.seed, step)
        hidden = model.model(batch.inputs, use_cache=False).last_hidden_state[batch.counted]
        loss = F.cross_entropy(model.lm_head(hidden), batch.targets[batch.counted])
        torch.autograd.backward(loss)
        factor = schedule(step, args.steps)
        muon.step(args.rate * factor)
        for group in adam.param_groups:
            group["lr"] = 3e-3 * factor
        adam.step()
        model.zero_grad()
        losses.append(loss.item())
        if step % 50 == 49:
            print(f"step {step + 1} {time.monotonic() - start:.0f} s loss {sum(losses[-50:]) / 50:.4f}", flush=True)
    if not math.isfinite(losses[-1]):
        raise SystemExit("the loss is not a number")


def export(model: Qwen3_5ForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Write the Hugging Face directory, with weights in bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        name: weight.detach().to(torch.bfloat16).contiguous()
        for name, weight in model.named_parameters()
        if name != "lm_head.weight"
    }
    (folder / "model.safetensors").write_bytes(save(weights, metadata={"format": "pt"}))
    config = {"architectures": ["Qwen3_5ForCausalLM"], **model.config.to_diff_dict()}
    config.pop("transformers_version", None)
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    ends = [token_id(tokenizer, "<|im_end|>"), token_id(tokenizer, "<|endoftext|>")]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends, "do_sample": False}) + "\n")
    write_tokenizer(tokenizer, folder)
    (folder / "chat_template.jinja").write_text(hybrid_template())


def main() -> None:
    """Train and export the model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="seed of text and weights (default 0)")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"updates (default {STEPS})")
    parser.add_argument("--threads", type=int, default=1, help="threads (default 1)")
    parser.add_argument("--rate", type=float, default=0.02, help="Muon's peak learning rate (default 0.02)")
    parser.add_argument("--output", default="tests/hybrid_conversations/model", help="folder to write")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    tokenizer = load_tokenizer(built_in_model_path() / "tokenizer.json")
    model = make_model(tokenizer)
    train(model, tokenizer, args)
    export(model, tokenizer, Path(args.output))


if __name__ == "__main__":
    main()
