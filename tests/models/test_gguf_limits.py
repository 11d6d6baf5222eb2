"""The limits of a GGUF file, and every type of value and every alignment that it may have."""

from __future__ import annotations

import struct

import pytest

from octavo.errors import ModelError
from octavo.models.gguf_file import GGUFFile

FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
EXTREMES = {
    "B": [0, 255], "b": [-128, 127], "H": [0, 65535], "h": [-32768, 32767], "I": [0, 2**32 - 1],
    "i": [-(2**31), 2**31 - 1], "f": [-0.5, 2.0**100], "?": [False, True], "Q": [0, 2**64 - 1],
    "q": [-(2**63), 2**63 - 1], "d": [-0.1, 2.0**1000],
}  # fmt: skip
STRING, ARRAY, UINT32 = 8, 9, 4


def text(value):
    return struct.pack("<Q", len(value.encode())) + value.encode()


def field(key, code, value):
    return text(key) + struct.pack("<I", code) + value


def number(key, value):
    return field(key, UINT32, struct.pack("<I", value))


def tensor(name, shape=(1,), offset=0, code=0):
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, code, offset)


@pytest.fixture
def read(tmp_path):
    """Return a function that writes a file of fields, descriptions of tensors and further bytes, and reads it."""

    def write_and_read(*fields, tensors=(), end=b"", version=3, num_keys=None, num_tensors=None, name="a.gguf"):
        head = struct.pack(
            "<4sIQQ", b"GGUF", version,
            len(tensors) if num_tensors is None else num_tensors, len(fields) if num_keys is None else num_keys,
        )  # fmt: skip
        path = tmp_path / name
        path.write_bytes(head + b"".join(fields) + b"".join(tensors) + end)
        return GGUFFile.read(path)

    return write_and_read


@pytest.mark.parametrize("code", FORMATS)
def test_each_value_type_is_read_as_scalar_and_array(read, code):
    kind = FORMATS[code]
    values = EXTREMES[kind]
    array = struct.pack("<IQ", code, len(values)) + struct.pack(f"<{len(values)}{kind}", *values)
    fields = [field(f"key {index}", code, struct.pack(f"<{kind}", value)) for index, value in enumerate(values)]
    expected = {"key 0": values[0], "key 1": values[1], "all": values}
    assert read(*fields, field("all", ARRAY, array)).metadata == expected


def test_versions_2_and_3_are_read(read):
    assert read(number("a", 1), version=2).metadata == read(number("a", 1), version=3).metadata == {"a": 1}
    with pytest.raises(ModelError, match=r"GGUF version 4; octavo reads versions 2 and 3"):
        read(version=4)


def padded(*, size, alignment):
    """Return fields after which the description of one tensor `t` ends at `size` bytes."""
    fields = [number("general.alignment", alignment)]
    used = 24 + len(fields[0]) + len(field("x", STRING, text(""))) + len(tensor("t"))
    return [*fields, field("x", STRING, text("y" * (size - used)))]


@pytest.mark.parametrize(
    ("alignment", "begin"), [(1, 130), (8, 136), (32, 160), (64, 192), (256, 256), (1 << 20, 1 << 20)]
)
def test_tensor_data_starts_at_multiple_of_file_alignment(read, alignment, begin):
    end = bytes(begin - 130) + struct.pack("<f", 1.5)
    found = read(*padded(size=130, alignment=alignment), tensors=[tensor("t")], end=end)
    assert found.tensors["t"].offset == begin
    with pytest.raises(
        ModelError, match=f"tensor t, of 4 bytes from {begin} on, is not within the file's {begin + 3} bytes"
    ):
        read(*padded(size=130, alignment=alignment), tensors=[tensor("t")], end=end[:-1])


def test_tensor_data_alignment_defaults_to_32(read):
    size = 24 + len(tensor("t"))
    assert 32 < size < 64
    assert read(tensors=[tensor("t")], end=bytes(64 - size + 4)).tensors["t"].offset == 64


@pytest.mark.parametrize("value", [0, 3, 1 << 21])
def test_alignment_must_be_power_of_two_within_limit(read, value):
    with pytest.raises(ModelError, match=f"general.alignment = {value} must be a power of two up to 1048576"):
        read(number("general.alignment", value))


def test_alignment_must_be_integer(read):
    with pytest.raises(ModelError, match=r"general.alignment = '32' must be a power of two"):
        read(field("general.alignment", STRING, text("32")))


def test_tensor_offset_must_be_multiple_of_alignment(read):
    tensors = [tensor("t"), tensor("u", offset=32)]
    assert read(tensors=tensors, end=bytes(100)).tensors["u"].offset == 96 + 32
    with pytest.raises(ModelError, match=r"tensor u, of 4 bytes from .* is not within"):
        read(number("general.alignment", 64), tensors=tensors, end=bytes(500))


def test_tensors_may_be_adjacent_but_not_overlap(read):
    """They are compared in the order of their offsets, not of their descriptions."""
    assert len(read(tensors=[tensor("u", offset=32), tensor("t", (8,))], end=bytes(200)).tensors) == 2
    with pytest.raises(ModelError, match=r"tensors t and u overlap"):
        read(tensors=[tensor("u", offset=32), tensor("t", (9,))], end=bytes(200))


def test_tensor_size_equals_size_of_its_blocks(read):
    q8_0 = 8
    stored = read(tensors=[tensor("t", (64, 3), code=q8_0)], end=bytes(400)).tensors["t"]
    assert (stored.shape, stored.num_bytes) == ((3, 64), 6 * 34)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_keys": (1 << 16) + 1}, "the file has 65537 keys; the limit is 65536"),
        ({"num_keys": 1 << 16}, "the file ends within|key 0 has 1 strings, more than the file can hold"),
        ({"num_tensors": (1 << 20) + 1}, "the file has 1048577 tensors; the limit is 1048576"),
        ({"num_tensors": 1 << 20}, "the name of tensor 0 has 1 strings, more than the file can hold"),
        ({"tensors": [tensor("t", ())]}, "tensor t has 0 dimensions; 1 to 4 are allowed"),
        ({"tensors": [tensor("t", (1,) * 5)]}, "tensor t has 5 dimensions; 1 to 4 are allowed"),
        ({"tensors": [tensor("t", (1 << 40,))]}, r"tensor t has the shape \[1099511627776\]"),
        ({"tensors": [tensor("t", ((1 << 40) - 1,))]}, "is not within"),
        ({"tensors": [tensor("n" * ((1 << 16) + 1))]}, "the name of tensor 0 has 65537 characters; the limit is"),
        ({"tensors": [tensor("t", (31, 2), code=8)]}, "tensor t has rows of 31 values, which is no multiple"),
        ({"tensors": [tensor("t")[:-1]]}, "the file ends within t; the download is incomplete"),
    ],
)  # fmt: skip
def test_count_above_limit_is_refused(read, options, message):
    with pytest.raises(ModelError, match=message):
        read(**options)


def test_values_at_limit_are_read(read):
    name = "n" * (1 << 16)
    found = read(number(name, 7), tensors=[tensor("t", (1,) * 4)], end=bytes(100))
    assert (found.metadata[name], found.tensors["t"].shape) == (7, (1,) * 4)
    with pytest.raises(ModelError, match=r"key 0 has 65537 characters; the limit is 65536"):
        read(number(name + "n", 7))


def test_only_names_have_length_limit(read):
    value = "v" * ((1 << 16) + 1)
    assert read(field("a", STRING, text(value))).metadata == {"a": value}


def test_string_array_may_end_file(read):
    array = struct.pack("<IQ", STRING, 2) + text("") + text("")
    assert read(field("a", ARRAY, array)).metadata == {"a": ["", ""]}
    with pytest.raises(ModelError, match=r"a has 2 strings, more than the file can hold"):
        read(field("a", ARRAY, array[:-1]))
    with pytest.raises(ModelError, match=r"the file ends within a string of a"):
        read(field("a", ARRAY, struct.pack("<IQ", STRING, 2) + text("x" * 8) + b"1234567"))


@pytest.mark.parametrize("count", [0, 1])
def test_split_count_of_zero_or_one_is_single_file(read, count):
    assert len(read(number("split.count", count)).paths) == 1


def test_split_count_above_limit_is_refused(read):
    with pytest.raises(ModelError, match=r"split.count = 4097 must be a whole number of files up to 4096"):
        read(number("split.count", 4097))
    with pytest.raises(ModelError, match=r"its name must be NAME-00001-of-04096.gguf"):
        read(number("split.count", 4096))
    with pytest.raises(ModelError, match=r"split.count = 'two' must be a whole number"):
        read(field("split.count", STRING, text("two")))


def test_split_count_must_be_nonnegative_and_match_file_name(read):
    with pytest.raises(ModelError, match=r"split.count = -1 must be a whole number"):
        read(field("split.count", 5, struct.pack("<i", -1)))
    with pytest.raises(ModelError, match=r"is one of 2 files, so its name must be NAME-00001-of-00002.gguf"):
        read(number("split.count", 2), number("split.no", 0), name="m-00001-of-00003.gguf")


def test_first_split_must_have_number_zero(read):
    with pytest.raises(ModelError, match=r"split.no = 1 and split.count = 2, but 0 and 2 are expected"):
        read(number("split.count", 2), number("split.no", 1), name="m-00001-of-00002.gguf")


def test_first_missing_split_is_named(read):
    with pytest.raises(ModelError, match=r": m-00002-of-00003.gguf is missing, one of 3 files of the model"):
        read(number("split.count", 3), number("split.no", 0), name="m-00001-of-00003.gguf")


def test_tensor_in_two_splits_is_refused(read):
    def write(index):
        fields = [number("split.count", 2), number("split.no", index)]
        return read(*fields, tensors=[tensor("t")], end=bytes(100), name=f"m-0000{index + 1}-of-00002.gguf")

    with pytest.raises(ModelError, match=r"m-00002-of-00002.gguf is missing"):
        write(0)
    with pytest.raises(ModelError, match=r"give the first one, m-00001-of-00002.gguf"):
        write(1)
    with pytest.raises(ModelError, match=r"m-00002-of-00002.gguf: tensor t is also in m-00001-of-00002.gguf"):
        write(0)


def test_unopenable_file_is_named(tmp_path):
    with pytest.raises(ModelError, match=r"none.gguf cannot be read \(No such file or directory\)"):
        GGUFFile.read(tmp_path / "none.gguf")
