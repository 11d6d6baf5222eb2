"""The form of a request's answers depends on the model's vocabulary, its template, and the end of the prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tokenizers
from answer_reading import read_answer
from call_grammars import Grammars
from fakes import FakeChatTemplate

from octavo import assets
from octavo.config import ModelInfo
from octavo.engine.input_processor import InputProcessor
from octavo.engine.tokenizer import Tokenizer
from octavo.errors import RequestError
from octavo.outputs import CompletionOutput
from octavo.sampling_params import SamplingParams, StructuredOutputsParams
from octavo.server.answers.answer_form import AnswerForm, AnswerReader, AnswerStyle
from octavo.server.answers.call_parser import HELD_CHARS, ToolParser
from octavo.server.answers.harmony import HarmonyFormat
from octavo.server.answers.named_calls import SolarFormat
from octavo.server.answers.parts import Part
from octavo.server.answers.reasoning_forms import find_reasoning_form
from octavo.server.answers.tool_formats import HermesFormat
from octavo.server.answers.tools import NO_TOOLS, Toolbox, read_chat_tools

MARKERS = ["<tool_call>", "</tool_call>", "<think>", "</think>"]
NOW: Any = {"type": "function", "function": {"name": "now"}}
ARGUMENTS = '{"a": "<b>"}'
CALL = f'<tool_call>\n{{"name": "now", "arguments": {ARGUMENTS}}}\n</tool_call>'
EOS, ROLE = "<|im_end|>", "<|im_start|>"


def make_inputs(kind: str, num_rows: int = 9999) -> InputProcessor:
    """Return inputs with the built-in vocabulary. kind: markers are no tokens ("plain"), "special" or "added" ones."""
    text = (Path(assets.__file__).parent / "demo" / "tokenizer.json").read_text(encoding="utf-8")
    backend = tokenizers.Tokenizer.from_str(text)
    if kind != "plain":
        tokens = [tokenizers.AddedToken(each, special=kind == "special", normalized=False) for each in MARKERS]
        (backend.add_special_tokens if kind == "special" else backend.add_tokens)(tokens)
    ends = frozenset({backend.token_to_id(EOS)})
    info = ModelInfo(name="a", vocab_size=num_rows, max_model_len=99, eos_token_ids=ends)
    return InputProcessor(Tokenizer(backend), info, 0, FakeChatTemplate("<tool_call> </think>"))


def toolbox_of(style: AnswerStyle, *, strict: bool = False) -> Toolbox:
    tool = {**NOW, "function": {**NOW["function"], "strict": strict}}
    return read_chat_tools([tool], None, None, style.tools)


@pytest.mark.parametrize("kind", ["plain", "special", "added"])
def test_markers_are_parsed_for_every_token_kind(kind: str) -> None:
    """The detokenizer drops special tokens. Those that are markers stay in the text; a role's tag is dropped."""
    inputs = make_inputs(kind)
    style = AnswerStyle.find("auto", "auto", inputs)
    form = AnswerForm.of(style, toolbox_of(style), "Hello.")
    tokens = inputs.tokenizer.encode(f"<think>Hm.</think>{ROLE}\nI {ROLE}look.\n{CALL}{EOS}", add_special_tokens=False)
    expected = [Part("reasoning", "Hm."), Part("content", "I look."), Part("call", "now"), Part("arguments", ARGUMENTS)]
    for pieces in ([tokens], [[each] for each in tokens]):
        assert read_answer(inputs.tokenizer, form, [5], pieces, "stop") == expected
    assert (len(form.shown_ids) > 0) is (kind == "special")


def test_tool_markers_are_dropped_without_tools() -> None:
    inputs = make_inputs("special")
    form = AnswerForm.of(AnswerStyle.find("auto", "auto", inputs), NO_TOOLS, "Hello.")
    tokens = inputs.tokenizer.encode(f"<think>Hm.</think>a<tool_call>b{EOS}", add_special_tokens=False)
    expected = [Part("reasoning", "Hm."), Part("content", "ab")]
    assert read_answer(inputs.tokenizer, form, [5], [tokens], "stop") == expected
    params = form.applied_to(SamplingParams(skip_special_tokens=False))
    assert not params.skip_special_tokens, "a client may ask for all of them"


def test_marker_beyond_vocab_size_is_not_token() -> None:
    token_id = make_inputs("added").tokenizer.token_id("<tool_call>")
    assert token_id is not None
    for num_rows, has_token in ((token_id + 1, True), (token_id, False), (9, False)):
        style = AnswerStyle.find("auto", "auto", make_inputs("added", num_rows))
        structure = toolbox_of(style, strict=True).structure(None)
        assert structure is not None
        assert ('"<tool_call>"' not in str(structure.grammar)) is has_token


@pytest.mark.parametrize(
    ("prompt", "starts_after", "free_from", "parts"),
    [
        ("Hello.", "</think>", "<think>", [Part("reasoning", "a"), Part("content", "b")]),
        ("Hello.<think>\n", "</think>", None, [Part("reasoning", "<think>a"), Part("content", "b")]),
        ("Hello.<think>\n\n</think>\n\n", None, None, [Part("content", "<think>a</think>b")]),
    ],
)
def test_prompt_end_determines_initial_reasoning_state(
    prompt: str, starts_after: str | None, free_from: str | None, parts: list[Part]
) -> None:
    inputs = make_inputs("added")
    form = AnswerForm.of(AnswerStyle.find("auto", "auto", inputs), NO_TOOLS, prompt)
    params = SamplingParams(structured_outputs=StructuredOutputsParams(json_object=True))
    structure = form.applied_to(params).structured_outputs
    assert structure is not None
    assert (structure.starts_after, structure.free_from) == (starts_after, free_from)
    tokens = inputs.tokenizer.encode(f"<think>a</think>b{EOS}", add_special_tokens=False)
    assert read_answer(inputs.tokenizer, form, [5], [tokens], "stop") == parts


def test_parser_limits_held_text_only_for_streams() -> None:
    toolbox = read_chat_tools([NOW], None, None, HermesFormat())
    streamed, whole = AnswerForm(toolbox).parser(), AnswerForm(toolbox, is_whole=True).parser()
    assert isinstance(streamed, ToolParser)
    assert isinstance(whole, ToolParser)
    assert (streamed.num_held_chars, whole.num_held_chars) == (HELD_CHARS, None)
    assert not AnswerForm.of(AnswerStyle(HermesFormat()), toolbox, "Hello.").is_whole


@pytest.mark.parametrize("wanted", [{"json_object": True}, {"json": {"type": "object"}}])
def test_framed_content_accepts_only_json_object(wanted: dict[str, Any]) -> None:
    grammars = Grammars("plain", [*SolarFormat.markers])
    form = AnswerForm(frame=SolarFormat(grammars.token_name))
    params = form.applied_to(SamplingParams(structured_outputs=StructuredOutputsParams(**wanted)))
    assert params.structured_outputs is not None
    assert grammars.accepts(params.structured_outputs, '<|content|>{"a": 1}<|end|>')
    assert not grammars.accepts(params.structured_outputs, "<|content|>[1]<|end|>")


def test_framed_content_has_no_other_structure_than_json() -> None:
    form = AnswerForm(frame=SolarFormat())
    assert form.applied_to(SamplingParams()).structured_outputs is None
    with pytest.raises(RequestError, match="JSON can be asked for, nothing else") as refused:
        form.applied_to(SamplingParams(structured_outputs=StructuredOutputsParams(regex="a")))
    assert refused.value.parameter == "structured_outputs"


def test_framed_calls_go_with_json_content() -> None:
    form = AnswerForm(read_chat_tools([NOW], None, None, SolarFormat()), frame=SolarFormat())
    wanted = StructuredOutputsParams(json={"const": "said"})
    structure = form.applied_to(SamplingParams(structured_outputs=wanted)).structured_outputs
    assert structure == form.toolbox.structure(wanted)


def test_marks_around_content_are_shown_without_tools() -> None:
    ids = {mark: index for index, mark in enumerate(SolarFormat.markers)}
    form = AnswerForm.of(AnswerStyle(SolarFormat(), special_ids=ids), NO_TOOLS, "Hello.")
    assert form.shown_ids == tuple(ids.values())


def test_messages_end_their_reasoning_themselves() -> None:
    reasoning = find_reasoning_form("openai_gptoss", [])
    assert reasoning is not None
    parser = AnswerForm(reasoning=reasoning, frame=HarmonyFormat()).parser()
    text = f"{reasoning.opens}Hm.<|start|>assistant<|channel|>final<|message|>Yes.<|return|>"
    assert parser.feed(text) + parser.finish() == [Part("reasoning", "Hm."), Part("content", "Yes.")]


@pytest.mark.parametrize(
    ("finish_reason", "stop_reason", "is_cut"),
    [("stop", None, False), ("stop", 7, False), ("stop", "x", True), ("length", None, True)],
)
def test_incomplete_mark_is_text_only_if_model_ended_answer(
    finish_reason: Any, stop_reason: int | str | None, is_cut: bool
) -> None:
    form = AnswerForm(read_chat_tools([NOW], None, None, HermesFormat()))
    end = CompletionOutput(0, "a <tool", [5], finish_reason=finish_reason, stop_reason=stop_reason)
    assert AnswerReader(form).read(end) == [Part("content", "a" if is_cut else "a <tool")]
