"""Workers that train by themselves save checkpoints: `parameter_server_saving.py KILLS`, on every rank.

So many workers are killed, each when it has saved; the others go on. Or nobody is, with KILLS 0: they restore, and say
what.
"""

import faulthandler
import os
import signal
import sys
import time

import numpy as np

import mpistrat as ms

SECONDS_FOR_STACKS = 60.0  # less than the test waits
STEPS_BETWEEN = 5


class Counter:
    def __init__(self) -> None:
        self.steps = 0

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


def main(kills: int) -> None:
    faulthandler.dump_traceback_later(SECONDS_FOR_STACKS, exit=True)
    strategy = ms.compat.v1.ParameterServerStrategy(num_ps=1)
    resolver = strategy.cluster_resolver
    assert resolver is not None
    worker = resolver.task_id
    assert worker is not None
    own = Counter()
    with strategy.scope():
        done = ms.Variable(np.zeros(3, "int64"), name="done")
        checkpoint = ms.checkpoint.Checkpoint(done=done, own=own)
    manager = ms.checkpoint.CheckpointManager(checkpoint, "checkpoints")
    manager.restore_or_initialize()
    if not kills:
        print(
            f"worker {worker} goes on after {own.steps} steps, {done.numpy()[worker]}", flush=True
        )
        return
    last = f"step-{kills}"  # the first worker that is not killed saves it
    while not str(manager.latest_checkpoint).rpartition("/")[2].startswith(last):
        strategy.run(lambda: done.scatter_add(ms.IndexedSlices(np.ones(1, "int64"), [worker])))
        own.steps += 1
        time.sleep(0.002)
        if own.steps % STEPS_BETWEEN or worker > kills:
            continue
        number = 10_000_000 * worker + own.steps
        saved = manager.save(number).endswith(f"step-{number:08}")
        if saved and worker < kills:
            os.kill(os.getpid(), signal.SIGKILL)
        if saved:
            print(f"worker {worker} has saved {own.steps} steps", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
