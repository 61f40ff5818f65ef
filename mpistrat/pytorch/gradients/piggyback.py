"""Words that travel with the agreement before gradients are reduced, and so need no message of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np


class Piggyback(Protocol):
    """Adds words of this rank to the agreement, and gets their maxima over all ranks."""

    def words(self) -> np.ndarray:
        """This rank's words, int32; every rank gives as many. Called at each reduction of gradients."""
        ...

    def received(self, greatest: np.ndarray) -> None:
        """Takes the maxima, on all ranks, at the end of the reduction. It may be collective, and may raise."""
        ...
