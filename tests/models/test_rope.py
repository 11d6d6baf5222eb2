"""The rotary table compared with the frequencies of transformers, for every kind and both key styles of config.json."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from sdks import transformers

from octavo.errors import ModelError
from octavo.models.config_file import ConfigFile
from octavo.models.random_weights import tiny_config
from octavo.models.registry import read_architecture
from octavo.models.rope import find_wrong_row, first_rows, inverse_frequencies, make_cos_sin, make_query_scale
from octavo.models.rope_config import RopeConfig, read_rope

CPU = torch.device("cpu")
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512}
YARN = {"factor": 4.0, "original_max_position_embeddings": 512}
LONGROPE = {
    "original_max_position_embeddings": 512,
    "short_factor": [1.0 + 0.03 * index for index in range(24)],
    "long_factor": [1.5 + 0.9 * index for index in range(24)],
}
# rope kind, its parameters
KINDS = [
    ("default", {}),
    ("linear", {"factor": 2.5}),
    ("llama3", LLAMA3),
    ("llama3", LLAMA3 | {"original_max_position_embeddings": 100, "factor": 32.0}),
    ("llama3", LLAMA3 | {"low_freq_factor": 1.5}),
    ("yarn", YARN),
    ("yarn", YARN | {"beta_fast": 128.0, "beta_slow": 100.0}),  # a ramp of length zero
    ("yarn", YARN | {"mscale": 1.0, "mscale_all_dim": 0.7}),
    ("yarn", YARN | {"mscale": 0, "mscale_all_dim": 0.7}),
    ("yarn", YARN | {"attention_factor": 1.25, "truncate": False}),
    ("yarn", YARN | {"beta_fast": 20.0, "beta_slow": 3.0}),
    ("yarn", {"factor": 4.0, "original_max_position_embeddings": 4096, "beta_slow": 1e-3}),  # a ramp beyond the pairs
    ("yarn", {"factor": 4.0, "original_max_position_embeddings": 4096, "beta_slow": 1e-9}),  # and past the dimensions
    ("yarn", {"factor": 4.0}),  # the original length is then max_position_embeddings
    ("yarn", {"factor": None, "original_max_position_embeddings": 512}),
]


def old_style(kind, numbers):
    return {"rope_theta": 5e5, "rope_scaling": {"type": kind, **numbers} if kind != "default" else None}


def new_style(kind, numbers):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 5e5, **numbers}}


def write_config(directory, changes):
    config = tiny_config("LlamaForCausalLM", head_dim=48)
    del config["rope_parameters"]
    (directory / "config.json").write_text(json.dumps(config | changes))
    return directory


@pytest.mark.parametrize("style", [old_style, new_style])
@pytest.mark.parametrize(("kind", "numbers"), KINDS)
def test_cos_sin_table_equals_transformers(kind, numbers, style, tmp_path):
    write_config(tmp_path, style(kind, numbers))
    architecture = read_architecture(tmp_path)
    attention = architecture.layers[0].attention
    assert attention.rope.kind == kind
    assert attention.rope.theta == 5e5
    embedding = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(
        transformers.AutoConfig.from_pretrained(tmp_path)
    )
    cosine, sine = embedding(torch.zeros(1), torch.arange(2000)[None])
    table = make_cos_sin(attention.rope, attention.head_dim, 2000)
    half = attention.head_dim // 2
    # Angles are equal bit for bit; the last bit of a cosine may depend on the length of the vector it was computed in.
    torch.testing.assert_close(table[:, :half], cosine[0, :, :half], rtol=0, atol=2e-7)
    torch.testing.assert_close(table[:, half:], sine[0, :, :half], rtol=0, atol=2e-7)


def test_rope_kinds_give_different_tables():
    tables = [
        make_cos_sin(read_rope(ConfigFile(None, new_style(kind, numbers)), 2048), 48, 600)
        for kind, numbers in KINDS[:6]
    ]
    for index, table in enumerate(tables):
        assert not any(torch.equal(table, other) for other in tables[:index])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (new_style("dynamic", {"factor": 2.0}), ["rope_parameters.rope_type", "dynamic", "llama3"]),
        (old_style("longrope", {"factor": 2.0}), ["rope_scaling.original_max_position_embeddings is missing"]),
        (old_style("longrope", LONGROPE | {"short_factor": [1.0] * 8}), ["long_factor", "8"]),
        (old_style("longrope", LONGROPE | {"long_factor": [0.0] * 24}), ["long_factor", "numbers above 0"]),
        (old_style("longrope", LONGROPE | {"long_mscale": 1.2}), ["long_mscale"]),
        (
            old_style("longrope", LONGROPE | {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}),
            ["rope_scaling", "24 factors", "8"],
        ),
        (new_style("default", {"llama_4_scaling_beta": 0.1}), ["llama_4_scaling_beta"]),
        (new_style("linear", {}), ["rope_parameters.factor is missing"]),
        (new_style("linear", {"factor": "big"}), ["factor = 'big'", "number above 0"]),
        (new_style("linear", {"factor": float("nan")}), ["factor = nan"]),
        (new_style("llama3", LLAMA3 | {"high_freq_factor": 0.5}), ["high_freq_factor", "low_freq_factor"]),
        (new_style("yarn", YARN | {"beta_fast": 0.5}), ["beta_fast", "beta_slow"]),
        (new_style("yarn", YARN | {"truncate": 1}), ["truncate", "true or false"]),
        (new_style("default", {"mrope_section": [1, 2]}), ["mrope_section"]),
        (new_style("default", {"partial_rotary_factor": 0.5}), ["partial_rotary_factor", "whole heads"]),
        ({"rope_theta": 1e4, "partial_rotary_factor": 0.25}, ["partial_rotary_factor", "whole heads"]),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, ["full_attention"]),
        ({"rope_theta": 0}, ["rope_theta = 0"]),
        ({"rope_scaling": "linear"}, ["rope_scaling", "must be an object"]),
    ],
)
def test_unusable_rope_is_refused_by_name(changes, words, tmp_path):
    write_config(tmp_path, changes)
    with pytest.raises(ModelError) as caught:
        read_architecture(tmp_path)
    for word in [*words, "config.json"]:
        assert word in str(caught.value)


def test_rope_scaling_and_rope_parameters_read_equally():
    for kind, numbers in KINDS:
        old = read_rope(ConfigFile(None, old_style(kind, numbers)), 2048)
        assert old == read_rope(ConfigFile(None, new_style(kind, numbers)), 2048)


def test_long_cos_sin_table_equals_one_computed_at_once():
    rope = RopeConfig(kind="yarn", theta=1e4, factor=2.0, original_max_position_embeddings=64, attention_factor=1.1)
    table = make_cos_sin(rope, 8, 40_000)
    assert table.shape == (40_000, 8)
    assert table.dtype == torch.float32
    angles = torch.arange(40_000, dtype=torch.float32)[:, None] * inverse_frequencies(rope, 8)
    whole = torch.cat((angles.cos(), angles.sin()), dim=-1) * 1.1
    torch.testing.assert_close(table, whole, rtol=0, atol=3e-7)


@pytest.mark.turn(12)
def test_cos_sin_peak_memory_is_about_table_size():
    code = """
import pathlib
import torch
from octavo.models.rope import make_cos_sin
from octavo.models.rope_config import RopeConfig
def peak():
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
rope = RopeConfig(kind="default", theta=1e6)
make_cos_sin(rope, 64, 20_000)
before = peak()
table = make_cos_sin(rope, 64, 200_000)
print((peak() - before) / table.nbytes)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 0.9 < float(result.stdout) < 1.15


def phi3_table(directory, style, kind, num_positions):
    """Return our table and that of transformers for `num_positions` positions of a Phi-3 that rotates part of each
    head.
    """
    config = tiny_config("Phi3ForCausalLM", hidden_size=256, head_dim=64)
    config |= {"partial_rotary_factor": 0.75, "original_max_position_embeddings": 512}
    del config["rope_parameters"]
    (directory / "config.json").write_text(json.dumps(config | style(kind, LONGROPE)))
    architecture = read_architecture(directory)
    rope = architecture.layers[0].attention.rope
    embedding = transformers.models.phi3.modeling_phi3.Phi3RotaryEmbedding(
        transformers.AutoConfig.from_pretrained(directory)
    )
    cosine, sine = embedding(torch.zeros(1), torch.arange(num_positions)[None])
    assert cosine.shape[-1] == 48
    theirs = torch.cat([cosine[0, :, :24], sine[0, :, :24]], dim=-1)
    return make_cos_sin(rope, 64, num_positions), theirs


@pytest.mark.parametrize("style", [old_style, new_style])
@pytest.mark.parametrize("num_positions", [512, 513, 2000])
def test_longrope_equals_transformers(num_positions, style, tmp_path):
    """The longest sequence decides about the factors: within the original 512 positions, or longer."""
    ours, theirs = phi3_table(tmp_path, style, "longrope", num_positions)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=3e-7)


def test_su_is_alias_of_longrope(tmp_path):
    ours, _ = phi3_table(tmp_path, old_style, "longrope", 100)
    assert torch.equal(phi3_table(tmp_path, old_style, "su", 100)[0], ours)


def test_longrope_factors_depend_on_longest_sequence():
    rope = read_rope(ConfigFile(None, new_style("longrope", LONGROPE)), 2048)
    assert rope.within(512) == replace(rope, long_factors=rope.short_factors)
    assert rope.within(513) == replace(rope, short_factors=rope.long_factors)
    assert rope.within(513).within(100) == rope.within(513)  # the choice is made once
    beyond = make_cos_sin(rope, 48, 513)[:512]
    assert not torch.equal(make_cos_sin(rope, 48, 512), beyond)


def test_query_scale_equals_transformers():
    numbers = {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 100}
    rope = read_rope(ConfigFile(None, new_style("default", numbers)), 2048, scales_queries=True)
    expected = transformers.models.ministral3.modeling_ministral3.get_llama_4_attn_scale(
        torch.arange(1000)[None], 0.1, 100
    )[0, 0, :, 0]
    torch.testing.assert_close(make_query_scale(rope, 1000, CPU), expected, rtol=0, atol=2e-7)
    assert make_query_scale(rope, 1000, CPU)[99] == 1.0
    assert make_query_scale(RopeConfig(), 1000, CPU) is None


def test_empty_config_gives_default_rope():
    assert read_rope(ConfigFile(None, {}), 2048) == RopeConfig(kind="default", theta=10000.0)


def test_table_without_rope_has_no_columns():
    table = make_cos_sin(None, 8, 5)
    assert (table.shape, table.dtype) == ((5, 0), torch.float32)
    assert find_wrong_row(table, None, 8) is None
    assert first_rows(None, 8, 100, 3).shape == (3, 0)
    assert make_query_scale(None, 5, CPU) is None


def test_find_wrong_row_returns_first_wrong_row():
    rope = RopeConfig(theta=1e4)
    table = make_cos_sin(rope, 8, 3000)
    table[[1500, 1700, 2999]] += 1
    assert find_wrong_row(table, rope, 8) == 1500
    assert find_wrong_row(table[:1500], rope, 8) is None


def test_first_rows_equal_start_of_full_table():
    plain = RopeConfig(theta=1e4)
    assert torch.equal(first_rows(plain, 8, 10, 4), make_cos_sin(plain, 8, 10)[:4])
    assert torch.equal(first_rows(plain, 8, 2, 4), make_cos_sin(plain, 8, 4))


def test_tables_keep_torch_thread_count():
    """Also if a comparison ends at the first wrong row."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        table = make_cos_sin(RopeConfig(theta=1e4), 8, 3000)
        assert find_wrong_row(table, RopeConfig(theta=1e4), 8) is None
        table[1500, 3] = torch.nextafter(table[1500, 3], torch.tensor(2.0))
        assert find_wrong_row(table, RopeConfig(theta=1e4), 8) == 1500
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(num_threads)
