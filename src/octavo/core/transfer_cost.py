"""Decides whether loading KV is faster than computing it, from recent durations of both."""

from __future__ import annotations

from octavo.core.step_cost import StepCost


class TransferCost:
    """Costs of loading and of computing KV, learned from loads and steps.

    Unmeasured loads are tried. Loads that do not pay are tried again from time to time.
    """

    _WEIGHT = 0.2  # of the newest step
    _TRIED_AGAIN = 32  # one in so many loads that do not pay is made, to notice when they begin to pay

    def __init__(self) -> None:
        self._loads = StepCost()  # seconds by tokens
        self._seconds_per_token = 0.0
        self._num_declined = 0

    def learn_step(self, num_tokens: int, seconds: float) -> None:
        """Learn from a step of `num_tokens` tokens, most of them of prompts. num_tokens must be above 0."""
        new = seconds / num_tokens
        known = self._seconds_per_token
        self._seconds_per_token = known + self._WEIGHT * (new - known) if known else new

    def learn_load(self, num_tokens: int, seconds: float) -> None:
        """Learn from a load of `num_tokens` tokens. seconds: from its order to the step that received it."""
        self._loads.learn(num_tokens, seconds)

    def computing_s(self, num_tokens: int) -> float:
        """Return how many seconds computing `num_tokens` tokens takes; 0 if it is not known."""
        return self._seconds_per_token * num_tokens

    def is_worth_loading(self, num_tokens: int) -> bool:
        """Return whether to load `num_tokens` tokens: if that is not slower than computing, or as a trial."""
        if not self._seconds_per_token or self._loads.seconds(num_tokens) <= self.computing_s(num_tokens):
            return True
        self._num_declined += 1
        return self._num_declined % self._TRIED_AGAIN == 0
