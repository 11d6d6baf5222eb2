"""The conversations of `test_hybrid_conversations` with a KV store on disk."""

from __future__ import annotations

import pytest
from agent_conversations import play_all
from alone_and_crowd import needs_kernels
from test_hybrid_conversations import alone, make_llm, tokens_of

from octavo.data.events import KVLoadEnded

__all__ = ["alone"]  # fixture
pytestmark = needs_kernels


@pytest.mark.turn(8)
@pytest.mark.parametrize("method", ["none", "suffix"])
def test_restarted_engine_loads_states_from_disk_and_gives_equal_tokens(alone, tmp_path, monkeypatch, method):
    monkeypatch.setattr("octavo.core.transfer_cost.TransferCost.is_worth_loading", lambda *_: True)
    for is_restarted in (False, True):
        llm = make_llm(method, kv_disk_dir=str(tmp_path), kv_disk_bytes=1 << 28)
        engine = llm.llm_engine
        got = play_all(llm, together=is_restarted)
        for name, answers in got.items():
            assert tokens_of(answers) == tokens_of(alone[name]), name
        loads = [each for each in engine.core.recent.since(0) if isinstance(each, KVLoadEnded)]
        assert any(each.outcome == "done" for each in loads) == is_restarted
        engine.finish_transfers()
        engine.shutdown()
