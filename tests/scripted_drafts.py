"""A proposer that knows the answers, for tests: a given share of its drafts is right."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from octavo import LLMEngine
    from octavo.speculative.interface import DraftTask, EndedRequest


class ScriptedProposer:
    """Proposes the next tokens of a known sequence; each is wrong with a probability.

    sequences: by request id in the core; prompt and answer.
    """

    num_bytes = 0
    num_passes, computed, computes = 0, frozenset(), False

    def __init__(self, sequences: Mapping[str, list[int]], num_speculative_tokens: int, share_right: float) -> None:
        self.num_speculative_tokens = num_speculative_tokens
        self._sequences = sequences
        self._share_right = share_right
        self._rng = random.Random(7)

    def propose(self, tasks: Sequence[DraftTask]) -> list[list[int]]:
        return [self.guess(task.request_id, len(task.token_ids)) for task in tasks]

    def guess(self, request_id: str, num_known: int) -> list[int]:
        """Return drafts after `num_known` known tokens."""
        drafts = self._sequences[request_id][num_known : num_known + self.num_speculative_tokens]
        return [each if self._rng.random() < self._share_right else each ^ 1 for each in drafts]

    def forget(self, request_ids: Iterable[str]) -> None:
        pass

    def finish(self, ended: Sequence[EndedRequest]) -> None:
        pass


def let_propose(engine: LLMEngine, proposer: ScriptedProposer, *, cut: bool = True) -> None:
    """Use the proposer's drafts. cut=False: they go to the scheduler unchanged, even if a grammar forbids them."""
    core = engine.core
    if cut:
        core.executor.worker.runner.drafting.proposer = proposer
        return
    scheduler, update = core.scheduler, core.scheduler.update_from_output

    def guess_and_update(scheduled, result):
        sampled = result.sampled_token_ids
        known = {
            each.request_id: len(each.sequence.token_ids) + len(sampled.get(each.request_id, ()))
            for each in scheduler.running
        }
        drafts = {name: proposer.guess(name, count) for name, count in known.items()}
        return update(scheduled, replace(result, draft_token_ids=drafts))

    scheduler.update_from_output = guess_and_update


def verify_all(engine: LLMEngine) -> None:
    """Propose and verify every draft, even if it does not pay off on this machine."""
    policy = engine.core.scheduler._state.draft_policy
    policy.bound = lambda _num_tokens, _requests: {}
    policy.allot = lambda wanted, _num_decoding: [count for _, count in wanted]
