"""The known formats of tool calls, and their detection."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from octavo.server.answers import (
    gemma_calls,
    harmony,
    kimi_k3,
    muse_glimmer,
    named_calls,
    nested_calls,
    object_calls,
    python_calls,
    recipients,
    tagged_calls,
    template_probe,
    tool_formats,
)
from octavo.server.answers.generic_calls import GenericFormat
from octavo.server.answers.tool_format import Function

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from octavo.server.answers.tool_format import ToolFormat

FORMATS: tuple[type[ToolFormat], ...] = (
    tool_formats.HermesFormat,
    tool_formats.NamedMistralFormat,
    tool_formats.MistralFormat,
    tagged_calls.Qwen3CoderFormat,
    tagged_calls.SeedOSSFormat,
    tagged_calls.MiniMaxM2Format,
    nested_calls.MiniMaxM3Format,
    tagged_calls.GLMFormat,
    tagged_calls.GLM47Format,
    tagged_calls.Hy3Format,
    tagged_calls.DeepSeekV32Format,
    tagged_calls.DeepSeekV4Format,
    tagged_calls.MiniCPM5Format,
    named_calls.DeepSeekV3Format,
    named_calls.DeepSeekV31Format,
    named_calls.KimiK2Format,
    kimi_k3.KimiK3Format,
    named_calls.SolarFormat,
    named_calls.FunctionaryFormat,
    recipients.RecipientsFormat,
    object_calls.Phi4MiniFormat,
    object_calls.GraniteFormat,
    object_calls.FunctoolsFormat,
    object_calls.NemotronFormat,
    object_calls.ToolCallsListFormat,
    object_calls.MiniMaxM1Format,
    object_calls.CohereFormat,
    object_calls.CommandRFormat,
    object_calls.ApertusFormat,
    object_calls.GigaChat3Format,
    object_calls.OldGigaChat3Format,
    gemma_calls.GemmaFormat,
    harmony.HarmonyFormat,
    muse_glimmer.MuseGlimmerFormat,
    python_calls.LFM2Format,
    python_calls.OLMo3Format,
    tool_formats.LlamaFormat,
    python_calls.PythonicFormat,
)

_PROBE = (template_probe.NAME, template_probe.ARGUMENTS)
_AS_CLIENTS = '"function": {'

# A template matches if it contains all texts of the entry.
_MARKS: tuple[tuple[tuple[str, ...], type[ToolFormat]], ...] = (
    (("<tool_call>", "<function=", "<parameter="), tagged_calls.Qwen3CoderFormat),
    (("<tool_call>", "<arg_key>"), tagged_calls.GLMFormat),
    (("<tool_call>",), tool_formats.HermesFormat),
    (("<｜tool▁calls▁begin｜>",), named_calls.DeepSeekV3Format),
    (("<|tool_calls_section_begin|>",), named_calls.KimiK2Format),
    (("[TOOL_CALLS]", "[ARGS]"), tool_formats.NamedMistralFormat),
    (("[TOOL_CALLS]",), tool_formats.MistralFormat),
    (("<|python_tag|>",), tool_formats.LlamaFormat),
    (('"parameters": dictionary of argument name and its value',), tool_formats.LlamaFormat),  # Llama 3.2's
    (("<|tool_call|>",), object_calls.GraniteFormat),
    (("<|/tool|>",), object_calls.Phi4MiniFormat),
    (("functools[",), object_calls.FunctoolsFormat),
    (("<|tool_call_start|>",), python_calls.LFM2Format),
    (("List of tools: <|tool_list_start|>[",), python_calls.LFM2Format),
    (("List of tools: [",), python_calls.LFM2Format),
    (("[func_name1(params_name1=",), python_calls.PythonicFormat),
)


def find_tool_format(
    wanted: str, templates: Sequence[str], written: str | None, token_name: Callable[[str], str | None]
) -> ToolFormat | None:
    """Return the format named `wanted`, or None if `wanted` is "none".

    If several formats have this name, return the format that the chat templates use, or else the first.

    For "auto", return the format that the chat templates use, or `GenericFormat` if this format is unknown. If the
    model has no chat template, return None.

    written: Text that the templates render for the sample call of `template_probe`, or None if the templates refuse the
    call.
    """
    if wanted == "none":
        return None
    if wanted == GenericFormat.name:
        return GenericFormat(token_name)
    named = [each for each in FORMATS if wanted in {"auto", each.name}]
    shown = _shown(named, written, "\n".join(templates))
    if shown is not None or wanted != "auto":
        return (shown or named[0])(token_name)
    return GenericFormat(token_name) if templates else None


def _shown(formats: Sequence[type[ToolFormat]], written: str | None, text: str) -> type[ToolFormat] | None:
    """Return the format that the chat templates use, or None.

    Prefer a format that writes the sample call exactly as the templates do, then a format that reads the call. If the
    templates omit the call or copy the client's JSON, `_MARKS` decides.
    """
    if written is not None and template_probe.NAME in written and _AS_CLIENTS not in written:
        tests = (_is_written, _is_read)
        return next((each for test in tests for each in formats if test(each(), written)), None)
    return next((each for marks, each in _MARKS if each in formats and all(mark in text for mark in marks)), None)


def _is_written(form: ToolFormat, text: str) -> bool:
    return form.write([_PROBE]) in text or form.shows(text, template_probe.NAME)


def _is_read(form: ToolFormat, text: str) -> bool:
    beginning, _, _ = form.write([_PROBE]).partition(str(template_probe.ARGUMENTS["city"]))
    if any(mark in beginning and mark not in text for mark in form.markers):
        return False
    parser = form.parser([Function(template_probe.NAME, template_probe.PARAMETERS)])
    parts = parser.feed(text) + parser.finish()
    called = [part.text for part in parts if part.kind == "call"]
    if called != [template_probe.NAME]:
        return False
    arguments = "".join(part.text for part in parts if part.kind == "arguments")
    try:
        return bool(json.loads(arguments) == template_probe.ARGUMENTS)
    except ValueError:
        return False
