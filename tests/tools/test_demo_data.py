"""The generator of the built-in model's training text: answers can be checked, held-out questions are not in it."""

import json
import random
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

demo_data = pytest.importorskip("demo_data")

pytestmark = pytest.mark.slow
ALL_TASKS = demo_data.CHECKABLE_TASKS + demo_data.OPEN_TASKS


def held_out_words():
    return {word for word in demo_data.word_list() if demo_data.is_held_out(f"word:{word}")}


@pytest.mark.parametrize("task", ALL_TASKS)
def test_equal_seed_generates_equal_examples(task):
    first, second = (
        [demo_data.sample(rng, task) for _ in range(20)] for rng in (random.Random("seed"), random.Random("seed"))
    )
    assert first == second


def test_equal_seed_generates_equal_conversations():
    assert demo_data.conversation(random.Random(5)) == demo_data.conversation(random.Random(5))


def test_about_one_tenth_of_keys_is_held_out():
    share = sum(demo_data.is_held_out(f"add:{a},{b}") for a in range(100) for b in range(100)) / 10000
    assert 0.09 < share < 0.115


def test_is_held_out_does_not_change_between_versions():
    # The packaged weights were trained with this split: another hash would test them on training questions.
    held_out = [a for a in range(100) if demo_data.is_held_out(f"add:{a},50")]
    assert held_out == [32, 44, 47, 49, 51, 58, 75]


@pytest.mark.parametrize("task", demo_data.CHECKABLE_TASKS)
def test_only_evaluation_questions_are_held_out(task):
    rng = random.Random(1)
    assert not any(demo_data.sample(rng, task).held_out for _ in range(300))
    questions = demo_data.questions(task, 50)
    assert all(question.held_out for question in questions)
    assert len({(question.question, question.history) for question in questions}) == 50


def test_held_out_questions_do_not_occur_in_training():
    rng = random.Random(2)
    seen = {(e.question, e.history) for task in demo_data.CHECKABLE_TASKS for e in drawn(rng, task, 1000)}
    asked = {(e.question, e.history) for task in demo_data.CHECKABLE_TASKS for e in demo_data.questions(task, 100)}
    assert not seen & asked


def drawn(rng, task, count):
    return [demo_data.sample(rng, task) for _ in range(count)]


def test_held_out_words_and_sums_are_not_in_training_text():
    rng = random.Random(3)
    words = held_out_words()
    for task in ("sort_words", "reverse", "count", "repeat", "drill", "sort_drill"):
        for example in drawn(rng, task, 300):
            given = (
                re.split(r"[:?\"] ?", example.question, maxsplit=1)[1] if example.task == "count" else example.answer
            )
            assert not words & set(re.findall(r"[a-z]+", given))
    for phase in [0, 1, 2] * 150:
        for message in demo_data.conversation(rng, phase=phase):
            for a, b in re.findall(r"^(\d+) \+ (\d+) = ", message["content"]):
                low, high = sorted((int(a), int(b)))
                assert not demo_data.is_held_out(f"add:{low},{high}")


def test_every_fact_has_training_phrasings():
    for phrasings, _, table in demo_data.FACTS.values():
        for subject in table:
            left = [p for p in phrasings if not demo_data.is_held_out(f"fact:{p}:{subject}")]
            assert len(left) >= 2, subject


def test_every_product_has_training_phrasings():
    for a in range(1, 11):
        for b in range(1, 11):
            left = [p for p in demo_data.TIMES_PHRASINGS if not demo_data.is_held_out(f"times:{p}:{a},{b}")]
            assert len(left) >= 3, (a, b)


@pytest.mark.parametrize("held_out", [False, True])
@pytest.mark.parametrize("task", ["add", "subtract", "times"])
def test_generated_arithmetic_is_correct(task, held_out):
    rng = random.Random(4)
    for _ in range(200):
        answer = demo_data.sample(rng, task, held_out).answer
        a, sign, b, result = re.fullmatch(r"(\d+) ([-+*]) (\d+) = (-?\d+)", answer).groups()
        assert {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[sign] == int(result)


def test_sorted_answer_contains_numbers_of_question():
    rng = random.Random(5)
    for example in drawn(rng, "sort_numbers", 200):
        asked = [int(n) for n in re.findall(r"\d+", example.question)]
        answer = [int(n) for n in example.answer.split(", ")]
        assert answer in (sorted(asked), sorted(asked, reverse=True))


def test_sorted_and_reversed_answers_contain_words_of_question():
    rng = random.Random(6)
    for _ in range(200):
        example = demo_data.sample(rng, "sort_words")
        words = example.answer.split(", ")
        assert words == sorted(words)
        assert all(word in example.question for word in words)
        example = demo_data.sample(rng, "reverse")
        words = example.answer.split(", ")
        assert ", ".join(words[::-1]) in example.question or " ".join(words[::-1]) in example.question


def test_json_answers_parse_and_contain_values_of_question():
    rng = random.Random(7)
    for example in drawn(rng, "json", 200):
        value = json.loads(example.answer)
        assert len(value) == 3
        assert all(str(part) in example.question for part in value.values())


def test_context_questions_refer_to_earlier_turn():
    rng = random.Random(8)
    for example in drawn(rng, "context", 200):
        assert example.history
        if example.answer.startswith("Your name is "):
            assert example.answer.removeprefix("Your name is ").rstrip(".") in example.history[0][0]
        else:
            assert example.history[-1][1].split()[-1] == example.answer.split()[0]


def test_conversations_alternate_and_end_with_assistant():
    rng = random.Random(9)
    for _ in range(100):
        roles = [message["role"] for message in demo_data.conversation(rng)]
        if roles[0] == "system":
            roles = roles[1:]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
