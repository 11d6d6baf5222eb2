"""The built-in model's tokenizer: a small byte-level BPE with ChatML, trained on text of `demo_data`."""

from __future__ import annotations

import json
import random
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import demo_data
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from octavo.engine.chat_template import ChatTemplate

if TYPE_CHECKING:
    from pathlib import Path

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = """\
{%- macro type_of(schema) %}
    {%- if schema is not mapping %}
        {{- 'any' }}
    {%- elif schema.enum is defined %}
        {{- schema.enum | join('|') }}
    {%- elif schema.anyOf is defined %}
        {{- type_of(schema.anyOf | rejectattr('type', 'equalto', 'null') | first) }}
    {%- elif schema.type is string %}
        {{- schema.type }}
    {%- else %}
        {{- (schema.type or ['any']) | reject('equalto', 'null') | join('|') }}
    {%- endif %}
{%- endmacro %}
{%- macro signature(tool) %}
    {{- tool.name + '(' }}
    {%- for name, schema in ((tool.parameters or {}).properties or {}) | items %}
        {{- (', ' if not loop.first else '') + name + ('' if name in tool.parameters.required else '?') + ': ' }}
        {{- type_of(schema) }}
    {%- endfor %}
    {{- ')' }}
{%- endmacro %}
{%- macro written(call) %}
    {{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
    {{- call.arguments if call.arguments is string else call.arguments | tojson }}
    {{- '}\\n</tool_call>' }}
{%- endmacro %}
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {{- (messages[0]['content'] or '') + '\\n\\n' if messages[0]['role'] == 'system' }}
    {{- 'Tools:' }}
    {%- for tool in tools %}
        {{- '\\n' + signature(tool.function if tool.function is defined else tool) }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if not (tools and loop.first and message['role'] == 'system') %}
        {{- '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n' if message['content'] or not loop.first }}
            {{- written(call.function if call.function is defined else call) }}
        {%- endfor %}
        {{- '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


@lru_cache(maxsize=1)
def chat_template() -> ChatTemplate:
    """Return the chat template as an object that renders conversations with octavo's own code."""
    return ChatTemplate(CHAT_TEMPLATE)


def render(
    messages: list[demo_data.Message], generation_prompt: bool = False, tools: list[dict[str, Any]] | None = None
) -> str:
    """Return the text of a conversation."""
    return chat_template().render(messages, add_generation_prompt=generation_prompt, tools=tools)


def train_tokenizer(seed: int, vocab: int, conversations: int = 12000) -> Tokenizer:
    """Train the BPE on training conversations and on the words and names that may occur in them.

    Letters, digits and all other characters are split apart, so a word has the same tokens after a space, after a quote
    and at the beginning. Every digit is a token of its own.
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
