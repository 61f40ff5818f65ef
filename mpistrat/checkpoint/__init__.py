"""Saves the state of a training program, and restores it on any number of ranks."""

from typing import TYPE_CHECKING

from mpistrat.machine.first_use import load_on_first_use

if TYPE_CHECKING:
    from mpistrat.checkpoint.checkpoint import Checkpoint as Checkpoint
    from mpistrat.checkpoint.checkpoint_manager import CheckpointManager as CheckpointManager
else:
    __getattr__, __dir__, __all__ = load_on_first_use(__name__)
