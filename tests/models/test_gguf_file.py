"""GGUF files: the same values as the package `gguf` reads, split files, and every kind of broken or hostile file."""

import random
import struct

import gguf
import pytest
from gguf_files import add, write_gguf

from octavo.errors import ModelError
from octavo.models.gguf_file import GGUFFile, TensorType
from octavo.models.random_weights import tiny_config, write_checkpoint

METADATA = {
    "general.architecture": "llama", "a.flag": True, "a.text": "Grüße \U0001f600", "a.count": 2**32 - 1,
    "a.number": 0.5,
    "a.texts": ["", "ü", "x" * 300], "a.flags": [True, False], "a.counts": [1, 2, 3], "a.numbers": [0.5, -1.0],
}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("llama"), tiny_config("LlamaForCausalLM", vocab_size=288))


@pytest.fixture(scope="module")
def small(checkpoint, tmp_path_factory):
    return write_gguf(checkpoint, tmp_path_factory.mktemp("gguf") / "small.gguf", kind="Q8_0")


def file_of(*fields, num_tensors=0, tensors=b"", num_keys=None, version=3, magic=b"GGUF"):
    """Return the bytes of a file. fields: (key, code of the type, bytes of the value) of each."""
    head = magic + struct.pack("<IQQ", version, num_tensors, len(fields) if num_keys is None else num_keys)
    for key, code, value in fields:
        head += text(key) + struct.pack("<I", code) + value
    return head + tensors


def text(value):
    encoded = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def tensor(name, shape=(32,), code=0, offset=0):
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, code, offset)


def test_metadata_and_tensors_equal_gguf_package(tmp_path):
    path = tmp_path / "all.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.data_alignment = 64
    writer.add_custom_alignment(64)
    for key, value in METADATA.items():
        if key != "general.architecture":
            add(writer, key, value)
    import numpy as np

    writer.add_tensor("one", np.arange(7, dtype=np.float32))
    writer.add_tensor("two", np.arange(24, dtype=np.float16).reshape(2, 3, 4))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    read, oracle = GGUFFile.read(path), gguf.GGUFReader(path)
    fields = {key: field.contents() for key, field in oracle.fields.items() if not key.startswith("GGUF.")}
    assert read.metadata == fields == METADATA | {"general.alignment": 64}
    for each in oracle.tensors:
        found = read.tensors[each.name]
        assert (found.offset, found.num_bytes, found.type.name) == (
            each.data_offset,
            each.n_bytes,
            each.tensor_type.name,
        )
        assert found.shape == tuple(int(size) for size in each.shape)[::-1]


def test_tensor_type_sizes_equal_gguf_package():
    for each in TensorType:
        theirs = gguf.GGMLQuantizationType[each.name]
        assert each.value[0] == theirs.value
        assert (each.block_values, each.block_bytes) == gguf.GGML_QUANT_SIZES[theirs]


def test_split_files_are_read_as_one_model(checkpoint, small, tmp_path):
    first = write_gguf(checkpoint, tmp_path / "some.gguf", kind="Q8_0", splits=3)
    whole, split = GGUFFile.read(small), GGUFFile.read(first)
    assert [path.name for path in split.paths] == [f"some-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    assert {name: each.shape for name, each in split.tensors.items()} == {
        name: each.shape for name, each in whole.tensors.items()
    }
    with pytest.raises(ModelError, match=r"give the first one, some-00001-of-00003.gguf"):
        GGUFFile.read(split.paths[1])
    renamed = split.paths[2].rename(tmp_path / "elsewhere.gguf")
    with pytest.raises(ModelError, match=r"some-00003-of-00003.gguf is missing, one of 3 files"):
        GGUFFile.read(first)
    with pytest.raises(ModelError, match=r"its name must be NAME-00001-of-00003.gguf"):
        GGUFFile.read(renamed)
    split.paths[2].write_bytes(split.paths[1].read_bytes())
    with pytest.raises(ModelError, match=r"00003.gguf: split.no = 1 and split.count = 3, but 2 and 3"):
        GGUFFile.read(first)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"{}", "not a GGUF file"),
        (b"GGUF", "ends within the version"),
        (file_of(version=1), "version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (file_of(num_keys=2**60), "1152921504606846976 keys"),
        (file_of(num_tensors=2**62), "4611686018427387904 tensors"),
        (file_of(num_keys=1), "ends within|more than the file can hold"),
        (file_of(("key", 8, struct.pack("<Q", 2**63) + b"x")), "ends within a string of key"),
        (file_of(("key", 9, struct.pack("<IQ", 8, 2**61))), "2305843009213693952 items in key; the limit is 4194304"),
        (file_of(("key", 9, struct.pack("<IQ", 8, 2**22))), "key has 4194304 strings"),
        (file_of(("key", 9, struct.pack("<IQ", 10, 2**22))), "the file ends within key"),
        (file_of(("key", 9, struct.pack("<IQ", 7, 2**22 + 1) + bytes(2**22 + 1))), "4194305 items in key"),
        (file_of(("key", 9, struct.pack("<IQIQ", 9, 1, 4, 1))), "key is an array in an array"),
        (file_of(("key", 13, b"xxxx")), "key is of the unknown type 13"),
        (file_of(("key", 9, struct.pack("<IQ", 99, 3))), "key is of the unknown type 99"),
        (file_of(("key", 8, text(b"\xff"))), "a string of key is not UTF-8"),
        (file_of(("key", 4, b"1234"), ("key", 4, b"1234")), "the key key occurs twice"),
        (file_of(("x" * 70000, 4, b"1234")), "70000 characters"),
        (file_of(("general.alignment", 4, struct.pack("<I", 0))), "general.alignment = 0"),
        (file_of(("general.alignment", 4, struct.pack("<I", 48))), "general.alignment = 48"),
        (file_of(num_tensors=1, tensors=tensor("t", (1,) * 5)), "t has 5 dimensions"),
        (file_of(num_tensors=1, tensors=tensor("t", (2**62, 2**62))), r"t has the shape"),
        (file_of(num_tensors=1, tensors=tensor("t", (0,))), r"t has the shape \[0\]"),
        (file_of(num_tensors=1, tensors=tensor("t", code=77)), "t is of type 77"),
        (file_of(num_tensors=1, tensors=tensor("t", (31,), code=8)), "t has rows of 31 values"),
        (file_of(num_tensors=1, tensors=tensor("t", offset=2**63) + bytes(256)), "is not within"),
        (file_of(num_tensors=1, tensors=tensor("t", offset=1) + bytes(256)), "is not within"),
        (file_of(num_tensors=1, tensors=tensor("t", (2**30, 2**9))), "is not within"),
        (file_of(num_tensors=2, tensors=tensor("t") + tensor("t") + bytes(512)), "two tensors named t"),
        (file_of(num_tensors=2, tensors=tensor("t") + tensor("u", offset=96) + bytes(512)), "t and u overlap"),
        (file_of(("split.count", 4, struct.pack("<I", 2**31))), "split.count = 2147483648"),
    ],
)  # fmt: skip
def test_broken_file_error_names_defect(tmp_path, content, message):
    path = tmp_path / "broken.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=message) as caught:
        GGUFFile.read(path)
    assert str(path) in str(caught.value)


def test_non_utf8_description_is_accepted(tmp_path):
    path = tmp_path / "latin.gguf"
    for key in ("general.name", "quantize.imatrix.file"):
        path.write_bytes(file_of((key, 8, text("Modèle".encode("latin-1")))))
        assert GGUFFile.read(path).metadata == {key: "Mod\ufffdle"}


def test_truncated_gguf_file_is_refused(small, tmp_path):
    content = small.read_bytes()
    end = max(each.offset + each.num_bytes for each in GGUFFile.read(small).tensors.values())
    path, rng = tmp_path / "cut.gguf", random.Random(0)
    for size in [end - 1, *rng.sample(range(end), 40)]:
        path.write_bytes(content[:size])
        with pytest.raises(ModelError):
            GGUFFile.read(path)
