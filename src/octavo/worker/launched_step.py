"""A step between its two halves: its work is enqueued on the device, and what comes of it is not read yet."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

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
    """Made by `octavo.worker.model_runner.ModelRunner.launch`, which fills it; for `collect`, once.

    end           behind all of the step's work on the device
    inputs        None where nothing is computed
    chosen        None where nobody is sampled
    due_rows      int64, rows whose requests get one token of it; None where nobody is sampled, or drafts are
    is_awaited    whether a step was launched behind it, which is fed what this one sampled on the device
    num_changes   that of the batch when it was launched
    troubles      rows of logits in which no token can be chosen, as far as the host knows; postponed: see `ModelOutput`
    errors        requests that failed while the step was launched
    prompt_scores, pooled_rows: of those whose prompt is looked at
    """

    scheduled: SchedulerOutput
    host_moves: tuple[TierMove, ...] = ()
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
