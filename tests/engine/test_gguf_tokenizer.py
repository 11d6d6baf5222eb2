"""Tokenizers rebuilt from metadata: ids equal to SentencePiece and byte-level BPE, added tokens, and refused files."""

import io
import json
import logging
import random
from pathlib import Path

import pytest
import sentencepiece
from gguf_files import byte_vocabulary
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from octavo.engine.gguf_pre_tokenizers import _QWEN2, PRE_TOKENIZERS
from octavo.engine.gguf_tokenizer import GGUFVocabulary
from octavo.errors import ModelError

PATH = Path("model.gguf")
CORPUS = Path(sentencepiece.__file__).read_text(encoding="utf-8").splitlines()[:600]
CORPUS += [
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.", "Съешь же ещё этих мягких французских булок.",
]  # fmt: skip
ALPHABET = "abcdeehllo wwrld  \n\t.,!?'0123456789äöüßжя日本語\U0001f600\u0301\u2581<>|_"


def texts(count=300, seed=0):
    rng = random.Random(seed)
    made = ["".join(rng.choices(ALPHABET, k=rng.randrange(30))) for _ in range(count)]
    return [*made, *CORPUS[:60], "", " ", "  a", "hello world", "<s> a</s>b"]


@pytest.fixture(scope="module")
def pieces():
    """Return a small SentencePiece BPE model with byte tokens."""
    model = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS), model_writer=model, vocab_size=600, model_type="bpe", byte_fallback=True,
        character_coverage=0.98, normalization_rule_name="identity", remove_extra_whitespaces=False,
        split_by_whitespace=False, minloglevel=2, num_threads=1,
    )  # fmt: skip
    return SentencePieceProcessor(model_proto=model.getvalue())


def metadata_of(pieces, **changes):
    """Return metadata as llama.cpp's conversion writes it (_create_vocab_sentencepiece)."""
    types = []
    for id_ in range(pieces.vocab_size()):
        kinds = ((pieces.is_unknown, 2), (pieces.is_control, 3), (pieces.is_unused, 5), (pieces.is_byte, 6))
        types.append(next((kind for is_so, kind in kinds if is_so(id_)), 1))
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [pieces.id_to_piece(id_) for id_ in range(pieces.vocab_size())],
        "tokenizer.ggml.scores": [pieces.get_score(id_) for id_ in range(pieces.vocab_size())],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": pieces.bos_id(),
        "tokenizer.ggml.eos_token_id": pieces.eos_id(),
        "tokenizer.ggml.unknown_token_id": pieces.unk_id(),
    } | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}


def build(metadata):
    return GGUFVocabulary(PATH, metadata).build()


def test_score_merges_equal_sentencepiece(pieces):
    tokenizer = build(metadata_of(pieces))
    plain = [text for text in texts() if not any(each in text for each in ("<s>", "</s>", "<unk>", "\u2581"))]
    assert sum(len(text) > 5 for text in plain) > 200
    for text in plain:
        ids = pieces.encode(text)
        assert tokenizer.encode(text, add_special_tokens=False) == ids, text
        assert tokenizer.encode(text) == [pieces.bos_id(), *ids], text
        assert tokenizer.decode(ids) == text, text
    assert len({len(pieces.encode(text)) for text in plain}) > 10


def test_space_prefix_bos_and_eos_follow_metadata(pieces):
    without = build(metadata_of(pieces, add_space_prefix=False, add_bos_token=False, add_eos_token=True))
    assert without.encode("a") == [pieces.piece_to_id("a"), pieces.eos_id()]
    assert without.decode(without.encode(" a", add_special_tokens=False)) == " a"


def test_user_defined_tokens_are_parsed_in_text_but_not_special(pieces):
    metadata = metadata_of(pieces)
    metadata["tokenizer.ggml.tokens"][5], metadata["tokenizer.ggml.token_type"][5] = "<tool>", 4
    tokenizer = build(metadata)
    assert tokenizer.encode("<tool>x</s>", add_special_tokens=False)[0] == 5
    assert tokenizer.encode("<tool>x</s>", add_special_tokens=False)[-1] == pieces.eos_id()
    assert tokenizer.is_special(pieces.eos_id())
    assert not tokenizer.is_special(5)
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (pieces.bos_id(), pieces.eos_id())


def test_phi3_special_tokens_absorb_following_spaces(pieces):
    metadata = metadata_of(pieces)
    metadata["tokenizer.ggml.tokens"][5], metadata["tokenizer.ggml.token_type"][5] = "<|end|>", 3
    kept = build(metadata).encode("<|end|>  a", add_special_tokens=False)
    taken = build({**metadata, "general.name": "Phi3"}).encode("<|end|>  a", add_special_tokens=False)
    assert taken == [5, *pieces.encode("a")]
    assert kept == [5, *pieces.encode("  a")]


def test_byte_level_merges_equal_tokenizers_library():
    backend = Backend(models.BPE())
    cut = pre_tokenizers.Split(Regex(_QWEN2), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    )
    model = json.loads(backend.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    tokenizer = build(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "qwen2",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        }
    )
    for text in texts():
        assert tokenizer.encode(text) == backend.encode(text).ids, text
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_eos_token_ids_come_from_metadata_and_token_text():
    metadata = byte_vocabulary(288)
    assert GGUFVocabulary(PATH, metadata).eos_token_ids() == (0, 2)  # <|endoftext|>, and <|im_end|> by its text
    metadata["tokenizer.ggml.eot_token_id"] = 3
    metadata["tokenizer.ggml.eom_token_id"] = 4096  # out of range
    assert GGUFVocabulary(PATH, metadata).eos_token_ids() == (0, 2, 3)


@pytest.mark.parametrize("kind", [1, 4, 5])
def test_end_of_turn_token_is_eos_whatever_its_type(kind):
    """Files of Gemma, and of ChatML on Llama, mark this token as user-defined or as a normal token."""
    metadata = byte_vocabulary(288)
    metadata["tokenizer.ggml.token_type"][2] = kind
    vocabulary = GGUFVocabulary(PATH, metadata)
    assert vocabulary.eos_token_ids() == (0, 2)
    tokenizer = vocabulary.build()
    assert tokenizer.encode("he<|im_end|>")[-1] == 2
    assert tokenizer.decode([2]) == ""


def test_user_defined_html_tag_is_not_eos():
    metadata = byte_vocabulary(288)
    metadata["tokenizer.ggml.tokens"][3] = "</s>"
    assert metadata["tokenizer.ggml.token_type"][3] == 4
    assert GGUFVocabulary(PATH, metadata).eos_token_ids() == (0, 2)


def test_every_known_pre_tokenizer_round_trips_text():
    """Each known pre-tokenizer builds, and encoded text is decoded to the same text."""
    for name in PRE_TOKENIZERS:
        tokenizer = build(byte_vocabulary(288) | {"tokenizer.ggml.pre": name, "tokenizer.ggml.eos_token_id": None})
        for text in texts(20):
            assert (
                tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False).removeprefix("<|endoftext|>")
                == text
            )


def test_llama3_pieces_that_are_tokens_need_no_merges():
    metadata = byte_vocabulary(288)
    unmerged = metadata["tokenizer.ggml.tokens"].index("Ġw")
    metadata["tokenizer.ggml.merges"] = metadata["tokenizer.ggml.merges"][:3]
    assert unmerged not in build(metadata).encode("a w")
    assert unmerged in build(metadata | {"tokenizer.ggml.pre": "llama-bpe"}).encode("a w")


def test_file_without_pre_tokenizer_logs_warning(caplog):
    metadata = byte_vocabulary(288)
    del metadata["tokenizer.ggml.pre"]
    with caplog.at_level(logging.WARNING):
        assert build(metadata).decode(build(metadata).encode("hello 12")) == "hello 12"
    assert "does not say how its tokenizer cuts texts (tokenizer.ggml.pre)" in caplog.text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": None}, r"tokenizer.ggml.model = None: octavo builds the kinds gpt2, llama"),
        ({"model": "rwkv"}, r"tokenizer.ggml.model = 'rwkv'"),
        ({"model": 3}, r"tokenizer.ggml.model = 3: must be of type str"),
        ({"pre": "kimi-k2"}, r"tokenizer.ggml.pre = 'kimi-k2': octavo knows default|tokenizer.ggml.pre = 'kimi-k2'"),
        ({"tokens": []}, "tokenizer.ggml.tokens = .*must be a list of strs"),
        ({"tokens": ["a", 2]}, "tokenizer.ggml.tokens"),
        ({"tokens": ["a"] * 288}, "tokenizer.ggml.tokens = .*: some tokens occur twice"),
        ({"token_type": [1]}, "tokenizer.ggml.token_type = .1.: has 1 entries, but there are 288 tokens"),
        ({"merges": ["no such"]}, r"tokenizer.ggml.\*: no tokenizer can be built of them"),
        ({"merges": None}, r"tokenizer.ggml.merges = None: must be a list"),
        ({"bos_token_id": "0"}, "tokenizer.ggml.bos_token_id = '0': must be of type int"),
        ({"model": "llama"}, r"tokenizer.ggml.scores = None: must be a list of floats"),
        ({"model": "llama", "scores": [0.0]}, r"tokenizer.ggml.scores = .0.0.: has 1 entries"),
    ],
)
def test_invalid_tokenizer_metadata_is_named_in_error(changes, message):
    metadata = byte_vocabulary(288) | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    with pytest.raises(ModelError, match=message) as caught:
        build(metadata)
    assert str(caught.value).startswith("model.gguf: ")
