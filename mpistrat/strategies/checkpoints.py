"""What a rank does when checkpoints are saved and restored: a part of `StrategyExtended`."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpistrat.communicators import Communicator
    from mpistrat.strategy import Strategy


class CheckpointRole:
    """That of strategies whose ranks all take part. Attributes: strategy, communicator: as of `StrategyExtended`."""

    strategy: Strategy
    communicator: Communicator

    @property
    def should_checkpoint(self) -> bool:
        """Whether this rank is the one to save checkpoints: the first."""
        return self.communicator.rank == 0

    @property
    def saves_checkpoints(self) -> bool:
        """Whether this rank writes a part of each checkpoint now; else another does that for it."""
        return True

    @property
    def restores_checkpoints(self) -> bool:
        """Whether this rank reads checkpoints; else it is told by another what was in them."""
        return True

    @property
    def has_followers(self) -> bool:
        """Whether others restore what this rank tells them, for it alone reads checkpoints."""
        return False

    def unchanging(self) -> contextlib.AbstractContextManager[None]:
        """Inside, no other rank changes the variables by itself: what is read of several was so at one time."""
        return contextlib.nullcontext()

    def already_written(self) -> contextlib.AbstractContextManager[None]:
        """Inside, variables stay as they are: another rank has written what this one would."""
        return contextlib.nullcontext()

    def tell_of_checkpoint(self, path: str, restored: bool = False) -> None:
        """A checkpoint is complete, or this rank has `restored` from one. Called by: any thread."""

    def tell_followers(self, what: str, value: Any) -> None:
        """Tell those who do not take part in checkpoints how one went."""

    def telling_failure(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Around what followers wait to be told of: an error is told to them, too."""
        return contextlib.nullcontext()

    def follow(self, what: str) -> Any:
        """What the rank that took part has told; waits for it. Raises: the error that it came to, which names it."""
        raise RuntimeError(f"{self.strategy} has nobody to follow")
