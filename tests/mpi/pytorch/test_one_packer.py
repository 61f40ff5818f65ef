"""Whatever is fused into few messages goes through `cross_device_ops.packing`."""

import numpy as np
import pytest
import torch
from mpi4py import MPI

import mpistrat as ms
from mpistrat.cross_device_ops import packing

pytestmark = pytest.mark.mpi(min_size=2)

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size


class Taken(Exception):
    """The packer was asked."""


def all_reduce_of_a_structure(strategy, model):
    def step():
        return ms.get_replica_context().all_reduce("sum", [np.ones(2), np.ones(3)])

    strategy.run(step)


def backward(strategy, model):
    strategy.run(lambda: model[0](torch.ones(2, 3)).sum().backward())


def average_of_float_buffers(strategy, model):
    strategy.run(lambda: model[1](torch.ones(2, 4) * (RANK + 1)))
    model.state_dict()


def broadcast_of_whole_numbers(strategy, model):
    strategy.run(lambda: model[1].num_batches_tracked.add_(RANK + 1))
    model.state_dict()


def mirror(strategy, model):
    strategy.mirror(model)


PATHS = {
    all_reduce_of_a_structure: "unpack",
    backward: "pieces_of",
    average_of_float_buffers: "unpack",
    broadcast_of_whole_numbers: "unpack",
    mirror: "group_by_size",
}


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.__name__)
def test_every_path(path, deterministic, monkeypatch):
    strategy = ms.MultiWorkerMirroredStrategy(
        comm=MPI.COMM_WORLD.Dup(), gradients="sum", deterministic=deterministic
    )
    with strategy.scope():
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    path(strategy, model)  # it works

    def taken(*args):
        raise Taken

    monkeypatch.setattr(packing, PATHS[path], taken)
    with pytest.raises(Taken):
        path(strategy, model)


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_structure_of_several_dtypes_takes_a_message_for_each(deterministic):
    strategy = ms.MultiWorkerMirroredStrategy(deterministic=deterministic)
    context_calls = strategy.extended.communicator.contract
    values = {
        f"{i}": (np.full(2, RANK + i), torch.full((3,), float(RANK + i)), np.float32(RANK))
        for i in range(20)
    }
    before = context_calls.calls
    total = strategy.run(lambda: ms.get_replica_context().all_reduce("sum", values))
    assert context_calls.calls == before + 3
    ranks = SIZE * (SIZE - 1) // 2
    for i in range(20):
        whole, tensor, single = total[f"{i}"]
        assert whole.tolist() == [SIZE * i + ranks] * 2
        assert tensor.tolist() == [SIZE * i + ranks] * 3
        assert single == ranks
