"""A rank's part in saving and restoring checkpoints."""

from __future__ import annotations

import contextlib
from typing import Any


class CheckpointRole:
    """The role of each rank where all ranks save and restore. Strategies with parameter servers use a subclass.

    The checkpoint's code calls these methods at the points that they name; here most of them do nothing.

    Attributes: all_take_part: whether all ranks save and restore together, after the same steps.
    """

    all_take_part = True

    @property
    def saves(self) -> bool:
        """Whether this rank writes a part of each checkpoint now. If False, another rank writes it."""
        return True

    @property
    def restores(self) -> bool:
        """Whether this rank reads checkpoint files. If False, another rank sends their contents to this rank."""
        return True

    @property
    def has_followers(self) -> bool:
        """Whether this rank alone reads checkpoint files, and sends their contents to other ranks."""
        return False

    def unchanging(self) -> contextlib.AbstractContextManager[None]:
        """A context around the reading of variables for a checkpoint: meanwhile no other rank changes variables."""
        return contextlib.nullcontext()

    def already_written(self) -> contextlib.AbstractContextManager[None]:
        """A context that makes this rank's writes to variables do nothing: another rank has written the values.

        Entered around the restoring of values on a rank that follows another rank.
        """
        return contextlib.nullcontext()

    def completed(self, path: str, restored: bool = False) -> None:
        """React to the checkpoint at `path`: it was saved whole, or, with `restored`, this rank has restored it.

        Called by: any thread.
        """

    def tell_followers(self, what: str, value: Any) -> None:
        """Send `value`, the result of the action `what` ("restored"), to the ranks that wait in `follow`."""

    def telling_failure(self, what: str) -> contextlib.AbstractContextManager[None]:
        """A context around the action `what` ("restored"). If it fails, ranks that wait in `follow` raise its error."""
        return contextlib.nullcontext()

    def follow(self, what: str) -> Any:
        """Wait for the value that another rank sends by `tell_followers`, and return it.

        Raises: the error that the other rank met; RuntimeError if all ranks take part, because none of them sends.
        """
        raise RuntimeError(
            f"{what}: all ranks of this strategy take part, so there is no rank to follow"
        )
