"""The texts that a grammar accepts, with vocabularies that have the markers of model families."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import tokenizers

from octavo import assets
from octavo.structured_output.grammars import GrammarCompiler, GrammarError, Vocabulary

if TYPE_CHECKING:
    from octavo.sampling_params import StructuredOutputsParams

EOS = 2


class Grammars:
    """The vocabulary of the built-in model, with markers as in the vocabularies of families.

    kind: "plain": no marker is a token; "special": markers are special tokens; "added": they are text tokens, as
    Qwen's.
    """

    def __init__(self, kind: str, markers: list[str]) -> None:
        self.kind = kind
        text = (Path(assets.__file__).parent / "demo" / "tokenizer.json").read_text(encoding="utf-8")
        self.plain, self.tokenizer = tokenizers.Tokenizer.from_str(text), tokenizers.Tokenizer.from_str(text)
        self.plain.encode_special_tokens = True
        if kind != "plain":
            tokens = [tokenizers.AddedToken(each, special=kind == "special", normalized=False) for each in markers]
            (self.tokenizer.add_special_tokens if kind == "special" else self.tokenizer.add_tokens)(tokens)
        self.size = self.tokenizer.get_vocab_size()
        self.compile = self.compiler(self.size).compile

    def compiler(self, num_rows: int) -> GrammarCompiler:
        """Return a compiler for a model with `num_rows` rows."""
        added_ids = frozenset(self.tokenizer.get_added_tokens_decoder())
        eos_ids = frozenset({EOS, self.size, self.size + 999})
        vocabulary = Vocabulary(self.tokenizer.to_str(), self.size, eos_ids, self.tokenizer.token_to_id, added_ids)
        return GrammarCompiler(lambda: vocabulary, num_rows)

    def token_name(self, text: str) -> str | None:
        token_id = self.tokenizer.token_to_id(text)
        return None if token_id is None else f"<[{token_id}]>"

    def accepts(self, structure: StructuredOutputsParams, text: str, *, in_letters: bool = False) -> bool:
        """Return True if the text is a complete answer. in_letters: written without the tokens of markers."""
        matcher = self.compile(structure)
        tokenizer = self.plain if in_letters else self.tokenizer
        try:
            matcher.advance(tokenizer.encode(text, add_special_tokens=False).ids)
        except GrammarError:
            return False
        return bool(matcher.allowed()[EOS])
