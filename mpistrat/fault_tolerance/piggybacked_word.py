"""Sends a number of each rank along with the reductions of gradients."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np


class PiggybackedWord:
    """Sends one number of each rank with each reduction of gradients. All ranks get the greatest number.

    Made by: `PreemptionCheckpointHandler`. The strategy calls `words` and `received` in each reduction.
    Args:
        ask: returns this rank's number, from 0 to 2**31 - 1. Called at each reduction of gradients.
    """

    def __init__(self, ask: Callable[[], int]) -> None:
        self._ask = ask
        self._greatest: int | None = None

    def words(self) -> np.ndarray:
        return np.array([self._ask()], np.int32)

    def received(self, greatest: np.ndarray) -> None:
        self._greatest = max(int(greatest[0]), self._greatest or 0)

    def take(self) -> int | None:
        """Return the greatest number of all ranks since the last call, equal on all ranks.

        Returns: None if no gradients were reduced since the last call.
        """
        greatest = self._greatest
        self._greatest = None
        return greatest
