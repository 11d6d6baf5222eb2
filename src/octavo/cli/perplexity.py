"""Measures perplexity."""

from __future__ import annotations

import math
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from octavo.errors import RequestError
from octavo.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from octavo.llm import LLM

PIECE_TOKENS = 512
MAX_PIECES = 40


@contextmanager
def opened(checkpoint: Path, **options: Any) -> Iterator[LLM]:
    """Load a checkpoint."""
    from octavo.llm import LLM

    llm = LLM(str(checkpoint), max_num_seqs=1, enable_prefix_caching=False, packed_cache_bytes=0, **options)
    try:
        yield llm
    finally:
        llm.llm_engine.shutdown()


def python_reference() -> str:
    """Return a text of 110,000 tokens that every installation has."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics.values())


def text_pieces(llm: LLM, text: str, *, max_pieces: int = MAX_PIECES) -> list[list[int]]:
    """Return the first pieces of a text. A piece has PIECE_TOKENS tokens, or `max_model_len` - 1 if that is less.

    If the tokenizer adds BOS, each piece begins with BOS. Raises `RequestError` if the text is shorter than one piece.
    """
    size = min(PIECE_TOKENS, llm.llm_engine.input_processor.model_info.max_model_len - 1)
    tokenizer = llm.get_tokenizer()
    ids = tokenizer.encode(text)
    bos = ids[:1] if ids[:1] == [tokenizer.bos_token_id] else []
    ids, step = ids[len(bos) :], size - len(bos)
    pieces = [bos + ids[first : first + step] for first in range(0, len(ids) - step + 1, step)]
    if not pieces:
        raise RequestError(f"the text has {len(ids)} tokens; perplexity needs pieces of {size}")
    return pieces[:max_pieces]


def mean_losses(
    llm: LLM,
    pieces: Sequence[Sequence[int]],
    *,
    seconds: float = math.inf,
    on_piece: Callable[[object], None] = lambda _: None,
) -> list[float]:
    """Return the mean of -log p(token) for each piece, excluding the piece's first token.

    seconds: Time after which no further piece is begun.
    """
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    end, losses = time.monotonic() + seconds, []
    for piece in pieces:
        [output] = llm.generate([{"prompt_token_ids": list(piece)}], params, use_tqdm=False)
        found = (output.prompt_logprobs or [])[1:]
        logprobs = [each[token].logprob for each, token in zip(found, piece[1:], strict=True) if each is not None]
        losses.append(-math.fsum(logprobs) / len(logprobs))
        on_piece(piece)
        if time.monotonic() > end:
            break
    return losses


def perplexity(losses: Sequence[float]) -> float:
    """Return exp(mean loss)."""
    return math.exp(math.fsum(losses) / len(losses))
