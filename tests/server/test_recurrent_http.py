"""A server with a real model with recurrent layers: a conversation's next turn starts from a saved state."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from alone_and_crowd import needs_kernels
from test_real_engine import served_engine
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from octavo import CacheConfig, LLMEngine, ModelConfig, SchedulerConfig
from octavo.config import SpeculativeConfig
from octavo.models.random_weights import tiny_config, write_checkpoint

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from running import Running

pytestmark = needs_kernels
BLOCK_SIZE = 8
# Earlier answers are shown without the tag that begins an answer.
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant><reasoning step by step>{% endif %}"
)
SYSTEM = {"role": "system", "content": "Be brief and kind, and never guess."}
FIRST = {"role": "user", "content": "How is the weather in Rome at this time of the year?"}
NEXT = [{"role": "assistant", "content": "Sunny."}, {"role": "user", "content": "And in Tokyo?"}]
OTHER = {"role": "user", "content": "Name three of the largest rivers of the world."}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    folder = tmp_path_factory.mktemp("served") / "tiny"
    config = tiny_config("Qwen3_5ForCausalLM", vocab_size=len(alphabet) + 1, eos_token_id=0)
    write_checkpoint(folder, config, std=0.1)
    tokenizer = Tokenizer(models.BPE({"<eos>": 0} | {token: i for i, token in enumerate(alphabet, start=1)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return folder


@pytest.fixture
def served(checkpoint: Path) -> Iterator[Running]:
    engine = LLMEngine(
        ModelConfig(model=str(checkpoint), max_model_len=512),
        cache_config=CacheConfig(num_gpu_blocks=256, block_size=BLOCK_SIZE),
        scheduler_config=SchedulerConfig(max_num_seqs=4, min_tokens_to_cache=1),
        speculative_config=SpeculativeConfig(method="none"),
    )
    with served_engine(engine) as running:
        yield running


def ask(running: Running, *messages: dict[str, Any], stream: bool = False) -> dict[str, Any]:
    """Return the usage of an answer."""
    options = {"stream_options": {"include_usage": True}} if stream else {}
    body = {"model": "tiny", "messages": messages, "max_tokens": 30, "temperature": 0, "stream": stream, **options}
    with running.http() as http:
        response = http.post("/v1/chat/completions", json=body)
    if stream:
        lines = [line for line in response.text.splitlines() if line.startswith("data: {")]
    answer: dict[str, Any] = json.loads(lines[-1].removeprefix("data: ")) if stream else response.json()
    return dict(answer["usage"])


def saved_before(text: str) -> int:
    """Return the number of tokens in the full blocks before the last token of a text with one token per character."""
    return (len(text) - 1) // BLOCK_SIZE * BLOCK_SIZE


@pytest.mark.parametrize("stream", [False, True])
def test_usage_counts_tokens_before_the_saved_state(served: Running, stream: bool) -> None:
    system = f"<system>{SYSTEM['content']}<user>"
    turn = f"{system}{FIRST['content']}<assistant>"
    assert ask(served, SYSTEM, FIRST, stream=stream)["prompt_tokens_details"]["cached_tokens"] == 0
    usage = ask(served, SYSTEM, FIRST, *NEXT, stream=stream)
    assert usage["prompt_tokens"] == len(f"{turn}Sunny.<user>And in Tokyo?<assistant><reasoning step by step>")
    assert usage["prompt_tokens_details"]["cached_tokens"] == saved_before(turn)
    other = ask(served, SYSTEM, OTHER, stream=stream)
    assert other["prompt_tokens_details"]["cached_tokens"] == saved_before(system)


def test_same_prompt_again_finds_all_full_blocks_before_its_last_token(served: Running) -> None:
    ask(served, SYSTEM, FIRST)
    usage = ask(served, SYSTEM, FIRST)
    prompt = f"<system>{SYSTEM['content']}<user>{FIRST['content']}<assistant><reasoning step by step>"
    assert usage["prompt_tokens_details"]["cached_tokens"] == saved_before(prompt)


def test_answers_do_not_depend_on_saved_states(served: Running) -> None:
    body = {"model": "tiny", "messages": [SYSTEM, FIRST, *NEXT], "max_tokens": 20, "temperature": 0}
    with served.http() as http:
        texts = [http.post("/v1/chat/completions", json=body).json()["choices"] for _ in range(2)]
    assert texts[0] == texts[1]


def test_metrics_and_explanations_of_a_recurrent_model(served: Running) -> None:
    ask(served, SYSTEM, FIRST)
    ask(served, {**SYSTEM, "content": SYSTEM["content"][:-6] + "."}, FIRST)
    with served.http() as http:
        text = http.get("/metrics").text
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(lines['octavo:state_slots{model_name="tiny",use="running"}']) == 0
    assert float(lines['octavo:state_slots{model_name="tiny",use="checkpoint"}']) > 2
    assert float(lines['octavo:saved_checkpoints_total{model_name="tiny"}']) > 2
    unusable = 'octavo:prefix_cache_unusable_tokens_total{limit="%s",model_name="tiny"}'
    assert float(lines[unusable % "checkpoint"]) > 0
    assert float(lines[unusable % "window"]) == 0
