"""The worked examples of CONTRIBUTING: a new collective and a new transport, as the page has them."""

import re
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

from mpistrat import errors
from mpistrat.communicators.collectives.broadcast import Broadcast
from mpistrat.communicators.construction import new_communicator
from mpistrat.communicators.contract.contract import Contract
from mpistrat.communicators.reduction import reducing
from mpistrat.communicators.router import Router, Transports
from mpistrat.communicators.transports.mpi import MpiTransport

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
PAGE = Path(__file__).parents[2] / "CONTRIBUTING.md"


def example(heading, monkeypatch):
    """The names that the example below a heading defines."""
    section = PAGE.read_text().split(f"### {heading}\n")[1]
    (code, *_) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    monkeypatch.setattr(MpiTransport, "moves", MpiTransport.moves)  # the example sets it anew
    names = {"__name__": "example"}
    exec(compile(code, PAGE.name, "exec"), names)
    return names


@pytest.mark.mpi(min_size=2)
def test_a_new_collective(monkeypatch):
    scan = example("A new collective", monkeypatch)["Scan"]
    communicator = new_communicator(WORLD.Dup())
    values = np.full(3, RANK + 1.0)
    communicator.make(scan(values))
    assert values.tolist() == [sum(range(RANK + 2))] * 3
    many = np.full(1 << 18, RANK + 1.0)
    communicator.all_reduce(np.zeros(1 << 18))  # measures, once
    for transport in communicator.transports.preferred:
        transport.borders = [0]  # of larger buffers, an all-reduce goes through memory
    communicator.make(scan(many, reducing(scale=0.5)))
    assert (many == 0.5 * sum(range(RANK + 2))).all()
    with pytest.raises(errors.CollectiveMismatchError, match="scan"):
        communicator.make(scan(np.ones(3 + RANK)))
    with pytest.raises(TypeError, match="MPI cannot scan float16"):
        communicator.make(scan(np.ones(3, np.float16)))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("length", [127, 128])
def test_a_new_transport(monkeypatch, length):
    chain = example("A new transport", monkeypatch)["ChainTransport"]
    mpi = MpiTransport(WORLD.Dup())
    communicator = Router(Transports(mpi, [chain(mpi)]), Contract(mpi, "tests"))
    moved = []

    def broadcast(transport, collective):
        moved.append(collective)
        chain.broadcast(transport, collective)

    monkeypatch.setattr(chain, "moves", {Broadcast: broadcast})
    root = SIZE - 1
    values = np.full(length, RANK)
    communicator.broadcast(values, root)
    assert (values == root).all()
    assert len(moved) == (values.nbytes >= 1024)
    assert communicator.explain().startswith("broadcasts from rank to rank")
