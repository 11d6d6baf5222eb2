"""The cost of drafting without a model: the proposer `suffix` and its index.

    python benchmarks/drafting.py
    python benchmarks/drafting.py --tokens 4194304 --drafts 16

The index: bytes for --tokens tokens, CPU microseconds to add a token, and for a proposal. Then the proposer as used in
a step, for one request: the newest token is added, and drafts are searched in its own text and in as many tokens of
earlier answers. Prints median and 99th percentile, for texts with the word frequencies of a natural language.
`speculation.py` measures the resulting speed.
"""

from __future__ import annotations

import argparse
import random
import time
from array import array

import numpy as np

from octavo.config import SpeculativeConfig
from octavo.speculative.interface import DraftTask, EndedRequest
from octavo.speculative.suffix import SuffixProposer
from octavo.speculative.suffix_index import BYTES_PER_TOKEN, MAX_MATCH, SuffixIndex

ANSWER_TOKENS = 512
REQUESTS = 10


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1 << 20, help="in the index (default: 1048576)")
    parser.add_argument("--drafts", type=int, default=8, help="num_speculative_tokens (default: %(default)s)")
    arguments = parser.parse_args()
    text = Text()
    measure_index(text, arguments.tokens, arguments.drafts)
    measure_proposer(text, arguments.tokens, arguments.drafts)
    planned = SuffixProposer(SpeculativeConfig(method="suffix"), max_num_seqs=64, max_model_len=8192).num_bytes
    print(f"planned for suffix by default: {planned:,} bytes")


class Text:
    """Generates texts of words of up to twelve tokens, in which a few words are very frequent."""

    def __init__(self) -> None:
        self.rng = random.Random(1)
        self._words = [[self.rng.randrange(49_000) for _ in range(self.rng.randint(1, 12))] for _ in range(4000)]

    def draw(self, num_tokens: int) -> list[int]:
        """Return `num_tokens` tokens of text."""
        tokens: list[int] = []
        while len(tokens) < num_tokens:
            tokens += self._words[min(int(self.rng.paretovariate(0.7)), len(self._words) - 1)]
        return tokens[:num_tokens]


def measure_index(text: Text, num_tokens: int, num_drafts: int) -> None:
    """Print the bytes and times of the index alone."""
    tokens = text.draw(num_tokens)
    index = SuffixIndex(num_tokens)
    start = time.thread_time()
    index.extend(tokens)
    extend_us = (time.thread_time() - start) / num_tokens * 1e6
    index.close()
    times = []
    for _ in range(5000):
        end = text.rng.randrange(MAX_MATCH, num_tokens)
        suffix = array("i", tokens[end - MAX_MATCH : end])
        start = time.thread_time()
        index.propose(suffix, num_drafts, factor=2.0, min_probability=0.1)
        times.append(time.thread_time() - start)
    print(
        f"index of {num_tokens:,} tokens: {index.nbytes:,} bytes; a token {extend_us:.2f} us; a proposal {told(times)}"
    )


def measure_proposer(text: Text, num_tokens: int, num_drafts: int) -> None:
    """Print the times of a request's drafts. Most searches of a step find nothing."""
    config = SpeculativeConfig(
        method="suffix",
        num_speculative_tokens=num_drafts,
        suffix_decoding_max_cached_bytes=num_tokens * BYTES_PER_TOKEN,
    )
    proposer = SuffixProposer(config, max_num_seqs=64, max_model_len=8192)
    for number in range(num_tokens // ANSWER_TOKENS + 1):
        answer = np.array(text.draw(ANSWER_TOKENS), dtype=np.int32)
        proposer.finish([EndedRequest(str(number), answer, 1, None)])
    times = []
    for number in range(REQUESTS):
        tokens = np.array(text.draw(2 * ANSWER_TOKENS), dtype=np.int32)
        for count in range(ANSWER_TOKENS, len(tokens)):
            task = DraftTask(f"request {number}", tokens[:count], num_drafts, None)
            start = time.thread_time()
            proposer.propose([task])
            if count > ANSWER_TOKENS:  # its prompt is added only once
                times.append(time.thread_time() - start)
    print(f"a request's drafts, its newest token taken in: {told(times)}")


def told(seconds: list[float]) -> str:
    """Return the median and the 99th percentile in microseconds."""
    ordered = sorted(seconds)
    median, late = ordered[len(ordered) // 2], ordered[len(ordered) * 99 // 100]
    return f"{median * 1e6:.1f} us, 99th percentile {late * 1e6:.1f} us"


if __name__ == "__main__":
    main()
