"""Training whose DataLoader has workers, of which rank 1 is killed: `elastic_workers.py`, on every rank.

Prints the sum of all examples that counted. Nothing of MPI is imported here: workers import this file.
"""

import os
import signal
import sys

import torch

import mpistrat as ms

EXAMPLES, BATCH = 48, 6
WORKERS = 1


def train(elastic: ms.fault_tolerance.Elastic) -> float:
    strategy = elastic.strategy()
    rank = elastic.comm.rank if elastic.comm is not None else 0
    with strategy.scope():
        total = ms.Variable(torch.zeros(()))
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(torch.arange(EXAMPLES) ** 2), BATCH, num_workers=WORKERS
    )
    batches = strategy.experimental_distribute_dataset(loader)
    elastic.restore(ms.checkpoint.Checkpoint(total=total, batches=batches))
    for (examples,) in batches:
        if elastic.step == 3 and rank == 1 and elastic.comm.size == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        total.assign_add(strategy.reduce("sum", examples.sum().float(), axis=None))
        elastic.commit()
    assert elastic.step == EXAMPLES // BATCH
    return float(total.read_value())


if __name__ == "__main__":
    sys.stdout.write(f"{ms.fault_tolerance.run_elastic(train)}\n")
