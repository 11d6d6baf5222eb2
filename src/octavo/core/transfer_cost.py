"""Whether KV is sooner fetched than computed: by how long both took lately."""

from __future__ import annotations

from octavo.core.step_cost import StepCost


class TransferCost:
    """Learned from loads and from steps. What was never measured is tried; what does not pay, seldom again."""

    _WEIGHT = 0.2  # of the newest step
    _TRIED_AGAIN = 32  # one of so many loads that do not pay is made, or it would never be known that they do by now

    def __init__(self) -> None:
        self._loads = StepCost()  # seconds by tokens
        self._seconds_per_token = 0.0
        self._num_declined = 0

    def learn_step(self, num_tokens: int, seconds: float) -> None:
        """Take in a step in which so many tokens of prompts were computed."""
        new = seconds / num_tokens
        known = self._seconds_per_token
        self._seconds_per_token = known + self._WEIGHT * (new - known) if known else new

    def learn_load(self, num_tokens: int, seconds: float) -> None:
        """Take in how long a load took, from the order to the step that could go on with it."""
        self._loads.learn(num_tokens, seconds)

    def computing_s(self, num_tokens: int) -> float:
        """Return how long computing so many tokens takes; 0 where it is not known."""
        return self._seconds_per_token * num_tokens

    def is_worth_loading(self, num_tokens: int) -> bool:
        """Whether a load of so many tokens takes no longer than computing them."""
        if not self._seconds_per_token or self._loads.seconds(num_tokens) <= self.computing_s(num_tokens):
            return True
        self._num_declined += 1
        return self._num_declined % self._TRIED_AGAIN == 0
