"""Trains a small model to the end, however often the job is ended on the way: it goes on from its checkpoint.

Usage: preempted.py FOLDER STEPS SECONDS_PER_STEP [requeue] [margin=SECONDS] [workers] [SIGHUP] [replica]
With "replica" the loop stays where it is: nothing is called but the loader.
Each rank appends what it does to FOLDER/rank<r>: "start <steps restored>", "step <number>", "end". At the end rank 0
writes the parameters to FOLDER/final.npy. Once there is a FOLDER/hurry, steps take no longer than they must.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

import mpistrat as ms

folder, steps, seconds = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
margin = [float(text.removeprefix("margin=")) for text in sys.argv[4:] if "margin=" in text]
EXAMPLES_PER_STEP = 12


def main() -> None:
    strategy = ms.MultiWorkerMirroredStrategy(gradients="sum")
    torch.manual_seed(1)
    with strategy.scope():
        model = torch.nn.Sequential(
            torch.nn.Linear(5, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1)
        )
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        examples = np.random.default_rng(2).random((7 * EXAMPLES_PER_STEP, 5), np.float32)
        data: Any = ms.input.BatchedDataset(examples, EXAMPLES_PER_STEP, shuffle=True)
        if "workers" in sys.argv:
            data = DataLoader(examples, EXAMPLES_PER_STEP, shuffle=True, num_workers=2)
        distributed = strategy.experimental_distribute_dataset(data)
        checkpoint = ms.checkpoint.Checkpoint(model=model, optimizer=optimizer, data=distributed)
    usual = ms.experimental.TerminationConfig()
    config = ms.experimental.TerminationConfig(
        signals=[*usual.signals, *(["SIGHUP"] if "SIGHUP" in sys.argv else [])],
        requeue="requeue" in sys.argv,
        margin=margin[0] if margin else usual.margin,
    )
    handler = ms.experimental.PreemptionCheckpointHandler(
        strategy.cluster_resolver, checkpoint, folder / "checkpoints", config
    )
    rank = strategy.extended.communicator.rank
    log = os.open(folder / f"rank{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(text: str) -> None:
        os.write(log, f"{text}\n".encode())

    def step(x: Any) -> None:
        if not (folder / "hurry").exists():
            time.sleep(seconds)
        optimizer.zero_grad()
        model(torch.as_tensor(x)).square().sum().backward()
        optimizer.step()

    note(f"start {handler.total_run_calls}")
    if "replica" in sys.argv:
        strategy.enter_replica()
        for x in (x for _ in range(steps) for x in distributed):
            step(x)
            note(
                f"step {handler.total_run_calls + 1}"
            )  # the loader counts it when it is asked again
            if handler.total_run_calls + 1 == steps:
                break
    while "replica" not in sys.argv and handler.total_run_calls < steps:
        for x in distributed:
            handler.run(strategy.run, step, args=(x,))
            note(f"step {handler.total_run_calls}")
            if handler.total_run_calls == steps:
                break
    note("end")
    if rank == 0:
        parameters = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
        np.save(folder / "final.npy", parameters.numpy())
    print(f"rank {rank} has done {steps} steps\n", end="", flush=True)


if __name__ == "__main__":
    main()
