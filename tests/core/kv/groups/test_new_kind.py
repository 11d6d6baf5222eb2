"""A new kind of KV group needs one file: core, memory plan and stores need no change."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from simulation.hash_model import HashWorker
from simulation.world import SimulationError, draw_stored, draw_windowed, run_world

from octavo.data.kv_groups import FullAttention, KVGroupSpec, SlidingWindow
from octavo.kv_transfer.group_parts import num_usable
from octavo.models.kv_layout import KVLayout, KVShape, LayerGroup

sys.path.insert(0, str(Path(__file__).parent))
from chunked_attention import ChunkedAttention

sys.path.pop(0)


def run_all(draw):
    """Run simulated worlds with a second KV group of the new kind; return their totals."""
    configs = [replace(draw(random.Random(seed), 120), kind_name=ChunkedAttention.name) for seed in range(8)]
    return [run_world(f"chunked:{seed}", config) for seed, config in enumerate(configs)]


@pytest.mark.turn(12)
@pytest.mark.parametrize("draw", [draw_windowed, draw_stored])
def test_simulation_with_new_group_kind_generates_correct_tokens(draw):
    totals = run_all(draw)
    assert sum(each.behind_window for each in totals) > 0, "no request let go of a block"
    assert sum(each.steps for each in totals) > 300


def test_simulation_detects_reads_before_chunk(monkeypatch):
    read = HashWorker._read

    def too_far(self, row, index, kind, content, token, position):
        return read(self, row, index, SlidingWindow(kind.window), content, token, position)

    monkeypatch.setattr(HashWorker, "_read", too_far)
    with pytest.raises(SimulationError):
        run_all(draw_windowed)


def test_layers_of_each_kind_form_one_group():
    @dataclass(frozen=True, slots=True)
    class ChunkedShape(KVShape):
        @property
        def kind(self):
            return ChunkedAttention(12)

    layout = KVLayout((KVShape(1, 8, window=5), ChunkedShape(2, 8), KVShape(1, 8), KVShape(1, 8, window=7)))
    assert layout.kv_groups == (
        LayerGroup(FullAttention(), (2,)),
        LayerGroup(SlidingWindow(5), (0,)),
        LayerGroup(ChunkedAttention(12), (1,)),
        LayerGroup(SlidingWindow(7), (3,)),
    )
    assert layout.block_bytes(4, "float32") == (256, 256, 512, 256)
    assert layout.group_indices == (1, 2, 0, 3)


def test_journal_round_trips_new_group_kind():
    spec = KVGroupSpec(ChunkedAttention(8), 30)
    assert spec.to_json() == {"kind": "chunked_attention", "num_blocks": 30, "window": 8}
    assert KVGroupSpec.from_json(spec.to_json()) == spec
    with pytest.raises(KeyError):
        KVGroupSpec.from_json({"kind": "unheard of", "num_blocks": 30})


def test_hit_length_satisfies_every_group_kind():
    """Block 3 of six blocks of two tokens has lost its parts: each kind shortens the hit that the other one allows."""
    is_whole, kinds = [True, True, True, False, True, True], [SlidingWindow(4), ChunkedAttention(8)]
    assert num_usable(is_whole, 0, 100, 2, kinds[:1]) == 6
    assert num_usable(is_whole, 0, 100, 2, kinds[1:]) == 6
    assert num_usable(is_whole, 0, 11, 2, [*kinds, SlidingWindow(5)]) == 3
    assert num_usable(is_whole[:5], 0, 100, 2, kinds) == 3
