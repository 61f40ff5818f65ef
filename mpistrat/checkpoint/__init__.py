"""Saving what a training program needs to go on, and restoring it, on any number of ranks."""

from mpistrat.checkpoint.checkpoint import Checkpoint as Checkpoint
from mpistrat.checkpoint.checkpoint_manager import CheckpointManager as CheckpointManager
