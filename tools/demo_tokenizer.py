"""The built-in model's tokenizer: a small byte-level BPE with ChatML, trained on text of `demo_data`."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING

import demo_data
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

if TYPE_CHECKING:
    from pathlib import Path

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def render(messages: list[demo_data.Message], generation_prompt: bool = False) -> str:
    """The chat template, written out in Python."""
    text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
    return text + "<|im_start|>assistant\n" if generation_prompt else text


def train_tokenizer(seed: int, vocab: int, conversations: int = 12000) -> Tokenizer:
    """Train the BPE on training conversations and on the words and names that may occur in them.

    Letters, digits and everything else are split apart, so a word has the same tokens wherever it stands: after a
    space, a quote or nothing. Every digit is a token of its own.
    """
    rng = random.Random(f"tokenizer:{seed}")
    words = [word for word in demo_data.word_list() if not demo_data.is_held_out(f"word:{word}")]
    texts = [m["content"] for _ in range(conversations) for m in demo_data.conversation(rng)]
    texts += [word for word in words for _ in range(300)]
    texts += [name for name in demo_data.name_list() for _ in range(300)]
    texts += ["system\nuser\nassistant\n"] * 3000
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{L}+|\p{N}|[^\p{L}\p{N}]+"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    assert tokenizer.get_vocab_size() == vocab, tokenizer.get_vocab_size()
    return tokenizer


def load_tokenizer(path: Path) -> Tokenizer:
    """Read a tokenizer.json."""
    return Tokenizer.from_file(str(path))


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
