"""How many calls lie between a program and its bytes: whoever reads the code, or a stack, has to go through them."""

import numpy as np
import pytest
import torch
from mpi4py import MPI

import mpistrat as ms
from mpistrat.communicators.arithmetic import arithmetic_of
from mpistrat.communicators.node.blocks import Blocks
from mpistrat.communicators.node.small_calls import SmallAllReduce
from support.frames import Frames, Watched, files_of, watching

pytestmark = pytest.mark.mpi(min_size=2)

MOST_OF_ONE_NODE = 5
MOST_OF_A_GRADIENT, MOST_FILES_OF_A_GRADIENT = 7, 5


@pytest.fixture
def strategy():
    """Over a communicator of its own, which has seen no call yet."""
    return ms.MultiWorkerMirroredStrategy(comm=MPI.COMM_WORLD.Dup(), gradients="sum")


def all_reduce(strategy, value):
    return strategy.run(lambda: ms.get_replica_context().all_reduce("sum", value))


def test_a_small_sum(strategy, monkeypatch):
    frames = Frames()
    original = SmallAllReduce.__init__

    def init(self, *args):
        original(self, *args)
        self.own = tuple(Watched(memory, frames) for memory in self.own)

    monkeypatch.setattr(SmallAllReduce, "__init__", init)
    all_reduce(strategy, np.ones(2))
    calls = frames.since("all_reduce", "replicas/replica_context.py")
    assert len(calls) <= MOST_OF_ONE_NODE, calls


def test_a_large_sum(strategy, monkeypatch):
    value = np.ones(1 << 20, np.float32)
    all_reduce(strategy, value)  # measures, once
    strategy.extended.communicator.ways.transports[0].smallest = 0
    frames = Frames()
    # Blocks are brought before the ranks meet.
    monkeypatch.setattr(Blocks, "tick", watching(Blocks.tick, frames, itself=False))
    all_reduce(strategy, value)
    calls = frames.since("all_reduce", "replicas/replica_context.py")
    assert len(calls) <= MOST_OF_ONE_NODE, calls


def test_a_gradient(strategy, monkeypatch):
    with strategy.scope():
        model = torch.nn.Linear(500, 500)

    def step():
        model(torch.ones(1, 500)).sum().backward()

    strategy.run(step)
    how, frames = arithmetic_of(torch.ones(1), "sum"), Frames()
    monkeypatch.setattr(how, "combine", watching(how.combine, frames, itself=True))
    strategy.run(step)
    assert strategy.extended.communicator.memory.window_capacity >= 500 * 501 * 4
    hook = torch.autograd.backward.__code__.co_name
    calls = frames.since(hook, "pytorch/gradients/reducer.py")
    assert len(calls) <= MOST_OF_A_GRADIENT, calls
    assert len(files_of(calls)) <= MOST_FILES_OF_A_GRADIENT, files_of(calls)
