"""Training that saves checkpoints, of which a rank is killed meanwhile: `elastic_saving.py FOLDER VICTIM STEP WHERE`.

Every second step is saved to FOLDER, in turn without waiting and waiting. The victim dies when it writes that of STEP.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterable
from typing import Any

import numpy as np
from mpi4py import MPI

import mpistrat as ms
from mpistrat.checkpoint import durable_files

STEPS = 10
folder, victim, at, where = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
me = MPI.COMM_WORLD.rank


class Step:
    """What each rank writes of its own: the step, many times over."""

    def __init__(self) -> None:
        self.step = 0

    def rank_state_dict(self) -> dict[str, Any]:
        return {"step": np.full(100_000, self.step)}

    def load_rank_state_dicts(self, states: dict[int, dict[str, Any]]) -> None:
        self.step = int(states[me]["step"][0]) if me in states else 0


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def prepare_to_die() -> None:
    write = durable_files.write
    if where == "before the note":

        def all_but_the_note(path: str, parts: Iterable[Any]) -> Any:
            if os.path.basename(path).startswith("written-by-rank-"):
                die()
            return write(path, parts)

        durable_files.write = all_but_the_note  # type: ignore[assignment]
    elif where == "before it is complete":
        durable_files.rename = die
    else:

        def half(path: str, parts: Iterable[Any]) -> Any:
            def some() -> Iterable[Any]:
                for part in parts:
                    yield memoryview(part).cast("B")[: memoryview(part).nbytes // 2]
                    die()

            return write(path, some())

        durable_files.write = half  # type: ignore[assignment]


def train(elastic: ms.fault_tolerance.Elastic) -> None:
    strategy = elastic.strategy()
    with strategy.scope():
        total, own = ms.Variable(np.zeros(100_000)), Step()
        manager = ms.checkpoint.CheckpointManager(
            ms.checkpoint.Checkpoint(total=total, own=own), folder, keep=2
        )
        # Another one: what a job saves for later need not be what it goes on from.
        elastic.restore(ms.checkpoint.Checkpoint(total=total))
    while elastic.step < STEPS:
        total.assign_add(strategy.reduce("mean", np.ones(100_000), axis=None))
        elastic.commit()
        own.step = elastic.step
        if elastic.step % 2 == 0:
            if me == victim and elastic.step == at:
                while any("checkpoint" in thread.name for thread in threading.enumerate()):
                    time.sleep(0.001)  # the save before this one
                prepare_to_die()
            manager.save(elastic.step, wait=elastic.step % 4 == 0)
    if at == STEPS and me == victim:
        manager.wait()  # it dies meanwhile; the others wait at the end of run_elastic


if __name__ == "__main__":
    ms.fault_tolerance.run_elastic(train)
