"""Perplexity computed by the engine that serves, and `octavo quantize`, which reports it."""

import math
import re

import pytest
import torch
from sdks import transformers
from typer.testing import CliRunner

from octavo.assets import built_in_model_path
from octavo.cli import app
from octavo.cli.perplexity import mean_losses, opened, perplexity, python_reference, text_pieces
from octavo.errors import RequestError


@pytest.fixture(scope="module")
def llm():
    with opened(built_in_model_path(), kv_cache_memory_bytes=64 << 20) as found:
        yield found


@pytest.mark.turn(16)
def test_losses_equal_those_of_single_pieces_and_transformers(llm):
    pieces = text_pieces(llm, python_reference(), max_pieces=2)
    assert [len(piece) for piece in pieces] == [len(pieces[0])] * 2
    whole = llm.get_tokenizer().encode(python_reference())
    assert [token for piece in pieces for token in piece] == whole[: 2 * len(pieces[0])]
    seen = []
    losses = mean_losses(llm, pieces, on_piece=seen.append)
    assert seen == pieces
    assert losses == [mean_losses(llm, [piece])[0] for piece in pieces]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(built_in_model_path(), dtype=torch.float32)
    for piece, loss in zip(pieces, losses, strict=True):
        with torch.no_grad():
            logits = theirs(torch.tensor([piece])).logits[0, :-1]
        expected = torch.nn.functional.cross_entropy(logits, torch.tensor(piece[1:]))
        assert loss == pytest.approx(expected.item(), rel=0.02)  # tolerance for bfloat16
    assert perplexity([0.5, 1.5]) == math.e


@pytest.mark.turn(8)
def test_expired_time_limit_computes_only_first_piece(llm):
    pieces = text_pieces(llm, python_reference(), max_pieces=3)
    assert len(mean_losses(llm, pieces, seconds=0.0)) == 1


def test_text_shorter_than_one_piece_is_refused(llm):
    with pytest.raises(RequestError, match=r"the text has \d+ tokens; perplexity needs pieces of \d+"):
        text_pieces(llm, "too short")


@pytest.mark.turn(12)
def test_quantize_reports_perplexity_before_and_after(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(python_reference()[:9000], encoding="utf-8")
    run = ["quantize", str(built_in_model_path()), str(tmp_path / "int4"), "-q", "int4", "--text", str(text)]
    result = CliRunner().invoke(app, run)
    assert result.exit_code == 0, result.stderr
    found = re.search(
        r"perplexity on the text \((\d+) pieces of \d+ tokens\): ([\d.]+) before, ([\d.]+) after", result.stdout
    )
    assert found is not None, result.stdout
    before, after = float(found[2]), float(found[3])
    assert before != after
    assert 0.8 < after / before < 1.3


def test_quantize_refuses_gguf_file_and_names_option(tmp_path):
    """The error names the option to use instead.

    An error that only asked for a directory would suggest that GGUF files cannot be served.
    """
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    result = CliRunner().invoke(app, ["quantize", str(tmp_path / "model.gguf"), str(tmp_path / "copy")])
    assert result.exit_code == 1
    assert "model.gguf is a GGUF file" in result.stderr
    assert "--quantization int8" in result.stderr
    assert not (tmp_path / "copy").exists()


def test_quantize_without_perplexity_loads_no_engine(tmp_path, monkeypatch):
    monkeypatch.setattr("octavo.cli.perplexity.opened", None)
    run = ["quantize", str(built_in_model_path()), str(tmp_path / "int8"), "--no-perplexity"]
    result = CliRunner().invoke(app, run)
    assert result.exit_code == 0, result.stderr
    assert "perplexity" not in result.stdout


def test_quantized_copy_remains_if_perplexity_cannot_be_measured(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("too short", encoding="utf-8")
    run = ["quantize", str(built_in_model_path()), str(tmp_path / "int8"), "--text", str(text)]
    result = CliRunner().invoke(app, run)
    assert result.exit_code == 0, result.stderr
    assert "perplexity was not measured: the text has" in result.stderr
    assert (tmp_path / "int8" / "config.json").is_file()
