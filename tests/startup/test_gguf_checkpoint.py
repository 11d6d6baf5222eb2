"""A GGUF file instead of a folder gives the same answers. A hostile file causes an error and nothing else."""

import random
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from gguf_files import byte_vocabulary, write_gguf
from kernels_available import COMPILED

from octavo import LLM, ModelConfig, ModelError, SamplingParams
from octavo.models.random_weights import tiny_config, write_checkpoint
from octavo.startup.checkpoint import open_checkpoint
from octavo.startup.gguf_checkpoint import GGUFCheckpoint
from octavo.startup.launch import ServedModel, make_processors

PROMPTS = [{"prompt_token_ids": [3, 1, 4, 1, 5, 9, 2, 6][:count]} for count in (1, 5, 8)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model") / "folder"
    return write_checkpoint(directory, tiny_config("LlamaForCausalLM", vocab_size=288), std=0.1)


@pytest.fixture
def path(folder, tmp_path):
    return write_gguf(folder, tmp_path / "model.gguf")


def tokens_of(model, **options):
    llm = LLM(str(model), skip_tokenizer_init=True, max_model_len=64, **options)
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def test_float32_gguf_generates_same_tokens_as_folder(folder, path):
    expected = tokens_of(folder)
    assert len({tuple(each) for each in expected}) == 3
    assert tokens_of(path) == expected


def test_split_bfloat16_gguf_generates_same_tokens_as_whole_file(folder, tmp_path):
    whole = write_gguf(folder, tmp_path / "whole.gguf", kind="BF16")
    split = write_gguf(folder, tmp_path / "split.gguf", kind="BF16", splits=3)
    assert open_checkpoint(whole).read_architecture().dtype == "bfloat16"
    assert tokens_of(whole) == tokens_of(split)


def test_gguf_tokenizer_and_chat_template_encode_and_decode(path):
    llm = LLM(str(path), max_model_len=64)
    (output,) = llm.chat([{"role": "user", "content": "hello wörld"}], GREEDY, use_tqdm=False)
    vocabulary = byte_vocabulary(288)["tokenizer.ggml.tokens"]
    prompt = [vocabulary[id_] for id_ in output.prompt_token_ids]
    assert (prompt[0], prompt[-1]) == ("<|im_start|>", "<|im_end|>")
    assert "hell" in prompt
    assert output.outputs[0].text == llm.get_tokenizer().decode(output.outputs[0].token_ids)


def test_gguf_metadata_sets_sampling_defaults_tokenizer_and_chat_template(folder, tmp_path):
    changes = {
        "general.sampling.temp": 0.5, "general.sampling.top_k": 20, "llama.pooling_type": 1,
        "tokenizer.ggml.bos_token_id": 3, "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template.tool_use": "tools", "tokenizer.chat_templates": ["tool_use"],
    }  # fmt: skip
    checkpoint = GGUFCheckpoint(write_gguf(folder, tmp_path / "model.gguf", changes=changes))
    defaults = checkpoint.read_generation_defaults()
    assert (defaults.sampling, defaults.eos_token_ids) == ({"temperature": 0.5, "top_k": 20}, (0, 2))
    assert checkpoint.read_embedding_config().pooling == "mean"
    tokenizer = checkpoint.read_tokenizer()
    assert tokenizer.encode("x")[0] == 3
    template = checkpoint.read_chat_template(tokenizer.special_tokens)
    assert sorted(template.templates) == ["default", "tool_use"]
    assert template.render([{"role": "user", "content": "?"}]) == "<|im_start|>?<|im_end|>"
    assert checkpoint.stored_tokenizer() == GGUFCheckpoint(checkpoint.path).stored_tokenizer()
    other = write_gguf(folder, tmp_path / "other.gguf", changes={"tokenizer.ggml.eos_token_id": 2})
    assert checkpoint.stored_tokenizer() != GGUFCheckpoint(other).stored_tokenizer()
    rank = write_gguf(folder, tmp_path / "rank.gguf", changes={"llama.pooling_type": 4})
    assert "llama.pooling_type = 4" in GGUFCheckpoint(rank).read_embedding_config().problem
    config = ModelConfig(model=str(checkpoint.path))
    inputs, _ = make_processors(config, ServedModel.find(config))
    assert inputs.model_info.eos_token_ids == frozenset({0, 2})
    assert (inputs.model_info.model_type, inputs.model_info.architectures) == ("llama", ("LlamaForCausalLM",))


@pytest.mark.parametrize(
    ("file_type", "kind", "told"),
    [(15, "Q4_0", ("Q4_K_M", 15)), (7 + 1024, "Q8_0", ("Q8_0", 7)), (None, "Q4_0", ("Q4_0", None)),
     (999, "Q5_1", ("Q5_1", None)), ("many", "F32", ("F32", None))],
)  # fmt: skip
def test_quantization_level_is_named_as_in_llama_cpp(folder, tmp_path, file_type, kind, told):
    path = write_gguf(folder, tmp_path / "model.gguf", kind=kind, changes={"general.file_type": file_type})
    config = ModelConfig(model=str(path))
    info = make_processors(config, ServedModel.find(config))[0].model_info
    assert (info.quantization_level, info.file_type) == told
    assert 0.5 * path.stat().st_size < info.weight_bytes < path.stat().st_size
    of_folder = ModelConfig(model=str(folder), skip_tokenizer_init=True)
    assert make_processors(of_folder, ServedModel.find(of_folder))[0].model_info.quantization_level == ""


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.model": "t5"}, "tokenizer.ggml.model = 't5'"),
        ({"tokenizer.ggml.pre": "kimi-k2"}, "tokenizer.ggml.pre = 'kimi-k2'"),
        ({"tokenizer.ggml.tokens": [str(number) for number in range(300)], "tokenizer.ggml.token_type": [1] * 300},
         "tokenizer.ggml.tokens has 300 tokens, but the embedding has only 288 rows"),
    ],
)  # fmt: skip
def test_unknown_gguf_tokenizer_is_refused_before_weights_are_read(folder, tmp_path, changes, message):
    path = write_gguf(folder, tmp_path / "model.gguf", changes=changes)
    with pytest.raises(ModelError, match=message):
        ServedModel.find(ModelConfig(model=str(path)))


def test_tokenizer_option_replaces_unknown_gguf_tokenizer(folder, path, tmp_path):
    unknown = write_gguf(folder, tmp_path / "unknown.gguf", changes={"tokenizer.ggml.model": "t5"})
    served = ServedModel.find(ModelConfig(model=str(unknown), tokenizer=str(path)))
    assert served.text.read_tokenizer().vocab_size == 288
    assert ServedModel.find(ModelConfig(model=str(unknown), skip_tokenizer_init=True)).architecture.vocab_size == 288


def test_gguf_without_tokenizer_requires_tokenizer_option(folder, path, tmp_path):
    none = dict.fromkeys(byte_vocabulary(288))
    bare = write_gguf(folder, tmp_path / "bare.gguf", changes=none | {"tokenizer.ggml.model": "no_vocab"})
    assert "tokenizer.ggml.tokens" not in GGUFCheckpoint(bare).file.metadata
    with pytest.raises(ModelError, match=r"tokenizer.ggml.model = 'no_vocab': .* give another tokenizer"):
        ServedModel.find(ModelConfig(model=str(bare)))
    untold = write_gguf(folder, tmp_path / "untold.gguf", changes={"tokenizer.ggml.tokens": None})
    with pytest.raises(ModelError, match=r"tokenizer.ggml.tokens = None: there are none; give another tokenizer"):
        ServedModel.find(ModelConfig(model=str(untold)))
    assert ServedModel.find(ModelConfig(model=str(bare), skip_tokenizer_init=True)).architecture.vocab_size == 288
    config = ModelConfig(model=str(bare), tokenizer=str(path))
    inputs, _ = make_processors(config, ServedModel.find(config))
    assert inputs.tokenizer.vocab_size == 288


def test_directory_of_gguf_files_is_refused_with_path_to_use(path):
    with pytest.raises(ModelError, match=rf"is a directory of GGUF files; give the path of one of them: {path}"):
        open_checkpoint(path.parent)


@pytest.mark.parametrize(
    "names",
    [
        ["m.gguf.part1of2", "m.gguf.part2of2"],
        ["m.Q8_0.gguf.part1of11", *(f"m.Q8_0.gguf.part{number}of11" for number in range(2, 12))],
        ["m.gguf.part-00", "m.gguf.part-01"],
        ["m.gguf-split-a", "m.gguf-split-b"],
        ["m.gguf.split-aa", "m.gguf.split-ab"],
        ["m.gguf.001", "m.gguf.002", "m.gguf.010"],
        ["m m.gguf.a", "m m.gguf.b"],
    ],
    ids=lambda names: names[0],
)
def test_piece_of_gguf_file_is_refused_with_join_command(names, path, tmp_path):
    data = path.read_bytes()
    path.unlink()
    size = -(-len(data) // len(names))
    for index, name in enumerate(names):
        (tmp_path / name).write_bytes(data[index * size : (index + 1) * size])
    whole = tmp_path / re.sub(r"gguf.*", "gguf", names[0])
    messages = []
    for given in (tmp_path / names[0], tmp_path / names[-1], whole, tmp_path):
        with pytest.raises(ModelError) as refused:
            open_checkpoint(given)
        messages.append(str(refused.value))
    assert messages == messages[:1] * 4
    command = messages[0].partition("give the whole file: ")[2]
    subprocess.run(["/bin/sh", "-c", command], check=True)
    assert whole.read_bytes() == data
    assert open_checkpoint(whole).path == whole
    with pytest.raises(ModelError, match=re.escape(f"is a piece of a GGUF file; give the whole file: {whole}")):
        open_checkpoint(tmp_path / names[1])


def test_missing_gguf_piece_is_reported_with_count(path, tmp_path):
    path.rename(tmp_path / "m.gguf.part1of3")
    with pytest.raises(
        ModelError, match=r"only 1 of 3 pieces of .*m.gguf are here; download the other pieces, then join"
    ):
        open_checkpoint(tmp_path / "m.gguf.part1of3")


@pytest.mark.parametrize(
    "name",
    [
        *("model.gguf", "partof.gguf", "m-00001-of-00002.gguf", "model.gguf.backup", "x.bin"),
        *("m.gguf.partial", "m.gguf.parts", "m.gguf.gz", "m.gguf.xz"),
    ],
)
def test_gguf_file_with_other_suffix_opens_as_whole_file(name, path, tmp_path):
    path.rename(tmp_path / name)
    assert open_checkpoint(tmp_path / name).path == tmp_path / name


def test_gguf_piece_in_model_folder_is_ignored(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "folder")
    (tmp_path / "folder" / "m.gguf.part1of2").write_bytes(b"x")
    assert open_checkpoint(tmp_path / "folder").path == tmp_path / "folder"


def test_undecodable_model_path_is_refused_with_locale_hint(monkeypatch):
    monkeypatch.setattr(sys, "getfilesystemencoding", lambda: "ascii")
    given = b"/models/M\xc3\xb6dell".decode("ascii", "surrogateescape")
    with pytest.raises(ModelError, match=r"path '/models/M.* not text in ascii.* set LC_ALL=C.UTF-8 or PYTHONUTF8=1"):
        open_checkpoint(given)


def test_file_that_is_not_gguf_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("a text")
    with pytest.raises(ModelError, match=r"notes.txt: this is not a GGUF file .*give a .gguf file or a directory"):
        open_checkpoint(tmp_path / "notes.txt")


@pytest.mark.skipif(not COMPILED, reason="packed weights are those of the compiled kernels")
def test_gguf_with_infinite_scale_is_refused_at_load(folder, tmp_path):
    """The scale is checked while the file is loaded. Otherwise every token would be computed from NaN."""
    path = write_gguf(folder, tmp_path / "model.gguf", kind="Q4_0")
    stored = GGUFCheckpoint(path).file.tensors["blk.1.ffn_down.weight"]
    data = bytearray(path.read_bytes())
    data[stored.offset + 18 : stored.offset + 20] = b"\x00\x7c"  # an infinite scale
    path.write_bytes(data)
    with pytest.raises(ModelError, match=r"blk\.1\.ffn_down\.weight holds a scale that is infinite or not a number"):
        tokens_of(path)


@pytest.mark.turn(12)
@pytest.mark.skipif(not COMPILED, reason="packed weights are those of the compiled kernels")
@pytest.mark.parametrize(("kind", "quantization"), [("F32", "int8"), ("Q8_0", None)])
def test_packed_integer_weights_are_cached_for_next_start(kind, quantization, folder, tmp_path, monkeypatch):
    path = write_gguf(folder, tmp_path / "model.gguf", kind=kind)
    monkeypatch.setattr("octavo.models.packed_cache.LEAST_BYTES", 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    first = tokens_of(path, quantization=quantization, packed_cache_bytes=0)
    assert not (tmp_path / "cache").exists()
    assert tokens_of(path, quantization=quantization) == first
    (kept,) = (tmp_path / "cache").rglob("*.packed.safetensors")
    written = kept.stat().st_ino
    assert tokens_of(path, quantization=quantization) == first
    assert kept.stat().st_ino == written
    other = write_checkpoint(tmp_path / "other", tiny_config("LlamaForCausalLM", vocab_size=288), std=0.1, seed=1)
    write_gguf(other, path, kind=kind)
    assert tokens_of(path, quantization=quantization) != first


def exercise(path: Path) -> None:
    """Read everything that is read before memory is allocated for the weights, and then the weights."""
    checkpoint = GGUFCheckpoint(path)
    architecture = checkpoint.read_architecture()
    tokenizer = checkpoint.read_tokenizer()
    tokenizer.decode(tokenizer.encode("hello <|im_end|> 12 ü"))
    checkpoint.read_chat_template(tokenizer.special_tokens)
    checkpoint.read_generation_defaults()
    checkpoint.read_embedding_config()
    tensors = checkpoint.weights.open()
    tensors.check(architecture.stored_tensors())
    for name in architecture.tensor_shapes():
        tensors.tensor(name)


def mutated(content: bytearray, header: int, rng: random.Random) -> bytes:
    """Change a few places, mostly in the header: flip bits, write limit values, move, drop or double pieces."""
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        at = rng.randrange(header if rng.random() < 0.97 else len(content))
        match rng.randrange(6):
            case 0:
                content[at] ^= 1 << rng.randrange(8)
            case 1:
                content[at : at + 4] = rng.choice([0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF]).to_bytes(4, "little")
            case 2:
                limits = [0, 1, 2**31, 2**32, 2**40, 2**62, 2**63 - 1, 2**64 - 1]
                content[at : at + 8] = rng.choice(limits).to_bytes(8, "little")
            case 3:
                del content[at : at + rng.randrange(1, 64)]
            case 4:
                content[at:at] = content[at : at + rng.randrange(1, 64)]
            case _:
                other = rng.randrange(header)
                content[at : at + 16] = content[other : other + 16]
    return bytes(content)


@pytest.mark.turn(12)
@pytest.mark.parametrize(
    ("seed", "count"), [(0, 300), *(pytest.param(seed, 10_000, marks=pytest.mark.slow) for seed in range(1, 11))]
)
def test_mutated_gguf_file_raises_only_model_error(seed, count, tmp_path):
    config = tiny_config("LlamaForCausalLM", vocab_size=272, hidden_size=32, intermediate_size=32, num_hidden_layers=1)
    folder = write_checkpoint(tmp_path / "folder", config | {"rope_parameters": {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192}})  # fmt: skip
    files = [write_gguf(folder, tmp_path / f"{kind}.gguf", kind=kind).read_bytes() for kind in ("F32", "Q8_0")]
    headers = [content.index(b"output_norm.weight") for content in files]
    exercise(tmp_path / "Q8_0.gguf")
    path, rng, refused = tmp_path / "mutant.gguf", random.Random(seed), 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(count):
            which = rng.randrange(2)
            path.write_bytes(mutated(bytearray(files[which]), headers[which] + 64, rng))
            try:
                exercise(path)
            except ModelError:
                refused += 1
    assert count // 2 < refused < count  # otherwise the content of the file is hardly tested
    shutil.rmtree(folder)
