"""A checkpoint that an earlier version has saved on two ranks is restored, on any number of ranks."""

import json
import shutil
from pathlib import Path

from mpistrat.checkpoint import CheckpointManager
from support.recorded_training import FOLDER, RecordedTraining


def test_a_checkpoint_of_an_earlier_version_is_restored(tmp_path: Path) -> None:
    training = RecordedTraining(seed=2)
    communicator = training.strategy.extended.communicator
    folder = communicator.broadcast_object(tmp_path, label="the folder")
    if communicator.rank == 0:
        shutil.copytree(FOLDER / "checkpoint", folder / "step-00000003")
    communicator.barrier(label="the checkpoint is copied")
    manager = CheckpointManager(training.checkpoint, folder)
    assert manager.restore_or_initialize() == str(folder / "step-00000003")
    assert training.results() == json.loads((FOLDER / "results.json").read_text())
