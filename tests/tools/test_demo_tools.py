"""The generator of conversations with tools: its tools accept the calls, and no held-out question is in training."""

import itertools
import json
import random
import re
import sys
from pathlib import Path

import jsonschema
import pytest

from octavo import assets
from octavo.engine.chat_template import ChatTemplate
from octavo.server.answers.tool_formats import HermesFormat

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

demo_data = pytest.importorskip("demo_data")
demo_tools = pytest.importorskip("demo_tools")
demo_tokenizer = pytest.importorskip("demo_tokenizer")

pytestmark = pytest.mark.slow
FOLDERS = (assets.built_in_model_path(), assets.built_in_draft_path())
WORDS = demo_tools.NUMBER_WORDS.split()


def drawn(task, count, held_out=False):
    rng = random.Random(f"{task}{held_out}")
    return [demo_tools.sample(rng, demo_tools.makers()[task], held_out) for _ in range(count)]


def calls_in(text):
    return [json.loads(each) for each in re.findall(r"<tool_call>\n(.*)\n</tool_call>", text)]


def test_equal_seed_generates_equal_tool_conversations():
    assert demo_tools.conversation(random.Random(5)) == demo_tools.conversation(random.Random(5))


@pytest.mark.parametrize("task", demo_tools.TOOL_TASKS)
def test_only_tool_evaluation_questions_are_held_out(task):
    assert not any(example.held_out for example in drawn(task, 200))
    questions = demo_tools.questions(task, 50)
    assert all(question.held_out for question in questions)
    assert len({(question.question, question.results) for question in questions}) == 50
    assert demo_tools.questions(task, 50) == questions


@pytest.mark.parametrize("held_out", [False, True])
@pytest.mark.parametrize("task", ["call", "two_calls"])
def test_tool_calls_match_schemas_and_values_of_question(task, held_out):
    for example in drawn(task, 300, held_out):
        schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in example.tools}
        assert len(schemas) == len(example.tools)
        calls = calls_in(example.answer)
        assert HermesFormat().write([(call["name"], call["arguments"]) for call in calls]) == example.answer
        assert len(calls) == (1 if task == "call" else 2)
        for call in calls:
            schema = schemas[call["name"]]
            jsonschema.validate(call["arguments"], schema | {"additionalProperties": False})
            for name, value in call["arguments"].items():
                default = schema["properties"][name].get("enum", [None])[0]
                spelled = {str(value), str(default)} | ({WORDS[value]} if value in range(len(WORDS)) else set())
                assert value == default or any(text in example.question for text in spelled), example


def test_answers_repeat_tool_results():
    for example in drawn("result", 200):
        assert len(example.results) == len(calls_in(example.call))
        for result in example.results:
            said = json.loads(result) if result.startswith("{") else {"status": result}
            confirms = {"ok", "done", "success", "true", "OK"} & {*map(str, said.values())}
            told = str(next(iter(said.values()))).removeprefix("Error: ")
            assert confirms or told in example.answer, example


def test_no_call_tasks_contain_no_tool_call():
    answers = [example.answer for example in drawn("no_call", 300)]
    assert not any("<tool_call>" in answer for answer in answers)
    assert demo_tools.NO_TOOL in answers
    assert any(answer.startswith("Please tell me the ") for answer in answers)
    assert len(set(answers)) > 150


def test_tool_conversations_contain_no_held_out_example(monkeypatch):
    seen = []
    follow = demo_tools.following
    monkeypatch.setattr(demo_tools, "following", lambda *given: seen.append(follow(*given)) or seen[-1])
    rng = random.Random(3)
    for _ in range(300):
        messages, _ = demo_tools.conversation(rng)
        questions = {message["content"] for message in messages if message["role"] == "user"}
        assert not any(example.held_out for example in seen if example.question in questions)
        seen.clear()


def test_template_without_tools_is_plain_chatml():
    rng = random.Random(7)
    for _ in range(50):
        messages = demo_data.conversation(rng)
        turns = [f"<|im_start|>{each['role']}\n{each['content']}<|im_end|>\n" for each in messages]
        assert demo_tokenizer.render(messages, True) == "".join(turns) + "<|im_start|>assistant\n"


def test_conversation_roles_alternate_with_tool_turns():
    rng = random.Random(4)
    letters = {"system": "s", "user": "u", "assistant": "a", "tool": "t"}
    for _ in range(200):
        messages, _ = demo_tools.conversation(rng)
        assert re.fullmatch("s?(ua(t{1,2}a)?)+", "".join(letters[message["role"]] for message in messages))
        for one, other in itertools.pairwise(messages):
            assert one["role"] != "assistant" or ("<tool_call>" in one["content"]) == (other["role"] == "tool")


def test_packaged_tokenizer_files_equal_training_files(tmp_path):
    for folder in FOLDERS:
        demo_tokenizer.write_tokenizer(demo_tokenizer.load_tokenizer(folder / "tokenizer.json"), tmp_path)
        for written in tmp_path.iterdir():
            assert (folder / written.name).read_bytes() == written.read_bytes(), (folder, written.name)
    assert len({(folder / "tokenizer.json").read_bytes() for folder in FOLDERS}) == 1


def test_client_tool_calls_render_as_in_training():
    rng, render = random.Random(6), ChatTemplate(demo_tokenizer.CHAT_TEMPLATE).render
    for example in (demo_tools.sample(rng, demo_tools.make_result) for _ in range(50)):
        calls = [
            {"id": str(place), "type": "function", "function": call | {"arguments": json.dumps(call["arguments"])}}
            for place, call in enumerate(calls_in(example.call))
        ]
        sent = [
            {**m, "content": None, "tool_calls": calls} if m["content"] == example.call else m for m in example.prompt()
        ]
        assert render(sent, tools=example.tools) == demo_tokenizer.render(example.prompt(), True, example.tools)


def test_template_lists_parameters_of_any_schema():
    properties = {
        "place": {"type": "string"},
        "unit": {"enum": ["C", "F"]},
        "limit": {"anyOf": [{"type": "null"}, {"type": "integer"}]},
        "note": {"type": ["string", "null"]},
        "items": {"type": "array", "items": {"type": "string"}},
        "any": {},
        "all": True,
    }
    tools = [
        {
            "type": "function",
            "function": {"name": "find", "parameters": {"properties": properties, "required": ["place"]}},
        },
        {"type": "function", "function": {"name": "now"}},
    ]
    text = demo_tokenizer.render([{"role": "system", "content": "Be brief."}], tools=tools)
    parameters = "place: string, unit?: C|F, limit?: integer, note?: string, items?: array, any?: any, all?: any"
    assert text == f"<|im_start|>system\nBe brief.\n\nTools:\nfind({parameters})\nnow()<|im_end|>\n"
