"""Token streams that are hard to detokenize: invalid bytes, and prompts that end inside a character."""

import random

import pytest
from test_tokenizer import BACKENDS, CONFIG, byte_fallback, byte_level, stream
from text_behind import text_behind
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from octavo.engine.tokenizer import Tokenizer
from octavo.engine.tokenizer_interface import SomeSpecialTokens
from octavo.errors import ModelError

BAD = [0xF0, 0xFF, 0xC3, 0x80, 0xE4, 0xED, 0xA6, 0xE0]
PARTS = ["é", "狐", "🦜", "\ufffd", "a", " ", "¡"]


@pytest.fixture(scope="module", params=["byte_level", "byte_fallback"])
def tokenizer(request):
    return Tokenizer(BACKENDS[request.param](), CONFIG)


def byte_tokens(tokenizer, data):
    """Return the token of each single byte; letters in sentencepiece vocabularies are not bytes."""
    spelled = [chr(byte) if chr(byte) in "ab" else f"<0x{byte:02X}>" for byte in data]
    if tokenizer.token_id("<0x00>") is None:
        alphabet = {tokenizer.piece(token_id): token_id for token_id in range(tokenizer.vocab_size)}
        return [alphabet.get(bytes([byte]), alphabet.get(chr(byte))) for byte in data]
    return [tokenizer.token_id(token) for token in spelled]


def some_tokens(tokenizer, draw):
    """Return complete and cut off characters, invalid bytes, words and special tokens."""
    ids = []
    for _ in range(draw.randrange(6)):
        data = draw.choice(PARTS).encode()
        kind = draw.random()
        if kind < 0.4:
            ids += byte_tokens(tokenizer, data[draw.randrange(len(data)) :])
        elif kind < 0.6:
            ids += byte_tokens(tokenizer, data)
        elif kind < 0.75:
            ids += byte_tokens(tokenizer, [draw.choice(BAD)])
        elif kind < 0.9:
            ids.append(draw.randrange(tokenizer.vocab_size + 2))
        else:
            ids.append(tokenizer.eos_token_id)
    return ids


@pytest.mark.sweep(16)
@pytest.mark.parametrize("skip", [True, False])
def test_streamed_text_after_any_prompt_equals_full_decode(tokenizer, skip):
    draw, num_within = random.Random(3), 0
    for _ in range(2000):
        prompt, ids = some_tokens(tokenizer, draw), some_tokens(tokenizer, draw)
        text = text_behind(tokenizer.backend, prompt, ids, skip=skip)
        pieces = stream(tokenizer, ids, draw.choice([1, 2, 9]), prompt_token_ids=prompt, skip_special_tokens=skip)
        assert "".join(pieces) == text, (prompt, ids)
        num_within += bool(prompt) and isinstance(tokenizer.piece(prompt[-1]), bytes)
    assert num_within > 500


@pytest.mark.parametrize(
    ("prompt", "answer", "text"),
    [
        (b"a\xf0\x9f", b"\xa6\x9cb", "🦜b"),  # a character that the answer completes belongs to the answer
        (b"a\xf0\x9f", b"b", "b"),  # an incomplete character belongs to the prompt
        (b"a\xf0\x9f", b"", ""),
        (b"a\xef\xbf", b"\xbdb", "\ufffdb"),  # this is a character
        ("狐".encode(), "狸".encode(), "狸"),
        ("狐".encode(), b"\xe7", "\ufffd"),
    ],
)
def test_prompt_ending_inside_character_streams_correct_text(tokenizer, prompt, answer, text):
    ids = byte_tokens(tokenizer, answer)
    assert "".join(stream(tokenizer, ids, prompt_token_ids=byte_tokens(tokenizer, prompt))) == text


def test_lone_byte_becomes_replacement_character_and_stream_continues():
    """The library's own stream raises "Invalid prefix encountered" here."""
    tokenizer = Tokenizer(byte_fallback(), CONFIG)
    ids = [*byte_tokens(tokenizer, b"\xf0"), tokenizer.token_id("h"), tokenizer.token_id("▁th")] * 3
    prompt = tokenizer.encode("he\n")
    assert isinstance(tokenizer.piece(prompt[-1]), str | bytes)
    assert "".join(stream(tokenizer, ids, prompt_token_ids=prompt)) == "\ufffdh th" * 3


def test_piece_returns_bytes_that_token_decodes_to():
    """They are the bytes that the library decodes to text."""
    for make in BACKENDS.values():
        tokenizer = Tokenizer(make(), CONFIG)
        for token_id in range(tokenizer.vocab_size + 2):
            piece = tokenizer.piece(token_id)
            alone = tokenizer.decode([token_id], skip_special_tokens=False)
            text = piece.decode(errors="replace") if isinstance(piece, bytes) else piece
            spaces = tokenizer.token(token_id).count("▁")  # the start of a text has fewer of them
            assert text.replace(" ", "") == alone.replace(" ", "")
            assert len(alone) in {len(text), len(text) - 1, len(text) - spaces}
    tokenizer = Tokenizer(byte_level(), CONFIG)
    for data in (b"\xf0", b"\x9f", b"\xad", b"\xff"):
        assert tokenizer.piece(byte_tokens(tokenizer, data)[0]) == data
    assert Tokenizer(byte_fallback(), CONFIG).piece(tokenizer.token_id("<s>")) == "<s>"


@pytest.mark.parametrize(
    ("decoder", "name"),
    [(decoders.BPEDecoder(), "BPEDecoder"), (decoders.Sequence([decoders.Fuse(), decoders.CTC()]), "CTC")],
)
def test_decoders_that_cannot_stream_are_refused(decoder, name):
    backend = Backend(models.BPE({"a": 0}, []))
    backend.decoder = decoder
    with pytest.raises(ModelError, match=f"has the decoder {name}, which"):
        Tokenizer(backend)


@pytest.mark.parametrize("decoder", [None, decoders.WordPiece(), decoders.Metaspace(prepend_scheme="always")])
def test_other_decoders_stream_text_of_full_decode(decoder):
    vocabulary = {token: index for index, token in enumerate(["a", "b", "##c", "▁", "▁▁d", "e", "."])}
    backend = Backend(models.BPE(vocabulary, []))
    backend.decoder = decoder
    tokenizer, draw = Tokenizer(backend), random.Random(0)
    for _ in range(500):
        prompt, ids = ([draw.randrange(len(vocabulary)) for _ in range(draw.randrange(5))] for _ in range(2))
        whole = text_behind(backend, prompt, ids, skip=True)
        assert "".join(stream(tokenizer, ids, prompt_token_ids=prompt)) == whole, (prompt, ids)


@pytest.mark.parametrize("backend", BACKENDS)
def test_hidden_special_tokens_do_not_change_shown_text(backend):
    """So text that only hidden tokens precede is the start of a text, without the space before the first word."""
    tokenizer = Tokenizer(BACKENDS[backend](), CONFIG)
    bos, end, marker = (tokenizer.token_id(each) for each in ("<s>", "</s>", "<|im_end|>"))
    some = SomeSpecialTokens(tokenizer, [marker])
    word = tokenizer.encode("er er", add_special_tokens=False)
    for prompt in ([], [bos], [bos, end], [bos, marker], [bos, marker, end], [*word, end]):
        for ids in (word, [end, *word, bos], [marker, *word], [*word, marker, *word, end]):
            told = some.incremental_detokenizer(prompt, skip_special_tokens=True)
            shown = [[each for each in given if each not in {bos, end}] for given in (prompt, ids)]
            assert told.add(ids) + told.finish() == text_behind(tokenizer.backend, *shown, skip=False)
            pieces = [some.piece(each, skip_special_tokens=True) for each in ids]
            assert [bool(piece) for piece in pieces] == [each not in {bos, end} for each in ids]


def test_character_is_shown_with_its_last_byte():
    tokenizer = Tokenizer(byte_level(), CONFIG)
    ids = byte_tokens(tokenizer, "狐é".encode())
    assert stream(tokenizer, ids, prompt_token_ids=[]) == ["", "", "狐", "", "é", ""]
    detokenizer = tokenizer.incremental_detokenizer([])
    assert (detokenizer.add(ids[:2]), detokenizer.held, detokenizer.num_prompt_bytes) == ("", b"\xe7\x8b", 0)


def test_num_prompt_bytes_counts_held_bytes_of_prompt():
    tokenizer = Tokenizer(byte_level(), CONFIG)
    ids = byte_tokens(tokenizer, "狐".encode())
    detokenizer = tokenizer.incremental_detokenizer(ids[:2])
    assert (detokenizer.held, detokenizer.num_prompt_bytes) == (b"\xe7\x8b", 2)
    assert (detokenizer.add(ids[2:]), detokenizer.held, detokenizer.num_prompt_bytes) == ("狐", b"", 0)


def test_byte_like_token_is_text_without_byte_fallback():
    backend = Backend(models.BPE({"<0x41>": 0, "b": 1}, []))
    backend.decoder = decoders.Metaspace()
    assert Tokenizer(backend).piece(0) == "<0x41>"
    assert "".join(stream(Tokenizer(backend), [1, 0], prompt_token_ids=[])) == "b<0x41>"
