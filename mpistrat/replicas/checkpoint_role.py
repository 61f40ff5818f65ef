"""A rank's part in saving and restoring checkpoints."""

from __future__ import annotations

import contextlib
from typing import Any


class CheckpointRole:
    """The role of each rank of a strategy whose ranks all save and restore. Parameter servers have a role of their own.

    Attributes: all_take_part: whether all ranks save and restore together, after the same steps.
    """

    all_take_part = True

    @property
    def saves(self) -> bool:
        """Whether this rank writes a part of each checkpoint now. If False, another rank writes it."""
        return True

    @property
    def restores(self) -> bool:
        """Whether this rank reads checkpoint files. If False, another rank sends it their contents."""
        return True

    @property
    def has_followers(self) -> bool:
        """Whether this rank alone reads checkpoint files, and sends their contents to other ranks."""
        return False

    def unchanging(self) -> contextlib.AbstractContextManager[None]:
        """A context in which no other rank changes variables, so that several reads give values of one time."""
        return contextlib.nullcontext()

    def already_written(self) -> contextlib.AbstractContextManager[None]:
        """A context in which this rank's writes to variables have no effect: another rank has written them already."""
        return contextlib.nullcontext()

    def completed(self, path: str, restored: bool = False) -> None:
        """React to a complete checkpoint at `path`; with `restored`, this rank has read it. Called by: any thread."""

    def tell_followers(self, what: str, value: Any) -> None:
        """Send `value`, the outcome of the action `what` ("restored"), to the ranks that wait in `follow`."""

    def telling_failure(self, what: str) -> contextlib.AbstractContextManager[None]:
        """A context for the action `what` ("restored"). The ranks that wait in `follow` get its error, if any."""
        return contextlib.nullcontext()

    def follow(self, what: str) -> Any:
        """Wait for the value that another rank sends by `tell_followers`, and return it.

        Raises: the error that the other rank met; RuntimeError if all ranks take part, because none of them sends.
        """
        raise RuntimeError(
            f"{what}: all ranks of this strategy take part, so there is no rank to follow"
        )
