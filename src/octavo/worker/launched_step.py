"""A launched step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from octavo.data.kv_tiers import TierMove
    from octavo.data.scheduler_output import SchedulerOutput
    from octavo.worker.host_copies import Mark
    from octavo.worker.input_batch import ModelInputs
    from octavo.worker.pooler import PooledRows
    from octavo.worker.prompt_scores import PromptScores
    from octavo.worker.sample_tasks import Trouble
    from octavo.worker.sampler import Choices


@dataclass(slots=True)
class LaunchedStep:
    """A launched step, passed once to `ModelRunner.collect`.

    host_moves   see `PagedKVCache.copy`; call it after `end` is reached
    inputs       None if nothing is computed
    chosen       None if no request is sampled
    due_rows     worker rows of the requests that get one token; None if no request is sampled or drafts are verified
    is_awaited   True if the sampled tokens are fed to a later step
    num_changes  `InputBatch.num_changes` at the launch
    troubles     by row of logits, why it gives no token
    experts      from `ExpertTally.take`
    """

    scheduled: SchedulerOutput
    host_moves: Callable[[], tuple[TierMove, ...]]
    end: Mark | None = None
    inputs: ModelInputs | None = None
    chosen: Choices | None = None
    due_rows: NDArray[np.int64] | None = None
    is_awaited: bool = False
    num_changes: int = 0
    troubles: dict[int, Trouble] = field(default_factory=dict)
    postponed: set[str] = field(default_factory=set)
    errors: dict[str, str] = field(default_factory=dict)
    prompt_scores: list[PromptScores] = field(default_factory=list)
    pooled_rows: list[PooledRows] = field(default_factory=list)
    experts: Tensor | None = None
