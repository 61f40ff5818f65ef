"""How communicators are put together: one router, transports that it asks in turn, and no tower of wrappers."""

import ast
import importlib
import inspect
import pkgutil
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
from mpi4py import MPI

import mpistrat as ms
from mpistrat import communicators
from mpistrat.communicators import SUM, Communicator, collectives, router
from mpistrat.communicators.collective_calls import CollectiveCalls
from mpistrat.communicators.collectives.all_gather import AllGather
from mpistrat.communicators.collectives.all_gather_into import AllGatherInto
from mpistrat.communicators.collectives.all_reduce import AllReduce
from mpistrat.communicators.collectives.all_to_all import AllToAll
from mpistrat.communicators.collectives.broadcast import Broadcast
from mpistrat.communicators.collectives.collective import Collective
from mpistrat.communicators.collectives.reduce import Reduce
from mpistrat.communicators.collectives.reduce_scatter import ReduceScatter
from mpistrat.communicators.construction import communicator_for
from mpistrat.communicators.contract.contract import Contract
from mpistrat.communicators.local import LocalCommunicator
from mpistrat.communicators.router import Router, Transports
from mpistrat.communicators.transport import Transport, by_others
from mpistrat.communicators.transports.mpi import MpiTransport

WORLD = MPI.COMM_WORLD
SIZE = WORLD.size
PACKAGE = Path(communicators.__file__).parents[1]


@pytest.fixture(scope="module")
def transports():
    for module in pkgutil.walk_packages(communicators.__path__, "mpistrat.communicators."):
        importlib.import_module(module.name)
    importlib.import_module("mpistrat.xla.transport")
    return subclasses(Transport)


def subclasses(of):
    own = {kind for kind in of.__subclasses__() if kind.__module__.startswith("mpistrat.")}
    return own.union(*map(subclasses, own))


def test_only_the_router_is_a_communicator_of_several_ranks():
    """What moves bytes wraps none, tracing is no subclass, and neither is the check."""
    kinds = {kind for kind in subclasses(Communicator) if not issubclass(kind, Router)}
    assert kinds == {CollectiveCalls, LocalCommunicator}
    assert {kind.__module__ for kind in subclasses(Router)} <= {router.__name__}


def test_transports_have_one_signature(transports):
    """A method that moves takes the collective alone, and has its name; `by_others` stands for the slower way."""
    assert len(transports) > 10
    for kind in transports:
        for collective, move in kind.moves.items():
            assert len(inspect.signature(move).parameters) == 2, (kind, collective)
            if move is not by_others and not issubclass(collective, AllReduce):
                assert move.__name__ == collective.name, (kind, collective)


def test_mpi_moves_every_collective(transports):
    for module in pkgutil.iter_modules(collectives.__path__, f"{collectives.__name__}."):
        importlib.import_module(module.name)
    moved = {collective.name for collective in MpiTransport.moves}
    named = {getattr(collective, "name", None) for collective in subclasses(Collective)}
    assert moved == named - {None}  # `Reducing` is a base


def test_a_transport_refuses_what_it_does_not_take():
    class Nothing(Transport):
        def explain(self, rest):
            return rest

    number = np.ones(1)
    for collective in (
        AllReduce(number),
        Reduce(number, SUM),
        ReduceScatter(number, SUM, number),
        Broadcast(number),
        AllGather(number),
        AllGatherInto(number, number),
        AllToAll(number, number, (1,), (1,)),
    ):
        assert Nothing().choose(collective) is None
        with pytest.raises(TypeError, match=f"Nothing does not take {collective.name}"):
            Nothing().move(collective)
    for collective, by in (
        (Reduce(number, SUM), "all_reduce"),
        (ReduceScatter(number, SUM, number), "all_reduce"),
        (AllGatherInto(number, number), "all_gather"),
    ):
        with pytest.raises(TypeError, match=f"Nothing does not take {by}"):
            by_others(Nothing(), collective)


def imports_of(module):
    tree = ast.parse((PACKAGE / "communicators" / "transports" / f"{module}.py").read_text())
    return {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}


def test_mpi_and_the_ring_do_not_import_each_other():
    both = {
        "mpistrat.communicators.transports.ring" in imports_of("mpi"),
        "mpistrat.communicators.transports.mpi" in imports_of("ring"),
    }
    assert both == {False, True}  # the ring's messages are MPI's


def test_nothing_asks_whether_calls_are_checked():
    """By class: a communicator of one rank and one without a check are used as any other."""
    asked = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "isinstance":
                names = {n.id for n in ast.walk(node.args[1]) if isinstance(n, ast.Name)}
                if names & {"Contract", "Unchecked", "LocalCommunicator"}:
                    asked.append((path, node.lineno))
    assert asked == []


@pytest.mark.mpi(min_size=2)
def test_the_first_transport_that_takes_a_call_moves_its_bytes():
    moved = []

    class First(Transport):
        """Takes sums of float64."""

        def takes(self, collective):
            return collective.reduction.op == "sum" and collective.buffer.dtype == np.float64

        def all_reduce(self, collective):
            moved.append(collective.reduction)
            communicator.mpi.all_reduce(collective)

        moves = MappingProxyType({AllReduce: all_reduce})

        def explain(self, rest):
            return f"float64 by itself\n{rest}"

    mpi = MpiTransport(WORLD.Dup())
    communicator = Router(Transports(mpi, [First()]), Contract(mpi, "tests"))
    sums = communicators.reducing("sum", "of the first", 0.5)
    value = np.full(3, 4.0)
    communicator.all_reduce(value, sums)
    assert value.tolist() == [2.0 * SIZE] * 3
    communicator.all_reduce(np.ones(3), "max")
    communicator.all_reduce(np.ones(3, np.float32))
    communicator.broadcast(np.ones(3))
    assert moved == [sums]
    assert communicator.explain().startswith("float64 by itself\n")
    assert communicator.contract.calls == 4


@pytest.mark.mpi(min_size=2)
def test_a_call_is_checked_and_recorded_once(monkeypatch):
    """Also one that goes through several groups of ranks."""
    communicator = communicator_for(WORLD.Dup())
    communicator.all_reduce(np.ones(1 << 18))  # measures, once
    before = communicator.contract.calls
    record, entered = communicator.contract.watch.record, []
    monkeypatch.setattr(record, "enter", lambda *args: entered.append(args))
    communicator.all_reduce(np.ones(1 << 18))
    communicator.all_reduce(np.ones(2))
    communicator.broadcast(np.ones(1 << 18))
    assert communicator.contract.calls == before + 3
    assert len(entered) == 3


@pytest.mark.mpi(min_size=2)
def test_a_root_is_reported_as_a_number_whatever_its_class():
    """A rank that has given a NumPy integer, alone, must not be told from the others by that later."""
    communicator = communicator_for(WORLD)
    alone = communicator_for(WORLD.Split(WORLD.rank))
    if WORLD.rank == 0:
        alone.broadcast(np.ones(1), np.int64(0))
    for root in (np.int64(0) if WORLD.rank == 0 else 0, 0):
        communicator.broadcast(np.ones(1), root)
        communicator.reduce(np.ones(1), root)
        assert communicator.broadcast_object("x", root) == "x"


def test_a_scale_is_reported_as_a_number_whatever_its_class():
    assert communicators.reducing(scale=1).scale == 1.0
    assert repr(communicators.Reduction(scale=1).scale) == "1.0"


def test_scales_of_all_reductions():
    communicator = ms.MultiWorkerMirroredStrategy().extended.communicator
    halved = communicators.reducing(scale=0.5)
    value = np.full(2 * SIZE, 1.0)
    communicator.reduce(value, SIZE - 1, halved)
    assert value[0] == (SIZE / 2 if communicator.rank == SIZE - 1 else 1.0)
    out = np.empty(2)
    communicator.reduce_scatter(np.ones(2 * SIZE), out, halved)
    assert out.tolist() == [SIZE / 2] * 2
