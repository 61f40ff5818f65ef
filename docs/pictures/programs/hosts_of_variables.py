"""Each rank that trains prints a line of JSON: where three strategies keep its weights."""

import json
from typing import Any

import torch
from mpi4py import MPI

import mpistrat as ms
from mpistrat.cluster_resolver import MPIClusterResolver

RANK = MPIClusterResolver().topology().rank


def shared_file(tensor: torch.Tensor) -> str | None:
    """The inode of the file that holds the tensor's memory; None without a file: the memory is this process's alone."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            addresses, _, _, _, inode = line.split()[:5]
            begin, end = (int(address, 16) for address in addresses.split("-"))
            if begin <= tensor.data_ptr() < end:
                return inode if inode != "0" else None
    raise RuntimeError("the tensor is in no memory of this process")


def of_weights(strategy: ms.Strategy) -> dict[str, Any]:
    """The device of this rank's weights, and the ranks that have the same memory."""
    with strategy.scope():
        model = torch.nn.Linear(100, 10)
    files = MPI.COMM_WORLD.allgather(shared_file(model.weight))
    mine = files[RANK]
    sharing = [rank for rank, file in enumerate(files) if file is not None and file == mine]
    return {"device": str(model.weight.device), "shared by": sharing}


def main() -> None:
    found: dict[str, Any] = {"rank": RANK}
    for make in (ms.MultiWorkerMirroredStrategy, ms.CentralStorageStrategy):
        found[make.__name__] = of_weights(make())
    strategy = ms.compat.v1.ParameterServerStrategy(num_ps=1)  # the server stays in here
    with strategy.scope():
        variable = ms.Variable(torch.zeros(1000))
    resolver = strategy.cluster_resolver
    found["ParameterServerStrategy"] = {
        "task": f"{resolver.task_type} {resolver.task_id}",
        "device": variable.device,
    }
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
