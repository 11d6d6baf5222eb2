"""Rebuild a GGUF file's tokenizer with the `tokenizers` library.

The kind "gpt2" is byte-level BPE. "llama" is SentencePiece BPE with merges computed from scores, as in transformers.
"gemma4" is SentencePiece BPE with a list of merges.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, TypeVar

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from octavo.engine.gguf_pre_tokenizers import DEFAULT, PRE_TOKENIZERS, PreTokenizer
from octavo.engine.tokenizer import Tokenizer
from octavo.errors import ModelError
from octavo.runtime.faults import is_fault

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

logger = logging.getLogger(__name__)

_Item = TypeVar("_Item", str, int, float)
_PREFIX = "tokenizer.ggml."
_BYTES, _SCORES, _SPACED = "gpt2", "llama", "gemma4"  # values of tokenizer.ggml.model
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # values of tokenizer.ggml.token_type
_SPACE = "\u2581"
_IDS = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "sep_token": "seperator",  # the spelling in GGUF files
    "pad_token": "padding",
    "cls_token": "cls",
    "mask_token": "mask",
}
_ENDS = ("eos", "eot", "eom")
# Many files name only one EOS token, but the model may end turns with one of these.
_END_MARKS = frozenset(
    (
        *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>"),
        *("<|endoftext|>", "<|end_of_text|>", "<end_of_utterance>", "<\uff5cend\u2581of\u2581sentence\uff5c>"),
    )
)
_END_TEXTS = _END_MARKS | {"<EOT>", "[EOT]", "[EOS]", "</s>", "<eos>"}  # a control token with such a text is EOS


class GGUFVocabulary:
    """The tokenizer in a GGUF file's metadata, if any. Methods raise `ModelError`."""

    def __init__(self, path: Path, metadata: Mapping[str, Any]) -> None:
        self._path = path
        self._metadata = metadata
        tokens = self._list("tokens", str) if f"{_PREFIX}tokens" in metadata else []
        self._tokens = [text or f"[EMPTY_{id_}]" for id_, text in enumerate(tokens)]
        self.size = len(self._tokens)
        types = self._list("token_type", int, [_NORMAL] * self.size) if tokens else []
        # Tokens that always end a turn become control tokens, as in llama.cpp.
        marks = {id_ for id_, text in enumerate(tokens) if text in _END_MARKS}
        self._types = [_CONTROL if id_ in marks else kind for id_, kind in enumerate(types)]

    def check(self) -> None:
        """Raise `ModelError` if the tokenizer is unsupported or invalid."""
        kind = self._get("model", str, None)
        if kind not in {_BYTES, _SCORES, _SPACED}:
            raise self._error("model", "octavo builds the kinds gpt2, llama and gemma4; give another tokenizer")
        if kind == _BYTES:
            self._pre_tokenizer()
        if self.size == 0:
            raise self._error("tokens", "there are none; give another tokenizer")
        if len(self._types) != self.size:
            raise self._error("token_type", f"has {len(self._types)} entries, but there are {self.size} tokens")
        if len(set(self._tokens)) != self.size:
            raise self._error("tokens", "some tokens occur twice")

    def build(self) -> Tokenizer:
        """Build the tokenizer."""
        self.check()
        special = self._special_tokens()
        try:
            match self._get("model", str, None):
                case "gpt2":
                    backend = self._merging_bytes()
                case "llama":
                    backend = self._merging_pieces(self._merges_by_score())
                case _:
                    backend = self._merging_pieces(self._merges())
            self._add_tokens(backend)
            if processor := self._post_processor(special):
                backend.post_processor = processor
        except BaseException as error:
            if isinstance(error, ModelError) or not is_fault(error):
                raise
            raise ModelError(f"{self._path}: {_PREFIX}*: no tokenizer can be built of them ({error})") from error
        return Tokenizer(backend, special)

    def eos_token_ids(self) -> tuple[int, ...]:
        """Return EOS ids."""
        named = {id_ for each in _ENDS if (id_ := self._id(each)) is not None}
        by_text = {
            id_
            for id_, (text, kind) in enumerate(zip(self._tokens, self._types, strict=False))
            if kind == _CONTROL and text in _END_TEXTS
        }
        return tuple(sorted(named | by_text))

    def _merging_bytes(self) -> tokenizers.Tokenizer:
        kind = self._pre_tokenizer()
        if kind is DEFAULT:
            logger.warning(
                "%s does not say how its tokenizer cuts texts (%spre): cut as llama.cpp cuts those of old files, which "
                "may not be how the model was trained",
                self._path,
                _PREFIX,
            )
        model = models.BPE(self._vocabulary(), self._merges(), ignore_merges=kind.ignores_merges)
        backend = tokenizers.Tokenizer(model)
        cuts = [pre_tokenizers.Split(tokenizers.Regex(each), "isolated") for each in kind.patterns]
        as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, as_bytes])
        backend.decoder = decoders.ByteLevel()
        return backend

    def _merging_pieces(self, merges: list[tuple[str, str]]) -> tokenizers.Tokenizer:
        unknown = self._id("unknown")
        model = models.BPE(
            self._vocabulary(),
            merges,
            unk_token=None if unknown is None else self._tokens[unknown],
            fuse_unk=True,
            byte_fallback="<0x00>" in self._tokens,
        )
        backend = tokenizers.Tokenizer(model)
        has_prefix = self._get("add_space_prefix", bool, self._get("model", str, None) == _SCORES)
        spaces = normalizers.Replace(" ", _SPACE)
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if has_prefix else spaces
        if self._get("model", str, None) == _SPACED:
            backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[^\n]+|[\n]+"), "isolated")
        strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
        backend.decoder = decoders.Sequence(
            [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
        )
        return backend

    def _pre_tokenizer(self) -> PreTokenizer:
        name = self._get("pre", str, "")
        if not name:
            return DEFAULT
        if name not in PRE_TOKENIZERS:
            raise self._error("pre", f"octavo knows {', '.join(PRE_TOKENIZERS)}; give another tokenizer")
        return PRE_TOKENIZERS[name]

    def _vocabulary(self) -> dict[str, int]:
        return {text: id_ for id_, text in enumerate(self._tokens)}

    def _merges(self) -> list[tuple[str, str]]:
        merges = []
        for each in self._list("merges", str):
            middle = each.find(" ", 1)
            merges.append((each[:middle], each[middle + 1 :]))
        return merges

    def _merges_by_score(self) -> list[tuple[str, str]]:
        scores = self._list("scores", float)
        if len(scores) < self.size:
            raise self._error("scores", f"has {len(scores)} entries, but there are {self.size} tokens")
        ids = {text: id_ for id_, text in enumerate(self._tokens) if self._types[id_] == _NORMAL}
        found: list[tuple[float, int, int, str, str]] = []
        for text, id_ in ids.items():
            pairs = [(text[:cut], text[cut:]) for cut in range(1, len(text))]
            known = [(ids[left], ids[right], left, right) for left, right in pairs if left in ids and right in ids]
            found.extend((scores[id_], len(left), len(right), left, right) for _, _, left, right in sorted(known))
        found.sort(key=lambda each: each[:3], reverse=True)
        return [(left, right) for _, _, _, left, right in found]

    def _add_tokens(self, backend: tokenizers.Tokenizer) -> None:
        strips = self._strips_after()
        for is_special, kinds in ((True, {_CONTROL, _UNKNOWN}), (False, {_USER_DEFINED})):
            added = [
                tokenizers.AddedToken(text, normalized=False, special=is_special, rstrip=text in strips)
                for text, kind in zip(self._tokens, self._types, strict=True)
                if kind in kinds
            ]
            (backend.add_special_tokens if is_special else backend.add_tokens)(added)

    def _strips_after(self) -> frozenset[str]:
        # Only Phi-3 has tokens that strip following spaces. As in llama.cpp, Phi-3 is detected by name.
        name = str(self._metadata.get("general.name", "")).lower()
        if "phi-3" not in name and "phi3" not in name:
            return frozenset()
        kinds = zip(self._tokens, self._types, strict=True)
        found = {text for text, kind in kinds if kind in {_CONTROL, _UNKNOWN, _USER_DEFINED}}
        return frozenset(found | {"</s>"}) - {"<unk>", "<s>", "<|endoftext|>"}

    def _post_processor(self, special: dict[str, str]) -> processors.TemplateProcessing | None:
        kind = self._get("model", str, None)
        bos_is_usual = kind == _SCORES or (kind == _BYTES and self._pre_tokenizer().adds_bos)
        around: dict[str, tuple[str, int]] = {}
        for side, key, is_usual in (("bos", "bos_token", bos_is_usual), ("eos", "eos_token", False)):
            id_ = self._id(side)
            if id_ is not None and self._get(f"add_{side}_token", bool, is_usual):
                around[side] = special[key], id_
        if not around:
            return None
        parts = [around["bos"][0]] if "bos" in around else []
        parts += ["$A", around["eos"][0]] if "eos" in around else ["$A"]
        return processors.TemplateProcessing(single=parts, special_tokens=list(dict(around.values()).items()))

    def _special_tokens(self) -> dict[str, str]:
        ids = {key: self._id(name) for key, name in _IDS.items()}
        return {key: self._tokens[id_] for key, id_ in ids.items() if id_ is not None}

    def _id(self, name: str) -> int | None:
        id_ = self._get(f"{name}_token_id", int, None)
        return id_ if id_ is not None and 0 <= id_ < self.size else None

    def _get(self, key: str, kind: type, default: Any) -> Any:
        value = self._metadata.get(_PREFIX + key, default)
        if value is not default and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
            raise self._error(key, f"must be of type {kind.__name__}")
        return value

    def _list(self, key: str, kind: type[_Item], default: list[_Item] | None = None) -> list[_Item]:
        values = self._metadata.get(_PREFIX + key, default)
        if not isinstance(values, list) or not values or not all(isinstance(each, kind) for each in values):
            raise self._error(key, f"must be a list of {kind.__name__}s, one of each token")
        return values

    def _error(self, key: str, problem: str) -> ModelError:
        shown = repr(self._metadata.get(_PREFIX + key))
        return ModelError(f"{self._path}: {_PREFIX}{key} = {shown[:100]}: {problem}")
