"""Decides whether loading KV is faster than computing it."""

from __future__ import annotations

from octavo.core.step_cost import StepCost


class TransferCost:
    """Learns the costs of loading and of computing KV.

    A load of unknown duration is always tried.
    """

    _WEIGHT = 0.2
    _TRIED_AGAIN = 32  # of 32 loads that seem slower, one is tried

    def __init__(self) -> None:
        self._loads = StepCost()
        self._seconds_per_token = 0.0
        self._num_declined = 0

    def learn_step(self, num_tokens: int, seconds: float) -> None:
        """Learn from a step that mostly computes prompts. num_tokens must be above 0."""
        new = seconds / num_tokens
        known = self._seconds_per_token
        self._seconds_per_token = known + self._WEIGHT * (new - known) if known else new

    def learn_load(self, num_tokens: int, seconds: float) -> None:
        """Learn from a load. seconds: Time from the load's order to its end or expiry."""
        self._loads.learn(num_tokens, seconds)

    def computing_s(self, num_tokens: int) -> float:
        """Return the estimated seconds to compute tokens, or 0 if unknown."""
        return self._seconds_per_token * num_tokens

    def is_worth_loading(self, num_tokens: int) -> bool:
        """Return False if loading seems slower than computing, except for occasional trials."""
        if not self._seconds_per_token or self._loads.seconds(num_tokens) <= self.computing_s(num_tokens):
            return True
        self._num_declined += 1
        return self._num_declined % self._TRIED_AGAIN == 0
