"""Speculative decoding: proposers guess draft tokens, and one step verifies all drafts of a request.

Drafts change no output, except with rejection sampling.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.speculative.ngram import NgramProposer
from octavo.speculative.none import NoProposer
from octavo.speculative.suffix import SuffixProposer

if TYPE_CHECKING:
    from octavo.config import SpeculativeConfig
    from octavo.speculative.interface import Proposer


def create_proposer(config: SpeculativeConfig | None, *, max_num_seqs: int, max_model_len: int) -> Proposer:
    """Return the configured lookup proposer, or a `NoProposer`."""
    if config is None or config.method in {"draft_model", "quantized"}:
        return NoProposer()
    if config.method == "suffix":
        return SuffixProposer(config, max_num_seqs=max_num_seqs, max_model_len=max_model_len)
    prompt_lookup_min, prompt_lookup_max = config.lookup_lengths
    return NgramProposer(
        num_speculative_tokens=config.num_speculative_tokens,
        prompt_lookup_min=prompt_lookup_min,
        prompt_lookup_max=prompt_lookup_max,
        max_tokens=max_num_seqs * max_model_len,
    )
