"""Grammars in llama.cpp's notation over the vocabularies of real models."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tokenizers import Tokenizer

from octavo.sampling_params import StructuredOutputsParams
from octavo.structured_output import gbnf
from octavo.structured_output.grammars import GrammarCompiler, Vocabulary

llguidance = pytest.importorskip("llguidance")
# llama.cpp's json.gbnf.
JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""
DOCUMENT = {"name": 'ein "Fuchs", 狐 🙂', "of": [1, -2.5e3, None, {}]}


NOTES = r"""
root ::= "{" space title-kv ("," space notes-kv)? "}" space
title-kv ::= "\"title\"" space ":" space string
notes-kv ::= "\"notes\"" space ":" space "[" space (root ("," space root)*)? "]" space
char ::= [^"\\\x7F\x00-\x1F] | [\\] (["\\bfnrt] | "u" [0-9a-fA-F]{4})
string ::= "\"" char* "\"" space
space ::= | " " | "\n"{1,2} [ \t]{0,20}
"""  # in the form of llama.cpp's json_schema_to_grammar.py
WITHOUT_RECURSION = r'root ::= "Answer: " [^\n]{1,200} "\n" ("yes" | "no")'
WALKS = {
    "json": (JSON, json.dumps(DOCUMENT, ensure_ascii=False)),
    "notes": (NOTES, json.dumps({"title": "ein Fuchs, 狐", "notes": [{"title": "b"}]}, ensure_ascii=False)),
    "without recursion": (WITHOUT_RECURSION, "Answer: it jumps, 狐 🙂\nyes"),
}


def compiler_of(path):
    """Return a grammar compiler for a model's vocabulary, llguidance's tokenizer, and the EOS token id."""
    text = (path / "tokenizer.json").read_text(encoding="utf-8")
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    eos = config["eos_token_id"] if isinstance(config["eos_token_id"], int) else config["eos_token_id"][0]
    known = Tokenizer.from_str(text)
    added = frozenset(known.get_added_tokens_decoder())
    vocabulary = Vocabulary(text, known.get_vocab_size(), frozenset([eos]), known.token_to_id, added)
    tokenizer = llguidance.LLTokenizer(text, n_vocab=config["vocab_size"], eos_token=[eos])
    return GrammarCompiler(lambda: vocabulary, config["vocab_size"]), tokenizer, eos


@pytest.mark.parametrize("name", ["smollm2", "phi35"])
def test_json_grammar_allows_document_token_by_token(real_model, name: str) -> None:
    compiler, tokenizer, eos = compiler_of(real_model(name))
    matcher = compiler.compile(StructuredOutputsParams(grammar=JSON))
    for token_id in tokenizer.tokenize_str(json.dumps(DOCUMENT, ensure_ascii=False, indent=1)):
        allowed = matcher.allowed()
        assert allowed[token_id]
        assert not allowed[eos]
        matcher.advance([token_id])
    assert matcher.allowed()[eos]


def masks(compiler: GrammarCompiler, grammar: str, token_ids: list[int]) -> list[np.ndarray]:
    matcher = compiler.compile(StructuredOutputsParams(grammar=grammar))
    found = [matcher.allowed().copy()]
    for token_id in token_ids:
        matcher.advance([token_id])
        found.append(matcher.allowed().copy())
    return found


def test_lexeme_grammar_masks_equal_character_grammar_masks(real_model, monkeypatch) -> None:
    """Compares all 150,000 tokens at every place."""
    compiler, tokenizer, eos = compiler_of(real_model("qwen3"))
    for grammar, text in WALKS.values():
        token_ids = tokenizer.tokenize_str(text)
        by_lexemes = masks(compiler, grammar, token_ids)
        with monkeypatch.context() as patch:
            patch.setattr(gbnf, "with_lexemes", lambda rules: rules)
            gbnf.to_lark.cache_clear()
            by_chars = masks(compiler, grammar, token_ids)
        gbnf.to_lark.cache_clear()
        assert by_lexemes[-1][eos]
        assert [mask.tobytes() for mask in by_lexemes] == [mask.tobytes() for mask in by_chars]
