"""With the chat templates of real models, cache points are where later prompts begin to differ."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from test_templates import ANSWER, CONVERSATIONS, NOW, SPECIAL

from octavo.engine.cache_points import shared_offsets, token_position
from octavo.engine.chat_template import ChatTemplate
from octavo.errors import RequestError
from octavo.server.api.conversation import read_messages

if TYPE_CHECKING:
    from collections.abc import Callable

    from test_templates import Messages

    from octavo.engine.tokenizer import Tokenizer

OTHER = {"role": "user", "content": "Zürich?"}
ANSWERS = [{**ANSWER, "content": text} for text in ("Well, so it is.", "\n\nWell")]
ANSWERS.append({**ANSWER, "reasoning_content": "Let me see."})
# Its prompts end with tags that an answer with reasoning replaces.
KEEP_TAGS = {"tencent-Hy3"}


def num_shared(template: ChatTemplate, tokenizer: Tokenizer, prompt: list[int], later: Messages, options: Any) -> int:
    """Return how many first tokens a prompt shares with the prompt of another conversation."""
    try:
        text = template.render(later, **options)
    except RequestError:
        return len(prompt)
    pairs = zip(prompt, tokenizer.encode(text, add_special_tokens=False), strict=False)
    return next((place for place, (token, other) in enumerate(pairs) if token != other), len(prompt))


@pytest.mark.parametrize("kind", CONVERSATIONS)
def test_cache_points_are_last_tokens_that_later_prompts_share(
    kind: str,
    real_templates: dict[str, str],
    real_tokenizer: Callable[[str], Tokenizer],
    sampled: Callable[[list[str]], list[str]],
) -> None:
    tokenizer, (spoken, options), wrong = real_tokenizer("qwen3"), CONVERSATIONS[kind], {}
    messages = read_messages(spoken)
    begun = [message for message in messages if message["role"] == "system"]

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    for name in sampled([name for name in real_templates if name not in KEEP_TAGS]):
        template = ChatTemplate(real_templates[name], SPECIAL, now=lambda: NOW)
        try:
            text = template.render(messages, **options)
        except RequestError:
            continue
        prompt = encode(text)
        offsets = shared_offsets(lambda others, t=template: t.render(others, **options), messages, text)
        points = [token_position(text, offset, len(prompt), encode) for offset in offsets]
        nexts = [num_shared(template, tokenizer, prompt, [*messages, each, OTHER], options) for each in ANSWERS]
        first = num_shared(template, tokenizer, prompt, [*begun, OTHER], options)
        for most in (first, min(nexts)):
            if most < len(prompt) and not any(most - 4 <= point <= most for point in points):
                wrong[name] = f"points {points} of {len(prompt)} tokens, but first {first}, next {nexts}"
    assert not wrong, "\n".join(f"{name}: {what}" for name, what in wrong.items())
