"""The format of a model's calls is the one in which its chat template writes a call."""

from __future__ import annotations

import pytest

from octavo.server.answers import template_probe
from octavo.server.answers.generic_calls import GenericFormat
from octavo.server.answers.known_formats import FORMATS, find_tool_format
from octavo.server.answers.tool_format import ToolFormat
from octavo.server.answers.tool_formats import HermesFormat

CALL = (template_probe.NAME, template_probe.ARGUMENTS)


def found(
    written: str | None, wanted: str = "auto", templates: tuple[str, ...] = ("{{ messages }}",)
) -> ToolFormat | None:
    return find_tool_format(wanted, templates, written, lambda _: None)


@pytest.mark.parametrize(
    "form", [each for each in FORMATS if each is not GenericFormat], ids=lambda form: form.__name__
)
def test_template_call_determines_tool_format(form: type[ToolFormat]) -> None:
    """Formats that write this call alike are one: the first of them is found."""
    written = form().write([CALL])
    known = found(f"text {written} text")
    assert known is not None
    assert known.write([CALL]) in written or known.shows(written, template_probe.NAME)
    same_name = found(f"text {written} text", form.name)
    assert same_name is not None
    assert same_name.name == form.name


def test_call_with_different_blanks_is_detected_by_parsing() -> None:
    spread = HermesFormat().write([CALL]).replace('{"name":', '{ "name" : ').replace('"days": 2', '"days" :2')
    assert HermesFormat().write([CALL]) not in spread
    assert isinstance(found(f"<text>{spread}"), HermesFormat)


@pytest.mark.parametrize(
    "written",
    [
        f"{template_probe.NAME} with Rome and 2",  # the name, and no call
        HermesFormat().write([(template_probe.NAME, {"city": "Rome"})]),  # other arguments
        HermesFormat().write([("other", template_probe.ARGUMENTS)]) + template_probe.NAME,
        HermesFormat().write([CALL]).replace('"days": 2', '"days": 2 2'),
        HermesFormat().write([(template_probe.NAME, {"city": "Rome", "text": "x" * 2000})])[:-40],  # it breaks off
        HermesFormat().write([CALL, CALL]).replace('"days": 2', '"days":2'),  # two calls
    ],
)
def test_unrecognized_template_call_gives_generic_format(written: str) -> None:
    assert isinstance(found(written), GenericFormat)


def test_template_markers_determine_format_without_written_call() -> None:
    assert isinstance(found(None, templates=("<tool_call> {{ tools }}",)), HermesFormat)
    assert isinstance(found(None), GenericFormat)
    assert found(None, templates=()) is None
    assert found(HermesFormat().write([CALL]), "none") is None
