"""Make a random checkpoint in Hugging Face layout, for benchmarks and tests.

    python tools/make_checkpoint.py qwen2-0.5b OUT_DIR
    python tools/make_checkpoint.py tiny-llama OUT_DIR --hidden-size 96 --std 0.1 --dtype float32
    python tools/make_checkpoint.py tiny-mistral OUT_DIR --set sliding_window=64 --set rope_theta=1e6

The weights are random (normal, seed 0); the tokenizer is a byte-level BPE trained on the standard library's sources.
Needs no transformers.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from octavo.models.random_weights import DEFAULT_STD, tiny_config, write_checkpoint
from octavo.models.registry import FAMILIES

END_OF_TEXT = "<|endoftext|>"
TOKENIZER_SIZE = 32_000
TINY_TOKENIZER_SIZE = 512  # tiny_config's vocabulary

_BENCHMARK = {
    "vocab_size": 151936,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "torch_dtype": "bfloat16",
}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen2-0.5b": _BENCHMARK
    | {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
    },
    "qwen3-0.6b": _BENCHMARK
    | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
    },
    "olmoe-4-layers": _BENCHMARK
    | {
        "architectures": ["OlmoeForCausalLM"],
        "model_type": "olmoe",
        "vocab_size": 50304,
        "tie_word_embeddings": False,
        "hidden_size": 2048,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
        "max_position_embeddings": 4096,
    },
} | {f"tiny-{name.removesuffix('ForCausalLM').lower()}": tiny_config(name) for name in FAMILIES}


def train_tokenizer(vocab_size: int, max_files: int = 900) -> Tokenizer:
    """Train a byte-level BPE on the sources of Python's standard library."""
    library = Path(os.__file__).parent
    files = sorted(map(str, library.glob("*.py"))) + sorted(map(str, library.glob("*/*.py")))
    files = [file for file in sorted(files) if "site-packages" not in file and "/test" not in file]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train(files[:max_files], trainer)
    return tokenizer


def write_tokenizer(directory: Path, tokenizer: Tokenizer) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_OF_TEXT, "pad_token": END_OF_TEXT}
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("directory", type=Path)
    parser.add_argument("--std", type=float, default=DEFAULT_STD, help="standard deviation of the weights")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), help="default: that of the shape")
    parser.add_argument("--hidden-size", type=int)
    parser.add_argument("--num-hidden-layers", type=int)
    parser.add_argument("--max-shard-bytes", type=int, help="write several files of at most this size")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=JSON", help="any other key of config.json")
    parser.add_argument("--no-tokenizer", action="store_true", help="write the weights only")
    options = parser.parse_args()
    config = dict(SHAPES[options.shape])
    named = {"hidden_size": options.hidden_size, "num_hidden_layers": options.num_hidden_layers}
    config |= {key: value for key, value in named.items() if value is not None}
    if options.dtype:
        config["dtype" if "dtype" in config else "torch_dtype"] = options.dtype
    for assignment in options.set:
        key, _, value = assignment.partition("=")
        config[key] = json.loads(value)
    write_checkpoint(
        options.directory, config, seed=options.seed, std=options.std, max_shard_bytes=options.max_shard_bytes
    )
    if not options.no_tokenizer:
        size = TINY_TOKENIZER_SIZE if options.shape.startswith("tiny-") else TOKENIZER_SIZE
        write_tokenizer(options.directory, train_tokenizer(min(size, config["vocab_size"])))
    print(f"{options.shape}: {options.directory}")


if __name__ == "__main__":
    main()
