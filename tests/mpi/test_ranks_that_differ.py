"""What one rank does otherwise than the others is an error on all of them, or makes no difference."""

import os
import threading
import time

import numpy as np
import pytest
import torch
from mpi4py import MPI

import mpistrat as ms
from mpistrat.communicators.construction import communicator_for
from mpistrat.errors import CollectiveMismatchError

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
several_ranks = pytest.mark.mpi(min_size=2)


def trainer(strategy):
    with strategy.scope():
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(skip):
        if skip:
            return
        optimizer.zero_grad()
        model(torch.ones(3, 2)).sum().backward()
        optimizer.step()

    return step


@several_ranks
def test_gradients_rules_that_differ():
    with pytest.raises(CollectiveMismatchError, match="gradients='mean'"):
        ms.MultiWorkerMirroredStrategy(gradients="mean" if RANK == 0 else "sum")


def test_threads_chosen_on_one_rank_only(monkeypatch):
    if RANK == 0:
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
    else:
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    strategy = ms.MultiWorkerMirroredStrategy()
    assert strategy.reduce("sum", 1, axis=None) == SIZE


@several_ranks
def test_steps_skipped_on_different_ranks():
    """As many backwards on each rank, but of different steps: they must not be added up."""
    strategy = ms.MultiWorkerMirroredStrategy(gradients="sum")
    step = trainer(strategy)
    strategy.run(step, (False,))

    def two_steps():
        for i in range(2):
            strategy.run(step, ((RANK == 0) == (i == 0),))

    with pytest.raises(CollectiveMismatchError, match="same step"):
        two_steps()


def test_a_loss_averaged_in_an_evaluation_chooses_no_rule():
    strategy = ms.MultiWorkerMirroredStrategy(devices=["cpu:0", "cpu:1"])
    with torch.no_grad():
        strategy.run(lambda: ms.compute_average_loss(torch.ones(2), global_batch_size=4))
    with pytest.raises(RuntimeError, match="summed or averaged"):
        strategy.run(trainer(strategy), (False,))


def test_a_parameter_unfrozen_later_must_be_mirrored():
    strategy = ms.MultiWorkerMirroredStrategy(devices=["cpu:0", "cpu:1"], gradients="sum")
    stranger = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    with strategy.scope():
        model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD([*model.parameters(), stranger], lr=0.1)
    strategy.run(optimizer.step)
    stranger.requires_grad_(True)
    with pytest.raises(RuntimeError, match="never mirrored"):
        strategy.run(optimizer.step)


class Cache(torch.nn.Module):
    """A buffer that the forward replaces by one of the batch's length."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(1, 1)
        self.register_buffer("positions", torch.zeros(1))

    def forward(self, x):
        self.positions = torch.arange(float(len(x)))
        return self.linear(x + self.positions[:, None])


def test_a_buffer_of_the_batch_s_length_is_left_alone():
    strategy = ms.MultiWorkerMirroredStrategy(devices=["cpu:0", "cpu:1"], gradients="sum")
    with strategy.scope():
        model = Cache()

    def step():
        length = 1 + ms.get_replica_context().replica_id_in_sync_group
        model(torch.ones(length, 1)).sum().backward()
        return len(model.positions)

    lengths = strategy.experimental_local_results(strategy.run(step))
    assert list(lengths) == [2 * RANK + 1, 2 * RANK + 2]


@several_ranks
def test_floats_of_eight_bits():
    strategy = ms.MultiWorkerMirroredStrategy()
    ones = torch.ones(3).to(torch.float8_e4m3fn)
    total = strategy.run(lambda: ms.get_replica_context().all_reduce("sum", ones))
    assert total.float().tolist() == [float(SIZE)] * 3


@several_ranks
def test_a_dtype_that_mpi_does_not_know():
    strategy = ms.MultiWorkerMirroredStrategy()
    halves = torch.ones(2, dtype=torch.complex32)
    with pytest.raises(TypeError, match="complex32"):
        strategy.run(lambda: ms.get_replica_context().all_reduce("sum", halves))


@several_ranks
def test_a_forked_child_must_not_communicate():
    communicator = communicator_for(MPI.COMM_WORLD)
    child = os.fork()
    if child == 0:
        try:
            communicator.barrier()
        except RuntimeError as error:
            os._exit(0 if "forked child" in str(error) else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    communicator.barrier()


@several_ranks
def test_two_threads_at_once():
    """Rank 0's second thread is refused while its first waits for the other ranks."""
    communicator = communicator_for(MPI.COMM_WORLD)
    total = np.ones(1)
    if RANK == 0:
        first = threading.Thread(target=communicator.all_reduce, args=(total,))
        first.start()
        while communicator.contract.waiting_in is None:
            time.sleep(0.001)
        with pytest.raises(RuntimeError, match="second thread"):
            communicator.barrier()
        MPI.COMM_WORLD.barrier()
        first.join()
    else:
        MPI.COMM_WORLD.barrier()
        communicator.all_reduce(total)
    assert total.tolist() == [SIZE]
