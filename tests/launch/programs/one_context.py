"""Two ranks of a node train on a simulated device each; every thread of a rank uses its rank's device.

Usage: one_context.py FOLDER, which both ranks see. Each rank prints on which devices it has opened contexts.
"""

import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from mpi4py import MPI
from torch.utils import data

import mpistrat as ms
from mpistrat.communicators.transports.accelerator import gpu_transports

sys.path.insert(0, str(Path(__file__).parents[2]))

from support.simulated_accelerator import process_group, torch_sim

SIM = torch_sim.load()
WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
gpu_transports.why_not_proven = lambda *_: "not tried"


def to_a_device(examples: list[tuple[torch.Tensor]]) -> torch.Tensor:
    """On a thread that reads ahead. The program names no number."""
    return torch.stack([row for (row,) in examples]).to("sim")


def train(folder: Path, batches_ahead: int) -> ms.Strategy:
    """Gradients leave while backward() runs; a checkpoint is written on a thread."""
    options = ms.CommunicationOptions(overlap=True)
    strategy = ms.MultiWorkerMirroredStrategy(
        comm=WORLD.Dup(), communication_options=options, gradients="sum"
    )
    with strategy.scope():
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
    examples = data.TensorDataset(torch.ones(24, 8))
    dataset = ms.input.BatchedDataset(examples, 2 * SIZE, collate_fn=to_a_device)
    ahead = ms.InputOptions(experimental_per_replica_buffer_size=batches_ahead)
    manager = ms.checkpoint.CheckpointManager(ms.checkpoint.Checkpoint(model=model), folder)
    for batch in strategy.experimental_distribute_dataset(dataset, ahead):
        assert batch.device.index == RANK
        strategy.run(lambda batch=batch: model(batch).sum().backward())
    manager.save(1, wait=False)
    manager.wait()
    return strategy


def fail(*_: Any) -> None:
    raise RuntimeError("the link is down")


def main() -> None:
    folder = Path(sys.argv[1])
    strategy = train(folder / "native", 2)
    assert strategy.extended.communicator.ordered_by_streams, strategy.extended.explain()
    shared = gpu_transports.shared_gpu
    gpu_transports.shared_gpu = lambda _: "the test says so"  # then a thread makes the calls
    assert not train(folder / "staged", 1).extended.communicator.ordered_by_streams
    gpu_transports.shared_gpu = shared
    process_group.faults.add("hang")
    if RANK == SIZE - 1:
        process_group.ProcessGroupSim.allreduce = fail  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="the link is down") if RANK else nullcontext():
        strategy.extended.communicator.all_reduce(torch.ones(3, device="sim"))
    time.sleep(0.5)  # a thread looks whether the sum is there, and hears that it will not be
    SIM.synchronize()
    print("contexts of rank", RANK, SIM.contexts(), flush=True)


if __name__ == "__main__":
    main()
