"""Records and repeats stores' answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo.core.kv.block_hash import BlockHash
    from octavo.core.kv_connector import KVConnector
    from octavo.data.request import Request
    from octavo.data.scheduler_output import KVTransfer

    Answer = int | list[int] | None


class RecordedConnector:
    """Forwards calls to a `KVConnector`, and keeps the answers.

    An answer is a number of tokens, None, or a list of indices of wanted keys.
    """

    def __init__(self, connector: KVConnector) -> None:
        self.name = connector.name
        self._connector = connector
        self._answers: list[Answer] = []

    def take_answers(self) -> list[Answer]:
        """Return and forget the kept answers."""
        answers, self._answers = self._answers, []
        return answers

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> int | None:
        """Forward and record."""
        answer = self._connector.get_num_new_matched_tokens(request, num_computed_tokens)
        self._answers.append(answer)
        return answer

    def keys_to_save(self, keys: Sequence[BlockHash], *, only_first_group: bool = False) -> set[BlockHash]:
        """Forward and record."""
        wanted = self._connector.keys_to_save(keys, only_first_group=only_first_group)
        self._answers.append([index for index, key in enumerate(keys) if key in wanted])
        return wanted

    def states_to_save(self, keys: Sequence[BlockHash]) -> set[BlockHash]:
        """Forward and record."""
        wanted = self._connector.states_to_save(keys)
        self._answers.append([index for index, key in enumerate(keys) if key in wanted])
        return wanted

    def request_added(self, request: Request) -> None:
        """Forward the call."""
        self._connector.request_added(request)

    def lookup_given_up(self, request: Request) -> None:
        """Forward the call."""
        self._connector.lookup_given_up(request)

    def update_state_after_alloc(self, request: Request, block_ids: list[int], num_external_tokens: int) -> None:
        """Forward the call."""
        self._connector.update_state_after_alloc(request, block_ids, num_external_tokens)

    def transfer_ordered(self, transfer: KVTransfer) -> None:
        """Forward the call."""
        self._connector.transfer_ordered(transfer)

    def transfer_ended(self, transfer: KVTransfer, num_blocks: int | None) -> None:
        """Forward the call."""
        self._connector.transfer_ended(transfer, num_blocks)

    def request_finished(self, request: Request, block_ids: list[int]) -> None:
        """Forward the call."""
        self._connector.request_finished(request, block_ids)


class ReplayedConnector:
    """A `KVConnector` that gives recorded answers in order. Raises `ConfigError` after the last answer."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.answers: list[Answer] = []

    def _next(self) -> Answer:
        if not self.answers:
            raise ConfigError("the replay asked the KV store more often than the recorded run")
        return self.answers.pop(0)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> int | None:
        """Return next answer."""
        del request, num_computed_tokens
        answer = self._next()
        return None if isinstance(answer, list) else answer

    def keys_to_save(self, keys: Sequence[BlockHash], *, only_first_group: bool = False) -> set[BlockHash]:
        """Return wanted keys."""
        del only_first_group
        answer = self._next()
        return {keys[index] for index in answer if index < len(keys)} if isinstance(answer, list) else set()

    def states_to_save(self, keys: Sequence[BlockHash]) -> set[BlockHash]:
        """Return wanted keys."""
        return self.keys_to_save(keys)

    def request_added(self, request: Request) -> None:
        """Do nothing."""

    def lookup_given_up(self, request: Request) -> None:
        """Do nothing."""

    def update_state_after_alloc(self, request: Request, block_ids: list[int], num_external_tokens: int) -> None:
        """Do nothing."""

    def transfer_ordered(self, transfer: KVTransfer) -> None:
        """Do nothing."""

    def transfer_ended(self, transfer: KVTransfer, num_blocks: int | None) -> None:
        """Do nothing."""

    def request_finished(self, request: Request, block_ids: list[int]) -> None:
        """Do nothing."""
