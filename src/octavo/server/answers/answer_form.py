"""Detect how a model writes reasoning and tool calls, and read the model's answers."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from octavo.errors import RequestError
from octavo.sampling_params import StructuredOutputsParams
from octavo.server.answers.call_parser import ToolParser
from octavo.server.answers.known_formats import find_tool_format
from octavo.server.answers.parts import Part, ReasoningParser, joined
from octavo.server.answers.reasoning_forms import find_reasoning_form
from octavo.server.answers.template_probe import TemplateProbe
from octavo.server.answers.tools import NO_TOOLS
from octavo.structured_output.lark import by_id

_PIECE = 4096  # characters per `feed` call; few, because parsers copy unread text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from octavo.engine.input_processor import InputProcessor
    from octavo.outputs import CompletionOutput
    from octavo.sampling_params import SamplingParams
    from octavo.server.answers.parts import AnswerParser, ReasoningForm
    from octavo.server.answers.tool_format import ToolFormat
    from octavo.server.answers.tools import Toolbox


def template_remark(tools: ToolFormat, *, shows_tools: bool) -> str:
    """Return a remark for the log, or "" if the chat template renders tools and calls."""
    if tools.describes_tools:
        return " (the chat template shows no calls: a system message describes the tools, a grammar makes answers JSON)"
    return "" if shows_tools else " (the chat template tells the model of no tools)"


@dataclass(frozen=True, slots=True)
class AnswerStyle:
    """How a model writes tool calls and reasoning.

    reasoning_end_id: Id of the reasoning's end marker, or None if the marker is not one token.
    special_ids: Maps each marker that is a special token to the token's id.
    """

    tools: ToolFormat | None = None
    reasoning: ReasoningForm | None = None
    reasoning_end_id: int | None = None
    special_ids: Mapping[str, int] = field(default_factory=dict)
    shows_tools: bool = False

    @property
    def summary(self) -> str:
        """The formats, for the log."""
        calls = "not known" if self.tools is None else self.tools.name
        blind = "" if self.tools is None else template_remark(self.tools, shows_tools=self.shows_tools)
        return f"tool calls: {calls}{blind}; reasoning: {'none' if self.reasoning is None else self.reasoning.name}"

    @property
    def has_reasoning(self) -> bool:
        """Whether answers may begin with reasoning."""
        return self.reasoning is not None

    @classmethod
    def find(cls, tool_parser: str, reasoning_parser: str, inputs: InputProcessor) -> AnswerStyle:
        """Return the style with the named formats. "auto" detects a format in the chat templates."""
        templates = inputs.chat_templates if inputs.has_chat_template else []
        probe = TemplateProbe.of(inputs.chat_text) if inputs.has_chat_template else TemplateProbe()
        reasoning = find_reasoning_form(reasoning_parser, [*templates, *probe.texts])

        def token_name(text: str) -> str | None:
            token_id = inputs.tokenizer.token_id(text)
            return None if token_id is None or token_id >= inputs.model_info.vocab_size else by_id(token_id)

        tools = find_tool_format(tool_parser, templates, probe.call, token_name)
        end_id = None if reasoning is None else inputs.tokenizer.token_id(reasoning.closes)
        markers = _markers(tools, reasoning)
        ids = {text: token_id for text in markers if (token_id := inputs.tokenizer.token_id(text)) is not None}
        special = {text: token_id for text, token_id in ids.items() if inputs.tokenizer.is_special(token_id)}
        return cls(tools, reasoning, end_id, special, shows_tools=probe.shows_tools)


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """How to read the answers to one request.

    in_reasoning: True if the prompt ends with the opening marker of reasoning.
    shown_ids: Ids of the special tokens that the detokenizer keeps as markers.
    frame: Call format if its markers also enclose content, otherwise None.
    is_whole: True to emit only complete calls.
    """

    toolbox: Toolbox = NO_TOOLS
    reasoning: ReasoningForm | None = None
    in_reasoning: bool = False
    reasoning_end_id: int | None = None
    shown_ids: tuple[int, ...] = ()
    frame: ToolFormat | None = None
    is_whole: bool = False

    @classmethod
    def of(cls, style: AnswerStyle, toolbox: Toolbox, prompt: str, *, is_whole: bool = False) -> AnswerForm:
        """Return the form of the answers to a prompt.

        If the prompt ends with the closing marker of reasoning, answers have no reasoning.
        """
        end, reasoning = prompt.rstrip(), style.reasoning
        if reasoning is not None and end.endswith(reasoning.closes):
            reasoning = None
        in_reasoning = reasoning is not None and end.endswith(reasoning.opens)
        frame = style.tools if style.tools is not None and style.tools.frames_content else None
        markers = _markers(frame or toolbox.format, reasoning)
        shown = tuple(style.special_ids[text] for text in markers if text in style.special_ids)
        return cls(toolbox, reasoning, in_reasoning, style.reasoning_end_id, shown, frame, is_whole)

    @property
    def has_reasoning(self) -> bool:
        """See `AnswerStyle.has_reasoning`."""
        return self.reasoning is not None

    @property
    def is_plain(self) -> bool:
        """Whether all text is content."""
        return self.toolbox.format is None and self.frame is None and not self.has_reasoning

    def parser(self) -> AnswerParser:
        """Return a new parser."""
        frame, toolbox = self.frame, self.toolbox
        parser = toolbox.parser() if frame is None else frame.parser(toolbox.functions, only_one=toolbox.only_one)
        if self.is_whole and isinstance(parser, ToolParser):
            parser.num_held_chars = None
        if self.reasoning is None or (frame is not None and frame.reads_reasoning):
            return parser
        interrupts = None if toolbox.format is None else toolbox.format.reasoning_ends(toolbox.functions)
        return ReasoningParser(parser, is_open=self.in_reasoning, form=self.reasoning, interrupts=interrupts)

    def applied_to(self, params: SamplingParams) -> SamplingParams:
        """Return `params` with `shown_ids` and the grammar, if any. The grammar applies after the reasoning."""
        structure = self._framed(self.toolbox.structure(params.structured_outputs))
        if structure is not None and self.reasoning is not None and structure.starts_after is None:
            free_from = None if self.in_reasoning else self.reasoning.opens
            structure = replace(structure, starts_after=self.reasoning.closes, free_from=free_from)
        return replace(params, structured_outputs=structure, shown_special_token_ids=list(self.shown_ids))

    def _framed(self, structure: StructuredOutputsParams | None) -> StructuredOutputsParams | None:
        if self.frame is None or structure is None or self.toolbox.format is not None:
            return structure
        if structure.json is None and structure.json_object is None:
            message = "this model writes its content in messages of its own form: JSON can be asked for, nothing else"
            raise RequestError(message, parameter="structured_outputs")
        return StructuredOutputsParams(grammar=self.frame.content(str(structure.json or '{"type": "object"}')))


def _markers(tools: ToolFormat | None, reasoning: ReasoningForm | None) -> list[str]:
    return [*(tools.markers if tools else ()), *((reasoning.opens, reasoning.closes) if reasoning else ())]


class AnswerReader:
    """Splits one answer into parts."""

    def __init__(self, form: AnswerForm) -> None:
        self._parser = form.parser()
        self._end_id = form.reasoning_end_id
        self._num_tokens = 0
        self._is_counting = True
        self._has_reasoning = False

    @property
    def num_reasoning_tokens(self) -> int:
        """Number of tokens up to the reasoning's end marker, inclusive. 0 if the marker is not one token."""
        return self._num_tokens if self._has_reasoning and self._end_id is not None else 0

    def read(self, completion: CompletionOutput) -> list[Part]:
        """Return the parts of new text."""
        self._count(completion.token_ids)
        text, parts = completion.text, list[Part]()
        for start in range(0, len(text), _PIECE):
            parts += self._parser.feed(text[start : start + _PIECE])
        if completion.finished:
            is_regular_end = completion.finish_reason == "stop" and not isinstance(completion.stop_reason, str)
            parts += self._parser.finish(is_cut=not is_regular_end)
        self._has_reasoning = self._has_reasoning or "reasoning" in [part.kind for part in parts]
        return joined(parts)

    def _count(self, token_ids: Sequence[int]) -> None:
        if self._is_counting:
            self._is_counting = self._end_id not in token_ids
            self._num_tokens += len(token_ids) if self._is_counting else token_ids.index(self._end_id) + 1
