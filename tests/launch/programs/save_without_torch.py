"""Ranks save a NumPy variable in a program without torch: first an equal one, and then one that has drifted apart.

Argument: the directory of checkpoints. Each rank prints what its saves do.
"""

import sys

import numpy as np

import mpistrat as ms

strategy = ms.MultiWorkerMirroredStrategy()
with strategy.scope():
    weights = ms.Variable(np.zeros(3), name="weights")
manager = ms.checkpoint.CheckpointManager(ms.checkpoint.Checkpoint(weights=weights), sys.argv[1])


def step(increment: float) -> None:
    weights.assign_add(np.full(3, increment))


strategy.run(step, (1.0,))
manager.save(1)
print(f"rank {strategy.rank} has saved", flush=True)
strategy.run(step, (1.0 + strategy.rank,))
try:
    manager.save(2)
except ms.errors.DivergenceError as error:
    print(f"rank {strategy.rank} says: {error}", flush=True)
assert manager.latest_checkpoint.endswith("step-00000002")
assert "torch" not in sys.modules
