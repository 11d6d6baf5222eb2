"""Write the text that octavo's built-in model is trained and examined on.

Everything here is made by rule from a random generator: small tasks with answers that can be checked, chat about
those tasks, and short stories. Roughly one in ten operand pairs, words, word lists and pairs of phrasing and fact is
*held out*: a hash of it decides, so training never sees it and the examination asks only about it.

Only the standard library is used. Run `python tools/demo_data.py` to read a few samples.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol

from demo_text import (
    ADD_PHRASINGS,
    CHAT_INTENTS,
    CITIES,
    COLOURS,
    COMPARE_PHRASINGS,
    COUNT_PHRASINGS,
    FACTS,
    HERO_ADJECTIVES,
    HEROES,
    ITEMS,
    JSON_PHRASINGS,
    NAMES,
    OFF_TOPIC,
    OFF_TOPIC_ANSWER,
    OFF_TOPIC_SUBJECTS,
    ORDER_SENTENCES,
    PERSON_SENTENCES,
    PET_SENTENCES,
    PETS,
    RECALL_INTRODUCTIONS,
    RECALL_QUESTIONS,
    REPEAT_PHRASINGS,
    REVERSE_PHRASINGS,
    RHYME_PHRASINGS,
    RHYMES,
    SORT_DOWN_PHRASINGS,
    SORT_UP_PHRASINGS,
    SORT_WORD_PHRASINGS,
    STORY_ENDINGS,
    STORY_EVENTS,
    STORY_PHRASINGS,
    STORY_PLACES,
    SUBTRACT_PHRASINGS,
    SYLLABLES,
    SYSTEM_PROMPTS,
    THAT_PHRASINGS,
    TIMES_PHRASINGS,
    WORDS,
)

if TYPE_CHECKING:
    from collections.abc import Callable

Message = dict[str, str]

CHECKABLE_TASKS = (
    "add",
    "subtract",
    "times",
    "compare",
    "sort_words",
    "sort_numbers",
    "reverse",
    "count",
    "repeat",
    "facts",
    "json",
    "context",
)
OPEN_TASKS = ("chat", "off_topic", "story", "rhyme", "drill", "sort_drill")


@dataclass(frozen=True)
class Example:
    """One exchange: what was said before, the question, the answer, and the keys that decide whether it is held out."""

    task: str
    question: str
    answer: str
    keys: tuple[str, ...]
    history: tuple[tuple[str, str], ...] = ()

    @property
    def held_out(self) -> bool:
        """Whether any part of the example belongs to the held-out tenth."""
        return any(is_held_out(key) for key in self.keys)

    @property
    def tools(self) -> list[dict[str, Any]] | None:
        """The tools that are offered."""
        return None

    def prompt(self) -> list[Message]:
        """The chat messages up to and including the question."""
        messages: list[Message] = []
        for question, answer in self.history:
            messages += exchange(question, answer)
        return [*messages, {"role": "user", "content": self.question}]


class WordSource(Protocol):
    """A way of drawing distinct words."""

    def __call__(self, rng: random.Random, count: int, invented: float = 0.15) -> list[str]:
        """Draw `count` words, of which about the share `invented` is made up."""


def exchange(question: str, answer: str) -> list[Message]:
    """A user message and the assistant's reply to it."""
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


@lru_cache(maxsize=1 << 18)
def is_held_out(key: str) -> bool:
    """Whether the hash of `key` puts it in the tenth that training must never see."""
    return hashlib.blake2b(key.encode(), digest_size=4).digest()[0] < 26


def phrase(rng: random.Random, templates: tuple[str, ...], **fields: object) -> str:
    """Fill a randomly chosen template, sometimes in lower case and sometimes without its final punctuation."""
    return fill(rng, rng.choice(templates), **fields)


def fill(rng: random.Random, template: str, **fields: object) -> str:
    """Fill one template, sometimes in lower case and sometimes without its final punctuation."""
    if rng.random() < 0.2:
        template = template.lower()
    if template[-1] in ".?!" and rng.random() < 0.25:
        template = template[:-1]
    return template.format(**fields)


@lru_cache(maxsize=16)
def split(text: str) -> tuple[str, ...]:
    """The words of a text."""
    return tuple(text.split())


@lru_cache(maxsize=1)
def word_list() -> tuple[str, ...]:
    """The common words that the word tasks draw from."""
    return tuple(sorted(set(split(WORDS))))


def name_list() -> tuple[str, ...]:
    """The names of people and cities."""
    return split(NAMES) + split(CITIES)


def invented_word(rng: random.Random) -> str:
    """A pronounceable word that no list holds, so that copying is learned for any spelling."""
    return "".join(rng.choice(split(SYLLABLES)) for _ in range(rng.choice((2, 2, 3))))


def draw_words(rng: random.Random, count: int, invented: float = 0.15) -> list[str]:
    """Distinct words, a share of them invented."""
    words: list[str] = []
    while len(words) < count:
        word = invented_word(rng) if rng.random() < invented else rng.choice(word_list())
        if word not in words:
            words.append(word)
    return words


def draw_blends(rng: random.Random, count: int, invented: float = 0.15) -> list[str]:
    """Distinct words most of which join the head of one listed word to the tail of another, as in plum + grape."""
    words: list[str] = []
    while len(words) < count:
        word = rng.choice(word_list())
        if rng.random() < 0.6 + invented:
            other = rng.choice(word_list())
            word = word[: rng.randint(1, 4)] + other[-rng.randint(2, 4) :]
        if word not in words:
            words.append(word)
    return words


def word_keys(words: list[str]) -> tuple[str, ...]:
    """The keys of a list of words: each word, and the set of them."""
    return (*(f"word:{word}" for word in words), "words:" + " ".join(sorted(words)))


def listed(rng: random.Random, items: list[str]) -> str:
    """Write a list for a question: with commas mostly, else with spaces."""
    return (", " if rng.random() < 0.75 else " ").join(items)


def draw_name(rng: random.Random) -> str:
    """A given name: one in four is invented."""
    return invented_word(rng).capitalize() if rng.random() < 0.25 else rng.choice(split(NAMES))


def make_add(rng: random.Random) -> Example:
    """Addition of two numbers below one hundred."""
    a, b = rng.randrange(100), rng.randrange(100)
    question = phrase(rng, ADD_PHRASINGS, a=a, b=b, name=rng.choice(split(NAMES)), item=rng.choice(split(ITEMS)))
    return Example("add", question, f"{a} + {b} = {a + b}", (f"add:{min(a, b)},{max(a, b)}",))


def make_subtract(rng: random.Random) -> Example:
    """Subtraction of two numbers below one hundred, mostly with a result that is not negative."""
    a, b = rng.randrange(100), rng.randrange(100)
    if a < b and rng.random() < 0.75:
        a, b = b, a
    templates = SUBTRACT_PHRASINGS if a >= b else SUBTRACT_PHRASINGS[:5]
    question = phrase(rng, templates, a=a, b=b, name=rng.choice(split(NAMES)), item=rng.choice(split(ITEMS)))
    return Example("subtract", question, f"{a} - {b} = {a - b}", (f"subtract:{a},{b}",))


def make_times(rng: random.Random) -> Example:
    """The multiplication table up to ten; pairs of phrasing and factors are held out."""
    a, b = rng.randrange(1, 11), rng.randrange(1, 11)
    template = rng.choice(TIMES_PHRASINGS)
    return Example("times", fill(rng, template, a=a, b=b), f"{a} * {b} = {a * b}", (f"times:{template}:{a},{b}",))


def make_compare(rng: random.Random) -> Example:
    """Which of two numbers is larger or smaller."""
    a, b = rng.sample(range(100), 2)
    larger = rng.random() < 0.5
    question = phrase(rng, COMPARE_PHRASINGS[0 if larger else 1], a=a, b=b)
    low, high = min(a, b), max(a, b)
    answer = f"{high} is larger than {low}." if larger else f"{low} is smaller than {high}."
    return Example("compare", question, answer, (f"compare:{low},{high}",))


def make_sort_words(rng: random.Random, draw: WordSource = draw_words) -> Example:
    """Alphabetical order of three to six words."""
    distinct = 1 if rng.random() < 0.8 else 3
    count = rng.randint(3, 6)
    words = draw(rng, count)
    while len({word[:distinct] for word in words}) < count:
        words = draw(rng, count)
    question = phrase(rng, SORT_WORD_PHRASINGS, list=listed(rng, words))
    return Example("sort_words", question, ", ".join(sorted(words)), word_keys(words))


def make_sort_numbers(rng: random.Random) -> Example:
    """Three to six numbers below one hundred in ascending or, less often, descending order."""
    numbers = rng.sample(range(100), rng.randint(3, 6))
    down = rng.random() < 0.3
    question = phrase(
        rng, SORT_DOWN_PHRASINGS if down else SORT_UP_PHRASINGS, list=listed(rng, [str(n) for n in numbers])
    )
    ordered = sorted(numbers, reverse=down)
    return Example("sort_numbers", question, ", ".join(map(str, ordered)), (f"numbers:{sorted(numbers)}",))


def make_reverse(rng: random.Random, draw: WordSource = draw_words) -> Example:
    """A list of two to six words in reverse order."""
    words = draw(rng, rng.randint(2, 6))
    question = phrase(rng, REVERSE_PHRASINGS, list=listed(rng, words))
    return Example("reverse", question, ", ".join(reversed(words)), word_keys(words))


def make_count(rng: random.Random, draw: WordSource = draw_words) -> Example:
    """The number of words in a sentence of one to nine."""
    words = draw(rng, rng.randint(1, 9))
    text = (", " if rng.random() < 0.15 else " ").join(words)
    return Example("count", phrase(rng, COUNT_PHRASINGS, text=text), str(len(words)), word_keys(words))


def make_repeat(rng: random.Random, draw: WordSource = draw_words) -> Example:
    """The same words again."""
    words = draw(rng, rng.randint(1, 6), invented=0.3)
    text = " ".join(words)
    return Example("repeat", phrase(rng, REPEAT_PHRASINGS, text=text), text, word_keys(words))


def make_drill(rng: random.Random) -> Example:
    """One of the word tasks over unfamiliar words; training turns to these late, for copying any spelling."""
    maker = rng.choice((make_sort_words, make_reverse, make_reverse, make_repeat, make_repeat, make_count))
    return maker(rng, draw_blends)


def make_sort_drill(rng: random.Random) -> Example:
    """Alphabetical order of unfamiliar words; the last part of training dwells on it."""
    return make_sort_words(rng, draw_blends)


def make_fact(rng: random.Random) -> Example:
    """A small fact; pairs of phrasing and subject are held out."""
    kind = rng.choice(sorted(FACTS))
    phrasings, answer, table = FACTS[kind]
    subject = rng.choice(sorted(table))
    template = rng.choice(phrasings)
    fields = {"s": subject, "v": table[subject]}
    return Example("facts", fill(rng, template, **fields), answer.format(**fields), (f"fact:{template}:{subject}",))


def make_json(rng: random.Random) -> Example:
    """A JSON object filled from one sentence about a person, an order or a pet."""
    kind = rng.choice(("person", "person", "order", "pet"))
    value: dict[str, str | int]
    sentences: tuple[str, ...]
    if kind == "person":
        value = {"name": draw_name(rng), "age": rng.randint(1, 99), "city": rng.choice(split(CITIES))}
        key, sentences = f"{value['name']},{value['city']}", PERSON_SENTENCES
    elif kind == "order":
        value = {"item": rng.choice(split(ITEMS)), "color": rng.choice(split(COLOURS)), "count": rng.randint(2, 99)}
        key, sentences = f"{value['item']},{value['color']}", ORDER_SENTENCES
    else:
        value = {"owner": rng.choice(split(NAMES)), "animal": rng.choice(split(PETS)), "pet": draw_name(rng)}
        key, sentences = f"{value['owner']},{value['animal']}", PET_SENTENCES
    sentence = rng.choice(sentences).format(**value)
    fields = [*value]
    names = f"{', '.join(fields[:-1])} and {fields[-1]}"
    question = phrase(rng, JSON_PHRASINGS, sentence=sentence, fields=names)
    return Example("json", question, json.dumps(value), (f"json:{kind}:{key}",))


def make_context(rng: random.Random) -> Example:
    """A question about an earlier turn: the name that was given, or the result that was computed."""
    if rng.random() < 0.5:
        name = draw_name(rng)
        question = rng.choice(RECALL_QUESTIONS)
        before = [(phrase(rng, RECALL_INTRODUCTIONS, name=name), f"Nice to meet you, {name}!")]
        if rng.random() < 0.4:
            between = sample(rng, rng.choice(("add", "facts", "count")))
            before.append((between.question, between.answer))
        answer, keys = f"Your name is {name}.", (f"recall:{question}:{name}",)
        return Example("context", fill(rng, question), answer, keys, tuple(before))
    first = sample(rng, rng.choice(("add", "subtract")))
    total, other = int(first.answer.split()[-1]), rng.randrange(1, 100)
    if not 0 <= total <= 99:
        return make_context(rng)
    answer, keys = f"{total} + {other} = {total + other}", (f"add:{min(total, other)},{max(total, other)}",)
    before = [(first.question, first.answer)]
    return Example("context", phrase(rng, THAT_PHRASINGS, b=other), answer, keys, tuple(before))


def make_chat(rng: random.Random) -> Example:
    """Greetings, thanks and questions about the assistant itself."""
    questions, answer = rng.choice(CHAT_INTENTS)
    return Example("chat", phrase(rng, questions), answer, ())


def make_off_topic(rng: random.Random) -> Example:
    """A request that a model of this size cannot serve, politely redirected."""
    question = phrase(rng, OFF_TOPIC, topic=rng.choice(OFF_TOPIC_SUBJECTS))
    return Example("off_topic", question, OFF_TOPIC_ANSWER, ())


def make_story(rng: random.Random) -> Example:
    """A story of a few sentences about an animal or a person; the long form has about twice as many."""
    hero, adjective = rng.choice(split(HEROES)), rng.choice(split(HERO_ADJECTIVES))
    template = rng.choice(STORY_PHRASINGS)
    opening = f"Once upon a time there was a {adjective} {hero} who lived {rng.choice(STORY_PLACES)}."
    events = rng.sample(STORY_EVENTS, 5 if "long" in template else 2)
    middle = [event.format(hero=hero) for event in events]
    story = " ".join([opening, *middle, rng.choice(STORY_ENDINGS).format(hero=hero)])
    question = fill(rng, template, hero=hero, adjective=adjective)
    if template.startswith("Continue"):
        story = " ".join([*middle, rng.choice(STORY_ENDINGS).format(hero=hero)])
    return Example("story", question, story, ())


def make_rhyme(rng: random.Random) -> Example:
    """A rhyming couplet about a known subject."""
    subject = rng.choice(sorted(RHYMES))
    return Example("rhyme", phrase(rng, RHYME_PHRASINGS, s=subject), RHYMES[subject], ())


@lru_cache(maxsize=1)
def makers() -> dict[str, Callable[[random.Random], Example]]:
    """The generator of each task."""
    return {
        "add": make_add,
        "subtract": make_subtract,
        "times": make_times,
        "compare": make_compare,
        "sort_words": make_sort_words,
        "sort_numbers": make_sort_numbers,
        "reverse": make_reverse,
        "count": make_count,
        "repeat": make_repeat,
        "facts": make_fact,
        "json": make_json,
        "context": make_context,
        "chat": make_chat,
        "off_topic": make_off_topic,
        "story": make_story,
        "rhyme": make_rhyme,
        "drill": make_drill,
        "sort_drill": make_sort_drill,
    }


@lru_cache(maxsize=3)
def task_weights(phase: int) -> dict[str, float]:
    """How often each phase of training draws each task: 0 evenly, 1 more of what is hard, 2 above all sorting."""
    early = {
        "add": 2.5,
        "subtract": 2.5,
        "times": 1.0,
        "compare": 0.7,
        "sort_words": 3.5,
        "sort_numbers": 1.5,
        "reverse": 2.0,
        "count": 1.5,
        "repeat": 0.8,
        "facts": 1.6,
        "json": 1.6,
        "context": 1.5,
        "chat": 0.6,
        "off_topic": 0.4,
        "story": 0.4,
        "rhyme": 0.2,
    }
    late = early | {
        "times": 0.7,
        "sort_words": 4.5,
        "sort_drill": 1.5,
        "sort_numbers": 3.0,
        "reverse": 1.0,
        "count": 1.0,
        "facts": 0.9,
        "json": 1.4,
        "chat": 0.4,
        "off_topic": 0.15,
        "story": 0.2,
        "rhyme": 0.1,
        "drill": 3.0,
    }
    last = late | {
        "add": 2.0,
        "subtract": 3.5,
        "times": 0.5,
        "sort_words": 6.0,
        "sort_numbers": 2.0,
        "reverse": 1.5,
        "count": 1.2,
        "json": 0.8,
        "chat": 0.6,
        "drill": 2.0,
        "sort_drill": 6.0,
    }
    return (early, late, last)[phase]


def sample(rng: random.Random, task: str, held_out: bool = False) -> Example:
    """Draw an example of one task, from the training part or from the held-out part."""
    example = makers()[task](rng)
    while example.held_out != held_out:
        example = makers()[task](rng)
    return example


def questions(task: str, count: int, seed: int = 0) -> list[Example]:
    """Distinct held-out questions of one checkable task, the same for the same seed."""
    rng = random.Random(f"questions:{seed}:{task}")
    found: dict[tuple[str, tuple[tuple[str, str], ...]], Example] = {}
    while len(found) < count:
        example = sample(rng, task, held_out=True)
        found.setdefault((example.question, example.history), example)
    return list(found.values())


def conversation(rng: random.Random, more: float = 0.6, phase: int = 0) -> list[Message]:
    """A training conversation of one or more exchanges, sometimes with a system message; none of it is held out."""
    messages: list[Message] = []
    if rng.random() < 0.3:
        messages.append({"role": "system", "content": rng.choice(SYSTEM_PROMPTS)})
    weights = task_weights(phase)
    task = ""
    while True:
        if not task or rng.random() < 0.7:
            task = rng.choices([*weights], [*weights.values()])[0]
        example = sample(rng, task)
        assert not example.held_out, example
        messages += [*example.prompt(), {"role": "assistant", "content": example.answer}]
        if rng.random() > more:
            return messages


def main() -> None:
    """Print samples of each task."""
    parser = argparse.ArgumentParser(description="Print sample questions and answers of each task.")
    parser.add_argument("--seed", type=int, default=0, help="seed of the samples (default 0)")
    parser.add_argument("--count", type=int, default=3, help="samples per task (default 3)")
    parser.add_argument("--held-out", action="store_true", help="show held-out questions instead of training text")
    args = parser.parse_args()
    rng = random.Random(args.seed)
    for task in CHECKABLE_TASKS + (() if args.held_out else OPEN_TASKS):
        print(f"[{task}]")
        for _ in range(args.count):
            example = sample(rng, task, args.held_out)
            for message in [*example.prompt(), {"role": "assistant", "content": example.answer}]:
                print(f"  {message['role']:>9}: {message['content']}")


if __name__ == "__main__":
    main()
