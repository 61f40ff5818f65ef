"""What rides on the agreement before gradients are reduced, which takes place anyway."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np


class Rider(Protocol):
    """Has the ranks agree on something without a message of its own."""

    def board(self) -> np.ndarray:
        """Words, int32, of which the MAX over all ranks is taken; as many on every rank. Called at each reduction."""
        ...

    def arrive(self, greatest: np.ndarray) -> None:
        """Take note of the MAX; called on all ranks when gradients are reduced. May be collective, and may raise."""
        ...
