"""Packed weights on disk have the same bits as new ones, are replaced on any mismatch, and stay within a limit."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from gguf_files import write_gguf
from kernels_available import COMPILED, INSTRUCTION_SETS
from safetensors import safe_open

from octavo.config import DEFAULT_GROUP_SIZE, kernels_required
from octavo.kernels.block_weight import BlockKind
from octavo.kernels.reference import ReferenceKernels
from octavo.models import packed_cache, weight_hashes
from octavo.models.loader import load_model
from octavo.models.packed_cache import HASHES_FILE, PackedCache
from octavo.models.quantize_checkpoint import quantize_checkpoint
from octavo.models.random_weights import tiny_config, write_checkpoint
from octavo.models.registry import read_architecture
from octavo.models.weight_source import FolderWeights
from octavo.startup.checkpoint import open_checkpoint

pytestmark = pytest.mark.skipif(
    not COMPILED and not kernels_required(), reason="octavo was installed without compiled kernels"
)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
FORMATS = [
    ("bfloat16", "int8"),
    ("float32", "int8"),
    ("bfloat16", "int4"),
    ("float16", "int4"),
    ("bfloat16", "int4_all"),
]


@pytest.fixture
def checkpoint(tmp_path):
    return write_checkpoint(tmp_path / "model", tiny_config("Qwen2ForCausalLM", attention_bias=True), std=0.1)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(packed_cache, "LEAST_BYTES", 0)
    return PackedCache(1 << 30, tmp_path / "kept")


@pytest.fixture
def packs(monkeypatch):
    """Count the weights that are packed instead of read."""
    cpu = pytest.importorskip("octavo.kernels.cpu")
    counts = []
    pack = cpu.CpuKernels.pack_linear
    monkeypatch.setattr(
        cpu.CpuKernels, "pack_linear", lambda *args, **options: (counts.append(1), pack(*args, **options))[1]
    )
    return counts


@pytest.fixture
def reads(monkeypatch):
    """Record the files that are read completely; times of new files are trusted immediately."""
    monkeypatch.setattr(weight_hashes, "_SETTLED_NS", -(10**9))
    files = []
    hash_file = weight_hashes.hash_file
    monkeypatch.setattr(weight_hashes, "hash_file", lambda path, *rest: (files.append(path), hash_file(path, *rest))[1])
    return files


def load(path, cache, dtype="bfloat16", quantization="int8", isa="auto", **options):
    from octavo.kernels.cpu import CpuKernels

    return load_model(
        FolderWeights(path), read_architecture(path), CpuKernels(isa, num_threads=1), dtype=dtype,
        device=torch.device("cpu"), max_model_len=64, quantization=quantization, packed_cache=cache, **options,
    )  # fmt: skip


def load_gguf(path, cache, isa="auto"):
    from octavo.kernels.cpu import CpuKernels

    checkpoint, kernels = open_checkpoint(path), CpuKernels(isa, num_threads=1)
    return load_model(
        checkpoint.weights, checkpoint.read_architecture(), kernels, dtype="float32", device=torch.device("cpu"),
        max_model_len=64, packed_cache=cache,
    )  # fmt: skip


def make_gguf(tmp_path, kind, *, tied=False, **options):
    """Return a GGUF file of a Qwen2, which has biases, with rows that are whole blocks of every kind."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "vocab_size": 288}
    config = tiny_config("Qwen2ForCausalLM", tie_word_embeddings=tied, **sizes)
    return write_gguf(
        write_checkpoint(tmp_path / "folder", config, std=0.1), tmp_path / "model.gguf", kind=kind, **options
    )


def kept_files(cache):
    return sorted(path for path in cache.directory.glob("*") if path.name != HASHES_FILE)


@pytest.mark.sweep(8)
@pytest.mark.parametrize(("dtype", "quantization"), FORMATS)
def test_cached_weights_give_logits_of_uncached_load(dtype, quantization, checkpoint, cache, packs, prompt_logits):
    expected = prompt_logits(load(checkpoint, None, dtype, quantization), PROMPT)
    packs.clear()
    calls = []
    first = load(checkpoint, cache, dtype, quantization)
    assert len(packs) == 2 * 4 + 2
    packs.clear()
    second = load(checkpoint, cache, dtype, quantization, progress=lambda *call: calls.append(call))
    assert packs == []
    assert calls[-1][0] == calls[-1][1]
    assert len(kept_files(cache)) == 1
    for model in (first, second):
        assert torch.equal(prompt_logits(model, PROMPT), expected)
    assert second.lm_head.storage.data.data_ptr() % 64 == 0


def test_cached_weights_and_tables_of_files_give_logits_of_uncached_load(tmp_path, cache, packs, prompt_logits):
    path = write_checkpoint(tmp_path / "gemma4", tiny_config("Gemma4ForCausalLM"), std=0.1)
    expected = prompt_logits(load(path, None), PROMPT)
    load(path, cache)
    packs.clear()
    assert torch.equal(prompt_logits(load(path, cache), PROMPT), expected)
    assert packs == []


@pytest.mark.turn(12)
@pytest.mark.parametrize("quantization", ["int8", "int4", "int4_all"])
def test_cached_weights_are_correct_across_instruction_sets(checkpoint, cache, prompt_logits, quantization):
    """Some share a file and some do not: each computes the same as without the cache, whichever process wrote the
    file.
    """
    formats = "bfloat16", quantization
    alone = {isa: prompt_logits(load(checkpoint, None, *formats, isa), PROMPT) for isa in INSTRUCTION_SETS}
    for order in (INSTRUCTION_SETS, INSTRUCTION_SETS[::-1]):
        for path in kept_files(cache):
            path.unlink()
        for isa in order:
            assert torch.equal(prompt_logits(load(checkpoint, cache, *formats, isa), PROMPT), alone[isa]), isa


@pytest.mark.sweep(12)
@pytest.mark.parametrize("kind", [each.name for each in BlockKind])
def test_gguf_blocks_are_cached(kind, tmp_path, cache, packs, prompt_logits):
    """Queries, keys and values are of two kinds here, and one matrix has floats."""
    tied, other = kind in {"Q8_0", "Q4_K"}, "Q6_K" if kind != "Q6_K" else "Q8_0"
    path = make_gguf(tmp_path, kind, tied=tied, kinds={"attn_v": other, "ffn_down": "F16"})
    expected = prompt_logits(load_gguf(path, None), PROMPT)
    assert expected.isfinite().all()
    packs.clear()
    first = load_gguf(path, cache)
    assert len(packs) == 2 * 4 + (1 if tied else 2)
    packs.clear()
    second = load_gguf(path, cache)
    assert packs == []
    for model in (first, second):
        assert torch.equal(prompt_logits(model, PROMPT), expected)


def test_cached_gguf_blocks_are_correct_across_instruction_sets(tmp_path, cache, prompt_logits):
    path = make_gguf(tmp_path, "Q5_K")
    alone = {isa: prompt_logits(load_gguf(path, None, isa), PROMPT) for isa in INSTRUCTION_SETS}
    for isa in (*INSTRUCTION_SETS, *INSTRUCTION_SETS[::-1]):
        assert torch.equal(prompt_logits(load_gguf(path, cache, isa), PROMPT), alone[isa]), isa


@pytest.mark.turn(8)
def test_group_sizes_are_cached_separately(checkpoint, cache, prompt_logits):
    """Weights kept for one group size are not used for another one, which has other logits."""
    found = {
        size: [prompt_logits(load(checkpoint, kept, "bfloat16", "int4", group_size=size), PROMPT) for kept in stores]
        for size, stores in ((32, (None, cache)), (64, (None, cache, cache)), (32, (None, cache, cache)))
    }
    assert all(torch.equal(logits, same[0]) for same in found.values() for logits in same)
    assert not torch.equal(found[32][0], found[64][0])
    assert len(kept_files(cache)) == 2


def test_prequantized_checkpoint_is_cached(checkpoint, cache, tmp_path, packs):
    quantize_checkpoint(checkpoint, tmp_path / "int4", "int4")
    load(tmp_path / "int4", cache, quantization=None)
    packs.clear()
    load(tmp_path / "int4", cache, quantization=None)
    assert packs == []


@pytest.mark.turn(12)
def test_formats_and_checkpoints_are_cached_separately(checkpoint, cache, tmp_path, packs):
    other = write_checkpoint(tmp_path / "other" / "model", tiny_config("Qwen2ForCausalLM", attention_bias=True), seed=1)
    for path in (checkpoint, other):
        for dtype, quantization in FORMATS:
            load(path, cache, dtype, quantization)
    assert len(kept_files(cache)) == 2 * len(FORMATS)
    packs.clear()
    for path in (checkpoint, other):
        for dtype, quantization in FORMATS:
            load(path, cache, dtype, quantization)
    assert packs == []


def change_config(checkpoint):
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-5}))


def change_weights(checkpoint):
    """Other weights with the same size and time."""
    file = checkpoint / "model.safetensors"
    stat = file.stat()
    data = bytearray(file.read_bytes())
    data[-1000:] = bytes(1000)
    file.write_bytes(data)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def replace_weights(checkpoint):
    """Other weights with the same size and time, moved over the first file."""
    file, other = checkpoint / "model.safetensors", checkpoint / "other"
    shutil.copy2(file, other)
    data = bytearray(other.read_bytes())
    data[-1000:] = bytes(1000)
    other.write_bytes(data)
    shutil.copystat(file, other)
    other.replace(file)


@pytest.mark.turn(12)
@pytest.mark.parametrize("change", [change_config, change_weights, replace_weights])
def test_changed_checkpoint_is_packed_again(change, checkpoint, cache, packs, prompt_logits):
    load(checkpoint, cache)
    change(checkpoint)
    packs.clear()
    again = load(checkpoint, cache)
    assert len(packs) == 10
    assert torch.equal(prompt_logits(again, PROMPT), prompt_logits(load(checkpoint, None), PROMPT))
    packs.clear()
    load(checkpoint, cache)
    assert packs == []
    assert len(kept_files(cache)) == 1


def cut(file):
    file.write_bytes(file.read_bytes()[:-100])


def empty(file):
    file.write_bytes(b"")


def flip(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def no_json(file):
    data = bytearray(file.read_bytes())
    data[8:12] = b"oops"
    file.write_bytes(data)


def other_numbers(file):
    file.write_bytes(file.read_bytes().replace(b'\\"in_features\\": 64', b'\\"in_features\\": 66'))


def no_numbers(file):
    file.write_bytes(file.read_bytes().replace(b'\\"type\\"', b'\\"tipe\\"'))


def one_column_less(file):
    """Panels of 32 columns hold 63 as well as 64: the size in bytes does not differ."""
    file.write_bytes(file.read_bytes().replace(b'\\"out_features\\": 64', b'\\"out_features\\": 63'))


@pytest.mark.sweep(12)
@pytest.mark.parametrize("damage", [cut, empty, flip, no_json, other_numbers, no_numbers, one_column_less])
def test_damaged_cache_file_is_logged_and_rewritten(damage, checkpoint, cache, packs, prompt_logits, caplog):
    expected = prompt_logits(load(checkpoint, cache), PROMPT)
    (file,) = kept_files(cache)
    before = file.read_bytes()
    damage(file)
    assert file.read_bytes() != before
    packs.clear()
    assert torch.equal(prompt_logits(load(checkpoint, cache), PROMPT), expected)
    assert packs
    assert "packed again" in caplog.text
    for _ in range(2):  # a second start may be needed to write the weights that the damaged file had served in part
        packs.clear()
        assert torch.equal(prompt_logits(load(checkpoint, cache), PROMPT), expected)
    assert packs == []
    assert kept_files(cache) == [file]


def forge(file, change):
    """Change the content of a file and correct its checksum, as an attacker with write access could."""
    content = file.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    linears = json.loads(header["__metadata__"]["linears"])
    text = change(header, linears) or json.dumps(linears)
    header["__metadata__"] |= {"linears": text, "digest": packed_cache._digest_text(text)}
    head = json.dumps(header).encode()
    file.write_bytes(len(head).to_bytes(8, "little") + head + content[8 + size :])


QKV = "+".join(f"model.layers.0.self_attn.{each}_proj" for each in "qkv")
GATE_UP, DOWN = ("+".join(f"model.layers.0.mlp.{each}_proj" for each in names) for names in (("gate", "up"), ("down",)))
FORGERIES = {
    "another shape": lambda _, linears: linears[DOWN][0]["numbers"].update(in_features=128, out_features=512),
    "another matrix": lambda header, linears: (
        linears.update({DOWN: linears[GATE_UP]}), header.update({f"{DOWN}.data": header[f"{GATE_UP}.data"]}), None
    )[2],
    "a part too many": lambda header, linears: (
        linears[DOWN].append(linears[DOWN][0]), header.update({f"{DOWN}.1.data": header[f"{DOWN}.data"]}), None
    )[2],
    "no part": lambda _, linears: linears[DOWN].clear(),
    "no bias": lambda _, linears: linears[QKV][0].update(bias=None),
    "behind the end": lambda header, _: header[f"{DOWN}.data"].update(data_offsets=[64, 1 << 60]),
    "before the begin": lambda header, _: header[f"{DOWN}.data"].update(data_offsets=[-(1 << 60), 64]),
    "no numbers": lambda header, _: header[f"{DOWN}.data"].update(data_offsets=["0", None]),
    "nested": lambda *_: "[" * 200_000,
    "a list": lambda *_: "[]",
}  # fmt: skip


@pytest.mark.sweep(16)
@pytest.mark.parametrize("change", FORGERIES.values(), ids=FORGERIES)
def test_forged_cache_file_is_logged_and_rewritten(change, tmp_path, cache, packs, prompt_logits, caplog):
    path = make_gguf(tmp_path, "Q4_K")
    expected = prompt_logits(load_gguf(path, cache), PROMPT)
    (file,) = kept_files(cache)
    forge(file, change)
    for _ in range(2):
        assert torch.equal(prompt_logits(load_gguf(path, cache), PROMPT), expected)
    assert "packed again" in caplog.text
    packs.clear()
    assert torch.equal(prompt_logits(load_gguf(path, cache), PROMPT), expected)
    assert packs == []
    forge(file, lambda *_: None)
    load_gguf(path, cache)
    assert packs == []  # the forging itself is not the reason for the refusals above


@pytest.mark.parametrize("offsets", [[8, 65], [-8, 0], [16, 16], [24, 16], [4, 16], [8.0, 16], [8, True], [8, None]])
def test_invalid_tensor_offsets_are_refused(offsets):
    tensors = {"first": {"data_offsets": [0, 8]}, "second": {"data_offsets": offsets}}
    with pytest.raises(ValueError, match="second is cut off"):
        packed_cache._places(tensors, 64)
    assert packed_cache._places({"first": tensors["first"]}, 8) == {"first": (0, 8)}


def test_least_recently_used_cache_file_is_evicted(tmp_path, cache, packs):
    paths = [write_checkpoint(tmp_path / f"m{i}", tiny_config("LlamaForCausalLM"), seed=i) for i in range(4)]
    load(paths[0], cache)
    size = kept_files(cache)[0].stat().st_size
    small = PackedCache(3 * size + 1000, cache.directory)
    from octavo.kernels.cpu import CpuKernels

    layout = CpuKernels(num_threads=1).layout
    for index, path in enumerate(paths[:3]):
        load(path, small)
        os.utime(small.path(path, layout, "bfloat16", "int8", DEFAULT_GROUP_SIZE), (index + 1, index + 1))
    load(paths[0], small)  # used: now it is the newest
    load(paths[3], small)
    packs.clear()
    for index in (0, 2, 3):
        load(paths[index], small)
    assert packs == []
    load(paths[1], small)
    assert packs


def test_alternating_models_do_not_evict_each_other(tmp_path, cache, packs):
    first, second = (
        write_checkpoint(tmp_path / name, tiny_config("LlamaForCausalLM"), seed=len(name)) for name in ("a", "bb")
    )
    load(first, cache)
    size = kept_files(cache)[0].stat().st_size
    small = PackedCache(size + 1000, cache.directory)
    load(second, small)
    packs.clear()
    load(first, small)
    assert packs == []


def test_full_disk_evicts_no_other_model(checkpoint, tmp_path, cache, monkeypatch):
    other = write_checkpoint(tmp_path / "other", tiny_config("LlamaForCausalLM"))
    load(other, cache)
    (kept,) = kept_files(cache)
    os.utime(kept, (1, 1))
    monkeypatch.setattr(packed_cache.shutil, "disk_usage", lambda _path: type("Usage", (), {"free": 1000}))
    load(checkpoint, PackedCache(kept.stat().st_size + 1000, cache.directory))
    assert kept_files(cache) == [kept]


def test_undeletable_damaged_file_does_not_change_logits(checkpoint, cache, prompt_logits, monkeypatch):
    expected = prompt_logits(load(checkpoint, cache), PROMPT)
    flip(kept_files(cache)[0])

    def refuse(*_args, **_options):
        raise PermissionError("read-only")

    monkeypatch.setattr(Path, "unlink", refuse)
    assert torch.equal(prompt_logits(load(checkpoint, cache), PROMPT), expected)


def test_failed_load_closes_cache_file(checkpoint, cache, monkeypatch):
    load(checkpoint, cache)
    closed = []
    close = packed_cache._Reader.close
    monkeypatch.setattr(packed_cache._Reader, "close", lambda self: (closed.append(1), close(self)))
    with pytest.raises(KeyboardInterrupt):
        load(checkpoint, cache, progress=interrupt)
    assert closed == [1]


def interrupt(done, _total):
    if done:  # the first calls come from reading the files' hashes
        raise KeyboardInterrupt


def test_layout_depends_on_multiplication_kernel():
    """Weights packed on one machine must not decide the kernel on another machine that shares the directory."""
    from octavo.kernels.cpu import CpuKernels

    own = {"amx", "avx512_bf16"} & set(INSTRUCTION_SETS)
    layouts = {CpuKernels(isa, num_threads=1).layout for isa in ("portable", *own)}
    assert len(layouts) == 1 + len(own)


def test_missing_home_disables_cache(monkeypatch, caplog):
    from octavo.models.loader import open_packed_cache

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home directory")))
    assert open_packed_cache(1 << 30) is None
    assert "XDG_CACHE_HOME" in caplog.text


def test_uncacheable_weights_still_load(checkpoint, cache, tmp_path, prompt_logits, caplog, monkeypatch):
    expected = prompt_logits(load(checkpoint, None), PROMPT)
    assert torch.equal(prompt_logits(load(checkpoint, PackedCache(1000, cache.directory)), PROMPT), expected)
    assert kept_files(cache) == []
    blocked = tmp_path / "file"
    blocked.write_text("no directory")
    assert torch.equal(prompt_logits(load(checkpoint, PackedCache(1 << 30, blocked)), PROMPT), expected)
    assert "cannot be stored" in caplog.text
    monkeypatch.setattr(packed_cache.shutil, "disk_usage", lambda _path: type("Usage", (), {"free": 1000}))
    load(checkpoint, cache)
    assert kept_files(cache) == []
    monkeypatch.undo()
    load(checkpoint, cache)  # smaller than the least size
    assert kept_files(cache) == []


def test_old_temporary_files_are_removed(checkpoint, cache):
    cache.directory.mkdir()
    (cache.directory / "old.tmp").write_text("half")
    os.utime(cache.directory / "old.tmp", (1, 1))
    (cache.directory / "new.tmp").write_text("being written")
    load(checkpoint, cache)
    assert {path.suffix for path in kept_files(cache)} == {".tmp", ".safetensors"}
    assert (cache.directory / "new.tmp").exists()
    assert len(kept_files(cache)) == 2


def test_weights_without_costly_packing_are_not_cached(checkpoint, cache, tmp_path):
    load(checkpoint, cache, quantization=None)
    load(checkpoint, cache, load_format="dummy")
    load_model(
        FolderWeights(checkpoint), read_architecture(checkpoint), ReferenceKernels(), dtype="float32",
        device=torch.device("cpu"), max_model_len=64, quantization="int8", packed_cache=cache,
    )  # fmt: skip
    load_gguf(make_gguf(tmp_path, "F16"), cache)
    assert kept_files(cache) == []


def test_cache_file_is_readable_safetensors(checkpoint, cache):
    load(checkpoint, cache)
    with safe_open(kept_files(cache)[0], framework="pt") as file:
        names = set(file.keys())
        attention = "model.layers.0.self_attn."
        assert f"{attention}q_proj+{attention}k_proj+{attention}v_proj.bias" in names
        assert set(file.metadata()) == {"identity", "linears", "digest"}


def test_changed_mtime_alone_does_not_repack_weights(checkpoint, cache, packs):
    load(checkpoint, cache)
    packs.clear()
    os.utime(checkpoint / "model.safetensors", (1, 1))
    load(checkpoint, cache)
    assert packs == []


def test_checkpoint_files_are_hashed_once(checkpoint, cache, reads):
    """Not before there is a file to compare them with, and not in later starts."""
    load(checkpoint, None)
    assert reads == []
    load(checkpoint, cache)
    assert sorted(path.name for path in reads) == ["config.json", "model.safetensors"]
    reads.clear()
    load(checkpoint, cache)
    load(checkpoint, cache, quantization="int4")
    assert reads == []


def test_relinked_hub_file_is_hashed_and_packed_again(checkpoint, cache, tmp_path, packs, reads):
    """A snapshot's links lead to files that are named by their content; a link to another place is another file."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    for path in checkpoint.iterdir():
        path.rename(blobs / path.name)
        (snapshot / path.name).symlink_to(blobs / path.name)
    load(snapshot, cache)
    packs.clear()
    reads.clear()
    load(snapshot, cache)
    assert (packs, reads) == ([], [])
    write_checkpoint(tmp_path / "next", tiny_config("Qwen2ForCausalLM", attention_bias=True), std=0.1, seed=1)
    (tmp_path / "next" / "model.safetensors").rename(blobs / "next")
    shutil.copystat(blobs / "model.safetensors", blobs / "next")
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to(blobs / "next")
    load(snapshot, cache)
    assert len(packs) == 10
    assert [path.name for path in reads] == ["model.safetensors"]


def test_weights_changed_during_load_are_not_cached(checkpoint, cache, packs, caplog):
    def change(done, _total):
        if done and not packs[1:]:
            change_weights(checkpoint)
            os.utime(checkpoint / "model.safetensors", (1, 1))

    load(checkpoint, cache, progress=change)
    assert kept_files(cache) == []
    assert "was changed while it was loaded" in caplog.text
    packs.clear()
    load(checkpoint, cache)
    assert len(packs) == 10
    assert len(kept_files(cache)) == 1


def test_cache_write_reports_progress(checkpoint, cache):
    """The watcher of a load sees that it continues, even if the disk is slow."""
    told, of_packing = [], []
    load(checkpoint, cache, progress=lambda done, total: told.append((done, total)))
    load(checkpoint, None, progress=lambda done, total: of_packing.append((done, total)))
    with safe_open(kept_files(cache)[0], "pt") as file:
        num_tensors = len(list(file.keys()))
    done, total = told[-1]
    assert done == total
    num_files = 2  # are read completely
    assert told == of_packing + [(total, total)] * (num_files + num_tensors)
