"""A number per rank that rides on reductions which take place anyway."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np


class RidingWord:
    """A `Rider`: of one number per rank, all ranks learn the greatest.

    Args:
        ask: gives this rank's number, from 0 to 2**31 - 1.
    """

    def __init__(self, ask: Callable[[], int]) -> None:
        self._ask = ask
        self._greatest: int | None = None

    def board(self) -> np.ndarray:
        return np.array([self._ask()], np.int32)

    def arrive(self, greatest: np.ndarray) -> None:
        self._greatest = max(int(greatest[0]), self._greatest or 0)

    def take(self) -> int | None:
        """The greatest that has arrived since the last call, None where nothing rode; equal on all ranks."""
        greatest, self._greatest = self._greatest, None
        return greatest
