"""Ranks that save one checkpoint after the other, and are killed meanwhile.

checkpointing.py DIRECTORY SEED: goes on from the newest checkpoint; a moment after that the ranks that the seed chooses
get SIGKILL. What is saved can be told from the number of the step.
"""

import os
import random
import subprocess
import sys

import numpy as np

import mpistrat as ms
from mpistrat.checkpoint import Checkpoint, CheckpointManager

LONGEST_LIFE = 0.3  # seconds, of saving


def content_of(step: int, rank: int) -> np.ndarray:
    """Of some odd size."""
    return np.random.default_rng([step, rank]).standard_normal(5000 + step % 7)


class OwnState:
    """What each rank writes of its own; it begins with the newest checkpoint."""

    def __init__(self, rank: int) -> None:
        self.rank, self.step = rank, 0

    def rank_state_dict(self) -> dict:
        return {"step": self.step, "content": content_of(self.step, 1 + self.rank)}

    def load_rank_state_dicts(self, states) -> None:
        for rank, state in states.items():
            assert state["content"].tobytes() == content_of(state["step"], 1 + rank).tobytes()
        self.step = states[self.rank]["step"]


class CommonState:
    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict:
        return {"step": self.step, "content": content_of(self.step, 0)}

    def load_state_dict(self, state: dict) -> None:
        assert state["content"].tobytes() == content_of(state["step"], 0).tobytes()
        self.step = state["step"]


def main() -> None:
    directory, seed = sys.argv[1], int(sys.argv[2])
    strategy = ms.MultiWorkerMirroredStrategy()
    rank, size = strategy.extended.communicator.rank, strategy.extended.communicator.size
    own, common = OwnState(rank), CommonState()
    with strategy.scope():
        manager = CheckpointManager(Checkpoint(own=own, common=common), directory, keep=2)
    manager.restore_or_initialize()
    assert own.step == common.step

    choice = random.Random(seed)
    seconds = choice.uniform(0, LONGEST_LIFE)
    if choice.randrange(size + 1) in (rank, size):  # one of them, or all
        command = f"sleep {seconds}; kill -9 {os.getpid()}"
        subprocess.Popen(["sh", "-c", command], start_new_session=True)
    while True:
        own.step = common.step = own.step + 1
        manager.save(own.step, wait=own.step % 3 == 0)


if __name__ == "__main__":
    main()
