"""Grammars in llama.cpp's notation over the vocabularies of real models."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer

from octavo.sampling_params import StructuredOutputsParams
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


@pytest.mark.parametrize("name", ["smollm2", "phi35"])
def test_a_document_is_allowed_token_by_token(real_model, name: str) -> None:
    text = (real_model(name) / "tokenizer.json").read_text(encoding="utf-8")
    config = json.loads((real_model(name) / "config.json").read_text(encoding="utf-8"))
    eos = config["eos_token_id"] if isinstance(config["eos_token_id"], int) else config["eos_token_id"][0]
    known = Tokenizer.from_str(text)
    added = frozenset(known.get_added_tokens_decoder())
    vocabulary = Vocabulary(text, known.get_vocab_size(), frozenset([eos]), known.token_to_id, added)
    compiler = GrammarCompiler(lambda: vocabulary, config["vocab_size"])
    matcher = compiler.compile(StructuredOutputsParams(grammar=JSON))
    tokenizer = llguidance.LLTokenizer(text, n_vocab=config["vocab_size"], eos_token=[eos])
    for token_id in tokenizer.tokenize_str(json.dumps(DOCUMENT, ensure_ascii=False, indent=1)):
        allowed = matcher.allowed()
        assert allowed[token_id]
        assert not allowed[eos]
        matcher.advance([token_id])
    assert matcher.allowed()[eos]
