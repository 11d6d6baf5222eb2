"""Replays a journal, and compares every decision."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from octavo.config import CacheConfig, SchedulerConfig
from octavo.core.scheduler import Scheduler
from octavo.data.events import EventLog
from octavo.data.expert_stats import ExpertLoad
from octavo.data.kv_groups import KVGroupSpec
from octavo.data.kv_tiers import TierMove
from octavo.data.kv_transfer_params import KVTransferParams
from octavo.data.model_output import ModelOutput
from octavo.data.request import ContentSpan, Request, RequestStatus
from octavo.errors import ConfigError
from octavo.journal.format import (
    VERSION,
    checksum,
    decode_tokens,
    decode_transfer,
    read_journal,
)
from octavo.journal.stores import ReplayedConnector
from octavo.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


FIRST_WITH_DROPPED_SAVES = 3
STOP_TOKEN = -1  # replaces any stop token


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A step that the replay decided differently."""

    step: int
    decided: dict[str, int]  # scheduled tokens by request, in the replay


@dataclass(frozen=True, slots=True)
class Replay:
    """A replay's outcome."""

    log: EventLog
    num_steps: int
    num_requests: int
    mismatches: list[Mismatch]
    end_time: float  # of the last line, in seconds
    num_unchecked: int = 0  # steps without a checksum


class Player:
    """Repeats a journal's calls on a new scheduler, and logs the events. Raises `ConfigError`."""

    def __init__(self, header: dict[str, Any], lines: list[list[Any]]) -> None:
        self.microseconds = int(header["start"])
        self.log = EventLog()
        self.outputs = {line[1]: decode_tokens(line[2]) for line in lines if line[0] == "g"}
        self.names: dict[int, str] = {}  # request ids by number
        self.mismatches: list[Mismatch] = []
        self.num_steps = self.num_unchecked = 0
        self.store = ReplayedConnector(header["connector"]) if header.get("connector") else None
        if unknown := set(header["scheduler"]) - {each.name for each in fields(SchedulerConfig)}:
            raise ConfigError(
                f"the journal was written by another version of octavo; unknown fields: {', '.join(sorted(unknown))}"
            )
        first_group, *bounded_groups = _kv_groups(header["kv_groups"])
        self.scheduler = Scheduler(
            SchedulerConfig(**header["scheduler"]),
            CacheConfig(
                block_size=header["block_size"],
                enable_prefix_caching=header["enable_prefix_caching"],
                cache_decoded_blocks=header["cache_decoded_blocks"],
                state_checkpoint_interval=header.get("state_checkpoint_interval"),
            ),
            num_blocks=first_group.num_blocks,
            bounded_groups=bounded_groups,
            num_host_blocks=header["num_host_blocks"],
            max_model_len=header["max_model_len"],
            clock=lambda: self.microseconds / 1e6,
            sink=self.log,
            connector=self.store,
        )
        has_dropped_saves = header.get("converted_from", VERSION) >= FIRST_WITH_DROPPED_SAVES
        self.scheduler.transfers.reports_dropped_saves = has_dropped_saves

    def play(self, line: list[Any]) -> None:
        """Repeat a line's call. Lines must come in order."""
        kind, rest = line[0], line[1:]
        if kind in "afsux":
            self.microseconds += rest[0]
            rest = rest[1:]
        getattr(self, f"_play_{kind}")(*rest)

    def _play_a(self, number: int, name: str, prompt: str, max_total_tokens: int, options: dict[str, Any]) -> None:
        reads_prefix_cache = options.pop("reads_prefix_cache", True)
        if (pair := options.get("kv_transfer_params")) is not None:
            options["kv_transfer_params"] = KVTransferParams(**pair)
        options["cache_points"] = tuple(options.get("cache_points", ()))
        options["spans"] = tuple(ContentSpan(*each) for each in options.get("spans", ()))
        request = Request(
            name, decode_tokens(prompt), SamplingParams(), stop_token_ids=frozenset({STOP_TOKEN}), **options
        )
        request.max_total_tokens = max_total_tokens
        request.reads_prefix_cache = reads_prefix_cache
        self.names[number] = name
        self.scheduler.add_request(request)

    def _play_f(self, numbers: list[int], status: str) -> None:
        self.scheduler.finish_requests([self.names[number] for number in numbers], RequestStatus[status])

    def _play_s(self, recorded: int | None) -> None:
        scheduled = self.scheduler.schedule()
        self.num_steps += 1
        if recorded is None:
            self.num_unchecked += 1
        elif checksum(scheduled) != recorded:
            self.mismatches.append(Mismatch(scheduled.step, scheduled.num_scheduled_tokens))

    def _play_u(
        self,
        rows: list[list[Any]],
        kv_transfers: list[list[Any]],
        drafting_s: float = 0.0,
        num_drafting_passes: int = 0,
        computed_drafts: Sequence[int] = (),
        host_moves: Sequence[list[Any]] = (),
        num_drafts: Mapping[str, int] | None = None,
        num_compilations: int = 0,
        experts: list[Any] | None = None,
    ) -> None:
        scheduled = self.scheduler.in_flight
        assert scheduled is not None
        exceptions = {self.names[number]: (sampled, *rest) for number, sampled, *rest in rows}
        sampled_ids: dict[str, list[int]] = {}
        errors: dict[str, str] = {}
        postponed: set[str] = set()
        for name, count in scheduled.num_scheduled_tokens.items():
            request = self.scheduler.requests.get(name)
            if request is None:
                continue
            is_due = request.num_computed_tokens + count >= len(request.sequence.token_ids)
            num_sampled, num_accepted, reason, error = exceptions.get(name, (int(is_due), int(is_due), None, None))
            if error is not None:
                errors[name] = error
            elif num_sampled:
                sampled_ids[name] = self._tokens(request, num_sampled, num_accepted, reason)
            elif is_due:
                postponed.add(name)
        result = ModelOutput(
            scheduled.step,
            sampled_ids,
            errors=errors,
            postponed=postponed,
            kv_transfers=[decode_transfer(*each) for each in kv_transfers],
            host_moves=[TierMove(*each) for each in host_moves],
            draft_token_ids={self.names[int(number)]: [0] * count for number, count in (num_drafts or {}).items()},
            drafting_s=drafting_s,
            num_drafting_passes=num_drafting_passes,
            computed_drafts={self.names[number] for number in computed_drafts},
            num_compilations=num_compilations,
            experts=None if experts is None else ExpertLoad(*experts),
        )
        self.scheduler.update_from_output(scheduled, result)

    def _tokens(self, request: Request, num_sampled: int, num_accepted: int, reason: str | None) -> list[int]:
        start = request.sequence.num_output_tokens
        known = self.outputs.get(request.arrival_index, [])[start : start + num_accepted]
        tokens = known + [0] * (num_sampled - len(known))
        if reason == "stop" and num_accepted:
            tokens[num_accepted - 1] = STOP_TOKEN
        return tokens

    def _play_k(self, answers: list[Any]) -> None:
        if self.store is not None:
            self.store.answers = answers

    def _play_x(self, message: str) -> None:
        scheduled = self.scheduler.in_flight
        assert scheduled is not None
        self.scheduler.fail_step(scheduled, message)

    def _play_p(self, numbers: list[int]) -> None:
        self.scheduler.faults.preempt([self.names[number] for number in numbers])

    def _play_r(self) -> None:
        self.scheduler.reset_prefix_cache()

    def _play_g(self, number: int, output: str) -> None:
        """Do nothing."""


def _kv_groups(groups: Sequence[dict[str, Any]]) -> list[KVGroupSpec]:
    try:
        return [KVGroupSpec.from_json(group) for group in groups]
    except (KeyError, TypeError):
        raise ConfigError(
            f"the journal was written by another version of octavo; its KV groups {groups} are unknown"
        ) from None


def replay(path: Path) -> Replay:
    """Replay a journal file. Raises `ConfigError`."""
    header, lines = read_journal(path)
    player = Player(header, lines)
    for line in lines:
        player.play(line)
    return Replay(
        player.log,
        player.num_steps,
        len(player.names),
        player.mismatches,
        player.microseconds / 1e6,
        player.num_unchecked,
    )
