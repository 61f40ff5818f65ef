"""Optimizer steps outside `run`, on 3 ranks: rank 0 tells what each step of a local model warns of, and where."""

import gc
import sys
import warnings

import torch
from mpi4py import MPI

import mpistrat as ms
from mpistrat.cluster_resolver import MPIClusterResolver


def step_a_local_model(what: str) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
    if MPI.COMM_WORLD.rank == 0:
        for warning in caught:
            print(f"{what}: {warning.message} at {warning.filename}")
        print(f"{what}: {len(caught)} warnings")


def with_parameter_servers() -> None:
    try:
        strategy = ms.ParameterServerStrategy(num_ps=1)
    except SystemExit:  # of servers and workers, at the end
        return
    step_a_local_model("with servers")
    strategy.shutdown()


def mirrored_and_local() -> None:
    strategy = ms.MultiWorkerMirroredStrategy(gradients="sum")
    with strategy.scope():
        model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    strategy.run(lambda: model(torch.ones(1, 2)).sum().backward())
    optimizer.step()  # outside run, by gradients that are equal on all ranks
    strategy.run(optimizer.step)
    step_a_local_model("beside a mirrored one")


def main(first: str) -> None:
    if first == "all":
        step_a_local_model("no strategy")
        single = ms.OneDeviceStrategy("cpu:0")
        alone = MPIClusterResolver(MPI.COMM_SELF)
        several = ms.MultiWorkerMirroredStrategy(alone, devices=["cpu:0", "cpu:1"])
        step_a_local_model(f"{single} and {several}, of one rank")
        with_parameter_servers()
        mirrored_and_local()
        gc.collect()
    strategy = ms.MultiWorkerMirroredStrategy()
    if first == "all":
        single.run(step_a_local_model, args=("inside the run of another",))
    step_a_local_model(f"{strategy} forgotten")
    step_a_local_model("forgotten again")


if __name__ == "__main__":
    main(sys.argv[1])
