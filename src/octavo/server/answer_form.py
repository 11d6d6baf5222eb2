"""How a model's answers are read: what is reasoning, what is content, what calls a tool."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from octavo.server.parts import REASONING_CLOSES, REASONING_OPENS, Part, ReasoningParser, joined
from octavo.server.tool_formats import find_tool_format
from octavo.server.tools import NO_TOOLS

_PIECE = 4096  # characters that a parser takes at once: what it cuts off is copied

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo.engine.input_processor import InputProcessor
    from octavo.outputs import CompletionOutput
    from octavo.sampling_params import SamplingParams
    from octavo.server.parts import AnswerParser
    from octavo.server.tool_formats import ToolFormat
    from octavo.server.tools import Toolbox


@dataclass(frozen=True, slots=True)
class AnswerStyle:
    """How a model writes what is not plain content: calls of tools, and reasoning.

    reasoning_end_id: the token that ends reasoning, where it is one.
    """

    tools: ToolFormat | None = None
    has_reasoning: bool = False
    reasoning_end_id: int | None = None

    @classmethod
    def find(cls, tool_parser: str, reasoning_parser: str, inputs: InputProcessor) -> AnswerStyle:
        """Find it by the options of the server: names, or "auto" for what the chat templates write."""
        templates = inputs.chat_templates if inputs.has_chat_template else []
        closes = any(REASONING_CLOSES in template for template in templates)
        has_reasoning = reasoning_parser == "think" or (reasoning_parser == "auto" and closes)

        def spell(text: str) -> str | None:
            token_id = inputs.tokenizer.token_id(text)
            return None if token_id is None or not inputs.tokenizer.is_special(token_id) else f"<[{token_id}]>"

        end_id = inputs.tokenizer.token_id(REASONING_CLOSES) if has_reasoning else None
        return cls(find_tool_format(tool_parser, templates, spell), has_reasoning, end_id)


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """How one request's answers are read. in_reasoning: they begin within it, because the prompt ends so."""

    toolbox: Toolbox = NO_TOOLS
    has_reasoning: bool = False
    in_reasoning: bool = False
    reasoning_end_id: int | None = None

    @classmethod
    def of(cls, style: AnswerStyle, toolbox: Toolbox, prompt: str) -> AnswerForm:
        """Look at the text of a prompt."""
        in_reasoning = style.has_reasoning and prompt.rstrip().endswith(REASONING_OPENS)
        return cls(toolbox, style.has_reasoning, in_reasoning, style.reasoning_end_id)

    @property
    def is_plain(self) -> bool:
        """Whether an answer is its text and nothing else."""
        return self.toolbox.format is None and not self.has_reasoning

    def parser(self) -> AnswerParser:
        """Return what reads one answer."""
        parser = self.toolbox.parser()
        return ReasoningParser(parser, is_open=self.in_reasoning) if self.has_reasoning else parser

    def applied_to(self, params: SamplingParams) -> SamplingParams:
        """Return parameters that make the whole text have this form: reasoning at its beginning is free."""
        structure = self.toolbox.structure(params.structured_outputs)
        if structure is not None and self.has_reasoning and structure.starts_after is None:
            free_from = None if self.in_reasoning else REASONING_OPENS
            structure = replace(structure, starts_after=REASONING_CLOSES, free_from=free_from)
        shows = self.toolbox.format is not None and self.toolbox.format.shows_special_tokens
        return replace(
            params, structured_outputs=structure, skip_special_tokens=params.skip_special_tokens and not shows
        )


class AnswerReader:
    """Reads one answer, whole or as it comes."""

    def __init__(self, form: AnswerForm) -> None:
        self._parser = form.parser()
        self._end_id = form.reasoning_end_id
        self._num_tokens = 0  # up to the end of reasoning
        self._is_counting = True
        self._has_reasoning = False

    @property
    def num_reasoning_tokens(self) -> int:
        """How many tokens the reasoning took, its end included; 0 where its end is not one token."""
        return self._num_tokens if self._has_reasoning and self._end_id is not None else 0

    def read(self, completion: CompletionOutput) -> list[Part]:
        """Return the parts of some more text."""
        self._count(completion.token_ids)
        text, parts = completion.text, list[Part]()
        for start in range(0, len(text), _PIECE):  # of no matter which length: the parts are the same
            parts += self._parser.feed(text[start : start + _PIECE])
        if completion.finished:
            parts += self._parser.finish()
        self._has_reasoning = self._has_reasoning or any(part.kind == "reasoning" for part in parts)
        return joined(parts)

    def _count(self, token_ids: Sequence[int]) -> None:
        if self._is_counting:
            self._is_counting = self._end_id not in token_ids
            self._num_tokens += len(token_ids) if self._is_counting else token_ids.index(self._end_id) + 1
