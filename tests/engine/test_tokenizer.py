"""Text to token ids and back, whole and token by token, for every kind of tokenizer that the families use."""

import itertools
import json
import random

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from octavo.engine.generation_config import read_generation_defaults
from octavo.engine.tokenizer import Tokenizer
from octavo.errors import ModelError, RequestError

GERMAN = "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. "
TEXT = (GERMAN + "中文字 日本語 🦜🌍 naïve  two  spaces\n\ttabs\n") * 3
SPECIAL = ["<unk>", "<s>", "</s>", "<|im_end|>"]


def byte_level():
    """As in Qwen and Llama 3: every byte is a character, and multi-byte characters are split into tokens."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator([TEXT], trainer)
    return with_bos(backend)


def metaspace():
    """As in recent conversions of sentencepiece models."""
    backend = Backend(models.BPE(unk_token="<unk>", fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Metaspace(prepend_scheme="first", split=False)
    backend.train_from_iterator(
        [TEXT], trainers.BpeTrainer(vocab_size=150, special_tokens=SPECIAL, show_progress=False)
    )
    return with_bos(backend)


def byte_fallback():
    """As in Llama 2 and Mistral: characters that are not in the vocabulary become byte tokens."""
    letters = "▁abcdefghijklmnopqrstuvwxyzäöü."
    pieces = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *letters, "▁▁", "▁th", "er"]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    merges = [("▁", "▁"), ("▁t", "h"), ("e", "r")]
    vocabulary["▁t"] = len(vocabulary)
    backend = Backend(
        models.BPE(vocabulary, [("▁", "t"), *merges], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    backend.add_special_tokens(SPECIAL)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return with_bos(backend)


def with_bos(backend):
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )
    return backend


BACKENDS = {"byte_level": byte_level, "metaspace": metaspace, "byte_fallback": byte_fallback}
CONFIG = {"bos_token": "<s>", "eos_token": {"__type": "AddedToken", "content": "</s>"}, "pad_token": None}


@pytest.fixture(scope="module", params=BACKENDS)
def tokenizer(request):
    return Tokenizer(BACKENDS[request.param](), CONFIG)


def write(directory, backend=None, config=None, **files):
    (backend or byte_level()).save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(CONFIG if config is None else config))
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return directory


def stream(tokenizer, token_ids, cut=1, **options):
    detokenizer = tokenizer.incremental_detokenizer(**options)
    pieces = [detokenizer.add(token_ids[start : start + cut]) for start in range(0, len(token_ids), cut)]
    return [*pieces, detokenizer.finish()]


@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_streamed_random_tokens_equal_full_decode(tokenizer, skip_special_tokens):
    draw = random.Random(0)
    size = tokenizer.vocab_size + 3  # includes some ids without a token, because models pad their vocabulary
    seen_replacement = 0
    for _ in range(600):
        token_ids = [draw.randrange(size) for _ in range(draw.randrange(1, 40))]
        whole = tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        seen_replacement += "\ufffd" in whole
        cut = draw.choice([1, 1, 2, 5, 100])
        assert "".join(stream(tokenizer, token_ids, cut, skip_special_tokens=skip_special_tokens)) == whole
    assert seen_replacement > 50 or tokenizer.backend.token_to_id("ä") is not None


def test_streamed_random_bytes_equal_full_decode():
    """Runs of valid and invalid bytes between words, which byte fallback decodes as a whole."""
    tokenizer = Tokenizer(byte_fallback(), CONFIG)
    draw = random.Random(1)
    byte = lambda value: tokenizer.backend.token_to_id(f"<0x{value:02X}>")  # noqa: E731
    parts = [[byte(value) for value in "中🦜é".encode()[start:]] for start in range(9)]
    parts += [[byte(value)] for value in (0x20, 0x41, 0x80, 0xC3, 0xFF, 0xE4)]
    parts += [[tokenizer.backend.token_to_id(piece)] for piece in ("▁", "▁▁", "▁th", "er", "</s>", "a")]
    for _ in range(2000):
        token_ids = [token_id for _ in range(draw.randrange(1, 8)) for token_id in draw.choice(parts)]
        assert "".join(stream(tokenizer, token_ids)) == tokenizer.decode(token_ids)


def test_real_text_streams_with_little_delay(tokenizer):
    text = "der große Boxkämpfer  über naïve 中文 🦜 end"
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = stream(tokenizer, token_ids)
    whole = tokenizer.decode(token_ids)
    assert "".join(pieces) == whole
    assert pieces[-1] == ""
    lengths = [len(tokenizer.decode(token_ids[: index + 1])) for index in range(len(token_ids))]
    shown = 0
    for piece, length in zip(pieces, lengths, strict=False):
        shown += len(piece)
        assert length - shown <= 9  # at most the characters of one run of bytes are held back
        assert "\ufffd" not in piece


def test_incomplete_character_is_held_back_in_stream():
    tokenizer = Tokenizer(byte_level(), CONFIG)
    token_ids = tokenizer.encode("x🎸", add_special_tokens=False)
    held = [""] * (len(token_ids) - 2)
    assert held
    assert stream(tokenizer, token_ids) == ["x", *held, "🎸", ""]
    assert stream(tokenizer, token_ids[:-1]) == ["x", *held, "\ufffd"]


def test_text_after_prompt_keeps_its_leading_space(tokenizer):
    prompt = tokenizer.encode("der Deich", add_special_tokens=False)
    whole = tokenizer.encode("der Deich den er", add_special_tokens=False)
    assert whole[: len(prompt)] == prompt
    pieces = stream(tokenizer, whole[len(prompt) :], prompt_token_ids=prompt)
    assert "".join(pieces) == " den er"
    with_special = [*prompt, tokenizer.eos_token_id]
    assert "".join(stream(tokenizer, whole[len(prompt) :], prompt_token_ids=with_special)) == " den er"


def test_prompt_text_never_appears_in_output(tokenizer):
    """For any end of the prompt, its text never appears in the output."""
    draw = random.Random(2)
    word = tokenizer.encode("der", add_special_tokens=False)
    for _ in range(300):
        prompt = [draw.randrange(tokenizer.vocab_size) for _ in range(draw.randrange(12))]
        text = "".join(stream(tokenizer, word, prompt_token_ids=prompt))
        assert text.removeprefix(" ") == "der"


def test_bos_is_added_once(tokenizer):
    bos = tokenizer.bos_token_id
    plain = tokenizer.encode("der Deich")
    assert plain[0] == bos
    assert plain.count(bos) == 1
    assert tokenizer.encode("<s>der Deich").count(bos) == 1
    assert tokenizer.encode("<s><s>der Deich").count(bos) == 2  # the second one was written by the user
    assert tokenizer.encode("der Deich", add_special_tokens=False).count(bos) == 0
    assert tokenizer.encode("<s>der Deich", add_special_tokens=False).count(bos) == 1
    assert tokenizer.encode("") == [bos]


def without_bos(backend):
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    return backend


@pytest.mark.sweep(16)
@pytest.mark.parametrize("tokenizer_class", ["PreTrainedTokenizerFast", "LlamaTokenizerFast", "Qwen2TokenizerFast"])
@pytest.mark.parametrize("make", [byte_level, byte_fallback])
@pytest.mark.parametrize("change", [with_bos, without_bos])
def test_config_bos_flags_do_not_override_post_processor(change, make, tokenizer_class, tmp_path):
    from transformers import AutoTokenizer

    choices = (None, True, False)
    for adds_bos, adds_eos in itertools.product(choices, choices):
        flags = {"add_bos_token": adds_bos, "add_eos_token": adds_eos}
        given = {name: value for name, value in flags.items() if value is not None}
        write(tmp_path, change(make()), CONFIG | given | {"tokenizer_class": tokenizer_class})
        oracle, tokenizer = AutoTokenizer.from_pretrained(tmp_path), Tokenizer.from_directory(tmp_path)
        ids = tokenizer.encode("der")
        assert (ids[0] == tokenizer.bos_token_id) == (oracle("der")["input_ids"][0] == oracle.bos_token_id)
        assert (ids[0] == tokenizer.bos_token_id) == (change is with_bos)
        assert ids[-1] != tokenizer.eos_token_id
        assert oracle("der")["input_ids"][-1] != oracle.eos_token_id


def test_doubled_bos_is_kept_if_tokenizer_adds_none():
    tokenizer = Tokenizer(without_bos(byte_level()), CONFIG)
    assert tokenizer.encode("<s><s>der").count(tokenizer.bos_token_id) == 2


@pytest.mark.parametrize("add_special_tokens", [True, False])
def test_invalid_unicode_text_is_refused(add_special_tokens, tokenizer):
    with pytest.raises(RequestError, match=r"not valid Unicode: it holds '\\udce9'") as caught:
        tokenizer.encode("caf\udce9", add_special_tokens=add_special_tokens)
    assert caught.value.parameter == "prompt"


LISTED = {"content": "<eot>", "lstrip": False, "rstrip": True, "single_word": False, "normalized": False}


IN_CONFIG = [
    {"eos_token": "<eot>"},
    {"eos_token": {"__type": "AddedToken", **LISTED, "special": True}},
    {"eos_token": "<eot>", "listed": LISTED | {"special": True}},
    {"eos_token": "<eot>", "listed": LISTED | {"special": False}},
    {"listed": LISTED | {"special": True}},
    {"listed": LISTED | {"special": False}},
]
IN_FILE = [{"special": True}, {"special": False, "normalized": False}]


@pytest.mark.sweep(16)
@pytest.mark.parametrize(
    ("in_file", "in_config"), [*itertools.product(IN_FILE, IN_CONFIG), *((None, config) for config in IN_CONFIG[2:])]
)
def test_added_token_flags_equal_transformers(in_file, in_config, tmp_path):
    from transformers import AutoTokenizer

    backend = byte_level()
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **in_config}
    if (listed := config.pop("listed", None)) is not None:
        config["added_tokens_decoder"] = {str(backend.get_vocab_size()): listed}
    if in_file is not None:
        backend.add_tokens([AddedToken("<eot>", lstrip=True, rstrip=True, single_word=True, **in_file)])
    write(tmp_path, backend, config)
    oracle, tokenizer = AutoTokenizer.from_pretrained(tmp_path), Tokenizer.from_directory(tmp_path)
    assert flags_of(tokenizer.backend) == flags_of(oracle.backend_tokenizer)
    for text in ("der <eot> Deich", "der<eot>Deich", " <eot>  <s>"):
        assert tokenizer.encode(text) == oracle(text)["input_ids"]
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == oracle.decode(ids, skip_special_tokens=True)


def flags_of(backend):
    (token,) = (token for token in backend.get_added_tokens_decoder().values() if token.content == "<eot>")
    return {name: getattr(token, name) for name in ("lstrip", "rstrip", "single_word", "normalized", "special")}


def test_special_tokens_are_hidden_unless_requested(tokenizer):
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert tokenizer.backend.token_to_id("</s>") == tokenizer.eos_token_id
    ids = [*tokenizer.encode("der"), tokenizer.eos_token_id]
    assert tokenizer.decode(ids) == "der"
    assert "</s>" in tokenizer.decode(ids, skip_special_tokens=False)
    assert tokenizer.decode_token(tokenizer.eos_token_id) == "</s>"
    assert tokenizer.decode_token(tokenizer.vocab_size + 5) == ""


def test_piece_cache_is_bounded(tokenizer, monkeypatch):
    monkeypatch.setattr("octavo.engine.detokenizer._NUM_REMEMBERED", 3)
    anew = Tokenizer(tokenizer.backend, CONFIG)
    kept = anew._pieces.kept[False]
    for token_id in [*range(10), *range(5), 3, 3]:
        assert anew.piece(token_id) == tokenizer.piece(token_id)
        assert 0 < len(kept) <= 3


def test_truncation_and_padding_of_file_are_ignored():
    backend = byte_level()
    backend.enable_truncation(3)
    backend.enable_padding(length=50)
    assert len(Tokenizer(backend, CONFIG).encode("Zwölf Boxkämpfer jagen Viktor")) > 4
    assert len(Tokenizer(backend, CONFIG).encode("Zw")) < 5


def test_from_directory_equals_transformers(tmp_path):
    from transformers import AutoTokenizer

    for name, make in BACKENDS.items():
        directory = tmp_path / name
        directory.mkdir()
        write(directory, make(), CONFIG | {"tokenizer_class": "PreTrainedTokenizerFast"})
        oracle = AutoTokenizer.from_pretrained(directory)
        tokenizer = Tokenizer.from_directory(directory)
        for text in (TEXT, "", " x", "der </s> Deich<|im_end|>\n", "🦜"):
            assert tokenizer.encode(text) == oracle(text)["input_ids"]
            ids = tokenizer.encode(text)
            assert tokenizer.decode(ids) == oracle.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("has_decoder", [False, True])
def test_special_tokens_of_older_checkpoints_equal_transformers(has_decoder, tmp_path):
    """Their special_tokens_map.json has entries that tokenizer_config.json may lack; newer ones have only the
    latter.
    """
    from transformers import AutoTokenizer

    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<unk>"}
    if has_decoder:
        config["added_tokens_decoder"] = {"1": {"content": "<s>", "special": True}}
    stood = {"bos_token": "<s>", "eos_token": {"content": "<|im_end|>", "lstrip": False}, "pad_token": "</s>"}
    write(tmp_path, config=config, special_tokens_map=stood)
    oracle, tokenizer = AutoTokenizer.from_pretrained(tmp_path), Tokenizer.from_directory(tmp_path)
    assert tokenizer.special_tokens == oracle.special_tokens_map
    assert tokenizer.eos_token_id == oracle.eos_token_id
    assert (tokenizer.eos_token_id is None) == has_decoder


def test_tokens_only_in_config_are_added_if_their_ids_fit(tmp_path):
    size = byte_level().get_vocab_size()
    added = {str(size): {"content": "<tool>", "special": True}, "1": {"content": "<s>", "special": True}}
    tokenizer = Tokenizer.from_directory(write(tmp_path, config=CONFIG | {"added_tokens_decoder": added}))
    assert tokenizer.encode("<tool>", add_special_tokens=False) == [size]
    assert tokenizer.decode([size]) == ""
    for wrong in ({str(size + 4): {"content": "<tool>"}}, {"0": {"content": "<s>"}}):
        write(tmp_path, config=CONFIG | {"added_tokens_decoder": wrong})
        with pytest.raises(ModelError, match="different checkpoints"):
            Tokenizer.from_directory(tmp_path)
    write(tmp_path, config=CONFIG | {"added_tokens_decoder": {"0": {"text": "<s>"}}})
    with pytest.raises(ModelError, match="added_tokens_decoder"):
        Tokenizer.from_directory(tmp_path)


def test_eos_token_may_be_ordinary_token_of_file(tmp_path):
    backend = byte_level()
    backend.add_tokens([AddedToken("<eot>", special=False)])
    tokenizer = Tokenizer.from_directory(write(tmp_path, backend, {"eos_token": "<eot>", "bos_token": "<absent>"}))
    assert tokenizer.eos_token_id == backend.token_to_id("<eot>")
    assert tokenizer.bos_token_id is None


@pytest.mark.parametrize("name", ["tokenizer.model", "tiktoken.model", "vocab.json"])
def test_unsupported_tokenizer_files_are_refused_with_instructions(name, tmp_path):
    (tmp_path / name).write_bytes(b"\n\x0e\n\x05<unk>")
    with pytest.raises(ModelError, match=r"AutoTokenizer\.from_pretrained\(DIR\)\.save_pretrained\(DIR\)") as caught:
        Tokenizer.from_directory(tmp_path)
    assert name in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_missing_and_broken_files_are_refused(tmp_path):
    with pytest.raises(ModelError, match=r"has no tokenizer\.json"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(ModelError, match=r"tokenizer\.json is not a tokenizer"):
        Tokenizer.from_directory(tmp_path)
    write(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer_config\.json is not valid JSON"):
        Tokenizer.from_directory(tmp_path)


def test_generation_defaults_are_read_from_config_files(tmp_path):
    assert read_generation_defaults(tmp_path).sampling == {}
    assert read_generation_defaults(tmp_path).eos_token_ids == ()
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 5}))
    assert read_generation_defaults(tmp_path).eos_token_ids == (5,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": -1}))  # means "none"
    assert read_generation_defaults(tmp_path).eos_token_ids == (5,)
    values = {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.1, "repetition_penalty": 1.05}
    ignored = {"do_sample": True, "pad_token_id": 1, "transformers_version": "4.43", "top_h": None}
    (tmp_path / "generation_config.json").write_text(
        json.dumps(values | ignored | {"max_new_tokens": 99, "eos_token_id": [7, 9]})
    )
    defaults = read_generation_defaults(tmp_path)
    assert defaults.sampling == values | {"max_tokens": 99}
    assert defaults.eos_token_ids == (7, 9)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"temperature": "hot"}, "temperature = 'hot'"),
        ({"top_k": 1.5}, "top_k = 1.5"),
        ({"top_p": True}, "top_p = True"),
        ({"top_p": float("inf")}, "top_p = inf"),
        ({"eos_token_id": "</s>"}, "eos_token_id = '</s>'"),
        ([], "list"),
    ],
)
def test_invalid_generation_config_is_refused(values, words, tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps(values))
    with pytest.raises(ModelError, match=words):
        read_generation_defaults(tmp_path)
