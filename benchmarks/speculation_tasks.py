"""What is asked of models to measure speculation: answers that copy, answers that do not, and both.

Every turn of a benchmark has other texts, so that no answer given before is what is asked for now.
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
    Ask = Callable[[list[Conversation]], list[str]]  # answers, to build conversations upon

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
    """For the built-in model and its twin, which tell short stories.

    What copies: the same story is asked for again while the first telling still stands in the conversation.
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
        """Return requests for stories that were told."""
        asked = self.free(count)
        told = self._ask(asked)
        return [[*each, {"role": "assistant", "content": text}, *each] for each, text in zip(asked, told, strict=True)]


class InstructTasks:
    """For a small instruct model: paragraphs of Python's reference to be written again, and questions at large."""

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
        """Return questions whose answers stand nowhere."""
        return list(itertools.islice(self._free, count))

    def copying(self, count: int) -> list[Conversation]:
        """Return orders to write a text again."""
        return [_question(f"{next(self._orders)}\n\n{next(self._texts)}") for _ in range(count)]


def mixed(tasks: BuiltInTasks | InstructTasks, count: int) -> list[Conversation]:
    """Return as many that copy as not, in turns."""
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
