"""Saving what a training program needs to go on, and restoring it, on any number of ranks."""

from mpistrat.checkpoint.checkpoint import Checkpoint
from mpistrat.checkpoint.checkpoint_manager import CheckpointManager

__all__ = ["Checkpoint", "CheckpointManager"]


def __dir__() -> list[str]:
    return __all__
