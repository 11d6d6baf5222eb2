"""The known markers of reasoning, and their detection."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.server.answers.parts import THINK, ReasoningForm

if TYPE_CHECKING:
    from collections.abc import Sequence

REASONING_FORMS = (
    THINK,
    ReasoningForm("mistral", "[THINK]", "[/THINK]"),
    ReasoningForm("seed_oss", "<seed:think>", "</seed:think>"),
    ReasoningForm("minimax_m3", "<mm:think>", "</mm:think>"),
    ReasoningForm("hy_v3", "<think:opensource>", "</think:opensource>"),
    ReasoningForm("cohere_command3", "<|START_THINKING|>", "<|END_THINKING|>"),
    ReasoningForm("apertus", "<|inner_prefix|>", "<|inner_suffix|>"),
    ReasoningForm("granite", "Here is my thought process:", "Here is my response:"),
    ReasoningForm("gemma4", "<|channel>thought", "<channel|>"),
    ReasoningForm("openai_gptoss", "<|channel|>analysis<|message|>", "<|end|>", is_found_by_opens=True),
    ReasoningForm("kimi_k3", "<|open|>think<|sep|>", "<|close|>think<|sep|>", is_found_by_opens=True),
    ReasoningForm("muse_glimmer", "to=self<|message|>", "<|eom|>", is_found_by_opens=True),
    ReasoningForm("solar_open", "<|think|>", "<|end|>", is_found_by_opens=True),
    ReasoningForm("apriel", "Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
)


def find_reasoning_form(wanted: str, templates: Sequence[str]) -> ReasoningForm | None:
    """Return the form named `wanted`, or None. For "auto", return the first form that a chat template uses."""
    if wanted == "auto":
        return next((each for each in REASONING_FORMS if _is_shown(each, templates)), None)
    return next((each for each in REASONING_FORMS if each.name == wanted), None)


def _is_shown(form: ReasoningForm, templates: Sequence[str]) -> bool:
    mark = form.opens if form.is_found_by_opens else form.closes
    return any(mark in text for text in templates)
