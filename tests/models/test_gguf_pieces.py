"""Pieces of a GGUF file that was cut by bytes: how they are recognised, and the message."""

import re

import pytest

from octavo.errors import ModelError
from octavo.models.gguf_file import check_piece


def touch(folder, *names):
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).write_bytes(b"x")


def refusal(path):
    """Return the message of the refusal; "" if the path is accepted."""
    try:
        check_piece(path)
    except ModelError as error:
        return str(error)
    return ""


def joining(folder, names, whole):
    return f"cat {' '.join(str(folder / name) for name in names)} > {folder / whole}"


@pytest.mark.parametrize(
    "names",
    [
        ["m.gguf.part1of3", "m.gguf.part2of3", "m.gguf.part3of3"],
        [f"m.gguf.part{number}of11" for number in range(1, 12)],
        ["m.gguf.001", "m.gguf.002", "m.gguf.010"],
        ["m.gguf.split-a", "m.gguf.split-b", "m.gguf.split-aa", "m.gguf.split-ab"],
        ["m.gguf.a", "m.gguf.b"],
    ],
    ids=lambda names: names[0],
)
def test_error_gives_command_that_joins_pieces_in_order(names, tmp_path):
    touch(tmp_path, *names)
    expected = f"{tmp_path / 'm.gguf'} is split into pieces; join them in order, and give the whole file: " + joining(
        tmp_path, names, "m.gguf"
    )
    assert [refusal(tmp_path / name) for name in (*names, "m.gguf", ".")] == [expected] * (len(names) + 2)


def test_missing_pieces_are_counted(tmp_path):
    touch(tmp_path, "m.gguf.part1of3", "m.gguf.part3of3", "other.gguf.part2of3")
    message = (
        f"only 2 of 3 pieces of {tmp_path / 'm.gguf'} are here; download the other pieces, then join them in order, "
    )
    assert refusal(tmp_path / "m.gguf.part1of3") == (
        f"{message}and give the whole file: {joining(tmp_path, ['m.gguf.part1of3', 'm.gguf.part3of3'], 'm.gguf')}"
    )


def test_folder_error_names_pieces_of_first_model(tmp_path):
    touch(tmp_path, "b.gguf.1", "a.gguf.1", "a.gguf.2", "readme.md")
    assert refusal(tmp_path).endswith(joining(tmp_path, ["a.gguf.1", "a.gguf.2"], "a.gguf"))
    assert refusal(tmp_path / "b.gguf.1").endswith(joining(tmp_path, ["b.gguf.1"], "b.gguf"))


def test_piece_next_to_whole_file_names_whole_file(tmp_path):
    touch(tmp_path, "m.gguf", "m.gguf.part1of2")
    assert refusal(tmp_path / "m.gguf.part1of2") == (
        f"{tmp_path / 'm.gguf.part1of2'} is a piece of a GGUF file; give the whole file: {tmp_path / 'm.gguf'}"
    )
    assert refusal(tmp_path / "m.gguf") == ""


@pytest.mark.parametrize("other", ["config.json", "n.gguf"])
def test_folder_with_model_is_accepted(other, tmp_path):
    touch(tmp_path, "m.gguf.part1of2", other)
    assert refusal(tmp_path) == ""
    assert "only 1 of 2 pieces" in refusal(tmp_path / "m.gguf.part1of2")


@pytest.mark.parametrize(
    "name", ["m.gguf", "m.gguf.gz", "m.gguf.partial", "x.bin", "m-00001-of-00002.gguf", "none/m.gguf"]
)
def test_non_piece_paths_are_accepted(name, tmp_path):
    touch(tmp_path, "m.gguf.gz", "m.gguf.partial", "x.bin")
    assert refusal(tmp_path / name) == ""


def test_missing_file_without_pieces_is_accepted(tmp_path):
    touch(tmp_path, "other.gguf.part1of2")
    assert refusal(tmp_path / "m.gguf") == ""


def test_folder_named_like_piece_is_treated_as_folder(tmp_path):
    (tmp_path / "m.gguf.part1of2").mkdir()
    assert refusal(tmp_path / "m.gguf.part1of2") == ""
    touch(tmp_path / "m.gguf.part1of2", "n.gguf.a")
    assert re.search(r"n\.gguf is split into pieces", refusal(tmp_path / "m.gguf.part1of2"))
