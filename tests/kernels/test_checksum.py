"""XXH64: published values, and the specification in Python for every code path."""

import random

import pytest
import torch
from kernels_available import COMPILED

from octavo.kernels.checksum import digest, xxh64

pytestmark = pytest.mark.skipif(not COMPILED, reason="octavo was installed without compiled kernels")
MASK = (1 << 64) - 1
PRIMES = (0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5)


def checksum(content, seed=0):
    memory = torch.frombuffer(bytearray(b"?" + content + b"?"), dtype=torch.uint8)
    return xxh64(memory[1 : 1 + len(content)], seed)


@pytest.mark.parametrize(
    ("content", "seed", "expected"),
    [
        (b"", 0, 0xEF46DB3751D8E999),
        (b"a", 0, 0xD24EC4F1A98C6E5B),
        (b"abc", 0, 0x44BC2CF5AD770999),
        (b"xxhash", 20141025, 0xB559B98D844E0635),
        (b"Nobody inspects the spammish repetition", 0, 0xFBCEA83C8A378BF1),
    ],
)
def test_xxh64_matches_published_values(content, seed, expected):
    assert checksum(content, seed) == expected


def rotate(value, by):
    return (value << by | value >> (64 - by)) & MASK


def one_round(total, word):
    return rotate((total + word * PRIMES[1]) & MASK, 31) * PRIMES[0] & MASK


def specified(content, seed):
    p1, p2, p3, p4, p5 = PRIMES
    word = lambda at, size: int.from_bytes(content[at : at + size], "little")  # noqa: E731
    at, value = 0, seed + p5
    if len(content) >= 32:
        lanes = [seed + p1 + p2, seed + p2, seed, seed - p1]
        for at in range(0, len(content) // 32 * 32, 32):
            lanes = [one_round(lane & MASK, word(at + 8 * i, 8)) for i, lane in enumerate(lanes)]
        at += 32
        value = sum(rotate(lane, by) for lane, by in zip(lanes, (1, 7, 12, 18), strict=True))
        for lane in lanes:
            value = ((value & MASK) ^ one_round(0, lane)) * p1 + p4
    value = (value + len(content)) & MASK
    while at < len(content):
        size = 8 if len(content) - at >= 8 else 4 if len(content) - at >= 4 else 1
        if size == 8:
            value = rotate(value ^ one_round(0, word(at, 8)), 27) * p1 + p4
        elif size == 4:
            value = rotate(value ^ (word(at, 4) * p1 & MASK), 23) * p2 + p3
        else:
            value = rotate(value ^ (content[at] * p5 & MASK), 11) * p1
        value, at = value & MASK, at + size
    value = (value ^ value >> 33) * p2 & MASK
    value = (value ^ value >> 29) * p3 & MASK
    return value ^ value >> 32


def test_xxh64_matches_specification_for_every_length():
    rng = random.Random(0)
    for size in (*range(100), 1000, 4099):
        content, seed = rng.randbytes(size), rng.getrandbits(64)
        assert checksum(content, seed) == specified(content, seed), size


def test_digest_depends_on_bytes_order_and_sizes_of_tensors():
    tensors = [torch.arange(100, dtype=torch.uint8), torch.arange(9.0), torch.zeros(0)]
    whole = digest(tensors)
    assert len(whole) == 16
    assert whole == digest(tensors, num_threads=3) == digest(iter(tensors))
    assert whole != digest([tensors[1], tensors[0]])
    assert digest([torch.zeros(8)]) != digest([torch.zeros(4), torch.zeros(4)])
    for tensor in tensors[:2]:
        for place in range(tensor.nbytes):
            tensor.view(torch.uint8)[place] ^= 128
            assert digest(tensors) != whole
            tensor.view(torch.uint8)[place] ^= 128


def test_digest_of_large_tensor_is_independent_of_threads():
    large = torch.arange((9 << 20) // 4, dtype=torch.int32).view(-1, 256)
    whole = digest([large])
    assert whole == digest([large], num_threads=4)
    large[-1, -1] += 1
    assert whole != digest([large], num_threads=4)
