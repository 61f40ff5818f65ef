"""What a rank does when checkpoints are saved and restored."""

from __future__ import annotations

import contextlib
from typing import Any


class CheckpointRole:
    """That of strategies whose ranks all take part.

    Attributes: all_take_part: whether all ranks save and restore together, after the same steps.
    """

    all_take_part = True

    @property
    def saves(self) -> bool:
        """Whether this rank writes a part of each checkpoint now; else another rank does that for it."""
        return True

    @property
    def restores(self) -> bool:
        """Whether this rank reads checkpoints; else another rank sends it what was in them."""
        return True

    @property
    def has_followers(self) -> bool:
        """Whether other ranks restore what this rank sends them, because it alone reads checkpoints."""
        return False

    def unchanging(self) -> contextlib.AbstractContextManager[None]:
        """Inside, no other rank changes the variables: what is read of several belongs to one time."""
        return contextlib.nullcontext()

    def already_written(self) -> contextlib.AbstractContextManager[None]:
        """Inside, variables stay as they are: another rank has written what this rank would write."""
        return contextlib.nullcontext()

    def completed(self, path: str, restored: bool = False) -> None:
        """A checkpoint is complete, or this rank has `restored` from one. Called by: any thread."""

    def tell_followers(self, what: str, value: Any) -> None:
        """Send the ranks that follow the outcome of `what`."""

    def telling_failure(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Around what followers wait for: they get the error that it raises."""
        return contextlib.nullcontext()

    def follow(self, what: str) -> Any:
        """Wait for what the rank that took part sends. Raises: the error that it got."""
        raise RuntimeError(
            f"{what}: all ranks of this strategy take part, so there is none to follow"
        )
