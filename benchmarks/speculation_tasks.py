"""Requests to measure speculation: with answers that copy, with answers that do not, and both.

Every turn of a benchmark has new texts, so that no earlier answer equals a requested one.
"""

from __future__ import annotations

import itertools
import pydoc_data.topics
import random
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    Conversation = list[dict[str, str]]
    Ask = Callable[[list[Conversation]], list[str]]  # returns answers, to continue conversations

HEROES = "fox cat dog mouse bear rabbit wolf owl frog king queen knight farmer baker sailor dragon robot girl boy horse"
ADJECTIVES = "little brave clever old young kind lazy happy sad funny"
NAMES = "Anna Bernard Clara David Emma Frank Greta Henry Irene Jacob"
TEXT_CHARS = (250, 420)
SUBJECTS = (
    "a lighthouse", "why the sky is blue", "a journey by train", "how bread is baked", "the history of maps",
    "a lost key", "how to learn a language", "the life of bees", "a garden in winter", "why we sleep", "an old clock",
    "how rivers form", "a visit to the moon", "good manners", "the first day at school", "how a violin is made",
)  # fmt: skip


class BuiltInTasks:
    """Requests for the built-in model and its twin, which write short stories.

    A copying request asks again for a story that is already in the conversation.
    """

    def __init__(self, ask: Ask) -> None:
        pairs = [(hero, adjective) for hero in HEROES.split() for adjective in ADJECTIVES.split()]
        random.Random(1).shuffle(pairs)
        self._questions = itertools.cycle(
            f"Write a long story about a {adjective} {hero}." for hero, adjective in pairs
        )
        self._ask = ask

    def free(self, count: int) -> list[Conversation]:
        """Return requests for stories."""
        return [_question(next(self._questions)) for _ in range(count)]

    def copying(self, count: int) -> list[Conversation]:
        """Return requests for stories that are already in the conversation."""
        asked = self.free(count)
        told = self._ask(asked)
        return [[*each, {"role": "assistant", "content": text}, *each] for each, text in zip(asked, told, strict=True)]


class InstructTasks:
    """Requests for a small instruct model: to copy paragraphs of Python's reference, and general questions."""

    def __init__(self, _ask: Ask) -> None:
        self._texts = itertools.cycle(paragraphs())
        self._free = (
            _question(f"{verb} about {subject}{audience}.")
            for verb, audience, subject in itertools.cycle(
                itertools.product(
                    ("Tell me something", "Write a short letter", "Write a story"),
                    ("", *(f" for {name}" for name in NAMES.split())),
                    SUBJECTS,
                )
            )
        )
        self._orders = itertools.cycle(
            ("Repeat this text exactly:", "Correct the spelling of this text and write it out again:")
        )

    def free(self, count: int) -> list[Conversation]:
        """Return questions without an answer in the prompt."""
        return list(itertools.islice(self._free, count))

    def copying(self, count: int) -> list[Conversation]:
        """Return requests to copy a text."""
        return [_question(f"{next(self._orders)}\n\n{next(self._texts)}") for _ in range(count)]


def mixed(tasks: BuiltInTasks | InstructTasks, count: int) -> list[Conversation]:
    """Return equal numbers of copying and free requests, alternating."""
    pairs = zip(tasks.copying(count - count // 2), [*tasks.free(count // 2), None], strict=False)
    return [each for pair in pairs for each in pair if each is not None]


def paragraphs() -> list[str]:
    """Return prose of Python's language reference, which comes with Python."""
    found = set[str]()
    for name in sorted(pydoc_data.topics.topics):
        for paragraph in pydoc_data.topics.topics[name].split("\n\n"):
            text = re.sub(r"\s+", " ", re.sub(r"[*`\"]", "", paragraph)).strip()
            if TEXT_CHARS[0] <= len(text) <= TEXT_CHARS[1] and re.fullmatch(r"[A-Z][^:=<>|\[\]]*\.", text):
                found.add(text)
    texts = sorted(found)
    random.Random(2).shuffle(texts)
    return texts


def _question(text: str) -> Conversation:
    return [{"role": "user", "content": text}]
