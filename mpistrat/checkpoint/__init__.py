"""Saves the state of a training program, and restores it on any number of ranks."""

from typing import TYPE_CHECKING

from mpistrat.machine.first_use import load_on_first_use

if TYPE_CHECKING:
    from mpistrat.checkpoint.checkpoint import Checkpoint
    from mpistrat.checkpoint.checkpoint_manager import CheckpointManager
else:
    __getattr__, __dir__ = load_on_first_use(__name__)

__all__ = ["Checkpoint", "CheckpointManager"]
