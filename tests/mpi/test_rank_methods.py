"""What a program asks its strategy: who am I, and what the ranks do together, outside, in the scope and in replicas."""

import contextlib
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from mpi4py import MPI

import mpistrat as ms
from mpistrat.compat import v1
from mpistrat.coordinator import ClusterCoordinator
from mpistrat.errors import CollectiveMismatchError
from mpistrat.liveness.records.record import LIMIT
from mpistrat.topology import Topology
from support.rank_errors import assert_usable, errors_of_ranks

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
KINDS: dict[str, Callable[[], Any]] = {
    "mirrored": ms.MirroredStrategy,
    "multi_worker k=2": lambda: ms.MultiWorkerMirroredStrategy(devices=["cpu:0", "cpu:1"]),
    "multi_worker": ms.MultiWorkerMirroredStrategy,
    "central_storage": ms.CentralStorageStrategy,
    "one_device": lambda: ms.OneDeviceStrategy("cpu:0"),
    "default": ms.get_strategy,
}


@pytest.fixture(scope="module", params=KINDS)
def strategy(request: pytest.FixtureRequest) -> Any:
    return KINDS[request.param]()


def test_everywhere(strategy: Any, capsys: pytest.CaptureFixture[str]) -> None:
    together = strategy.extended.communicator.size > 1 or SIZE == 1
    rank, size = (RANK, SIZE) if together else (0, 1)

    def ask() -> tuple[Any, ...]:
        strategy.barrier()
        shared = strategy.broadcast_object({"of": [strategy.rank, None]})
        strategy.print("epoch", 1, sep="=", file=sys.stdout)
        device = strategy.device
        assert torch.ones(1).to(device).device == device == torch.device("cpu")
        return (
            strategy.rank,
            strategy.world_size,
            strategy.local_rank,
            strategy.is_first,
            shared["of"][0],
        )

    expected: tuple[Any, ...] = (rank, size, rank, rank == 0, 0)
    assert ask() == expected
    with strategy.scope():
        assert ask() == expected
        with strategy.first_rank_first():
            pass
    for answer in strategy.run(ask):
        assert strategy.experimental_local_results(answer)[0] == expected[0]
        expected = expected[1:]
    # In a replica of several, too, it is one line.
    assert capsys.readouterr().out == "epoch=1\n" * 3 * (rank == 0)


@pytest.mark.parametrize("per_node", [False, True])
@pytest.mark.parametrize("where", ["outside", "in a replica"])
def test_the_first_rank_goes_first(per_node: bool, where: str) -> None:
    strategy = ms.MultiWorkerMirroredStrategy()

    def block() -> float:
        with strategy.first_rank_first(per_node=per_node):
            if strategy.is_first:
                time.sleep(0.1)
            return time.monotonic()

    times = WORLD.allgather(strategy.run(block) if where == "in a replica" else block())
    assert times[0] == min(times)


@pytest.mark.parametrize("error", [ValueError("no room on the disk"), SystemExit(3)])
def test_the_first_rank_fails(error: BaseException) -> None:
    strategy = ms.MultiWorkerMirroredStrategy()
    entered = []

    def block() -> None:
        with strategy.first_rank_first():
            entered.append(RANK)
            if RANK == 0:
                raise error

    if RANK == 0:
        with pytest.raises(type(error), match=str(error)):
            block()
    else:
        says = f"rank 0 failed .* which rank {RANK} does not enter: {type(error).__name__}: {error}"
        with pytest.raises(RuntimeError, match=says):
            block()
    assert entered == [0] * (RANK == 0)
    assert_usable(strategy)


def test_one_rank_of_each_node_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if each rank had a node of its own: where one fails, the others have left the block."""
    strategy = ms.MultiWorkerMirroredStrategy()
    nodes = tuple(range(SIZE))
    monkeypatch.setattr(strategy.extended, "topology", Topology(RANK, SIZE, nodes))

    def block() -> None:
        with strategy.first_rank_first(per_node=True):
            assert strategy.local_rank == 0
            if RANK == SIZE - 1:
                raise OSError("full")

    errors = errors_of_ranks(block)
    assert errors.pop()[:2] == ("OSError", "full")
    for rank, (name, message, _) in enumerate(errors):
        assert name == "RuntimeError"
        assert f"rank {SIZE - 1} failed" in message
        assert f"which rank {rank} has left: OSError: full" in message


@pytest.mark.mpi(min_size=2)
def test_what_the_first_rank_does_alone_may_take_long() -> None:
    """Longer than a collective may, unless the user has said how long that is."""
    strategy = ms.MultiWorkerMirroredStrategy()
    watch = strategy.extended.communicator.contract.watch
    assert watch is not None
    words = watch.record.words
    of_job, words[LIMIT] = words[LIMIT], int(0.3e9)
    WORLD.Barrier()
    try:
        with strategy.first_rank_first():
            if RANK == 0:
                time.sleep(1.1)
    finally:
        WORLD.Barrier()
        words[LIMIT] = of_job
    assert_usable(strategy)


@pytest.mark.mpi(min_size=2)
def test_what_ranks_do_together_they_do_in_one_order() -> None:
    strategy = ms.MultiWorkerMirroredStrategy()
    with pytest.raises(CollectiveMismatchError, match=r": broadcast_object\(\)\n") as error:
        strategy.barrier() if RANK else strategy.broadcast_object(1)
    assert ": barrier()\n" in str(error.value)
    with pytest.raises(CollectiveMismatchError, match=r"raised TypeError: cannot pickle"):
        strategy.broadcast_object(None if RANK else threading.Lock())
    with (
        pytest.raises(CollectiveMismatchError, match="first_rank_first"),
        strategy.first_rank_first(),
    ):
        strategy.barrier()
    assert_usable(strategy)


def test_where_it_is_an_error(strategy: Any) -> None:
    other = ms.OneDeviceStrategy("cpu:0")
    with other.scope(), pytest.raises(RuntimeError, match="mixed"):
        strategy.barrier()
    if strategy.extended.num_local_replicas > 1:

        def inside() -> None:
            with strategy.first_rank_first():
                pass

        with pytest.raises(RuntimeError, match="whose replicas take turns"):
            strategy.run(inside)


@pytest.mark.mpi(min_size=3)
@pytest.mark.parametrize("version", [1, 2])
def test_with_parameter_servers(version: int, capsys: pytest.CaptureFixture[str]) -> None:
    """The ranks are those that run the program: the chief and the workers; they do not wait for each other."""

    def answers(strategy: Any) -> tuple[int, int, bool]:
        strategy.print("here")
        for call in (strategy.barrier, strategy.broadcast_object, enter_first(strategy)):
            with pytest.raises(NotImplementedError, match=r"ParameterServer|BetweenGraph"):
                call()
        return strategy.rank, strategy.world_size, strategy.is_first

    with contextlib.suppress(SystemExit):
        make = v1.ParameterServerStrategy if version == 1 else ms.ParameterServerStrategy
        strategy = make(num_ps=1)
        assert answers(strategy) == (RANK, SIZE - 1, RANK == 0)
        assert capsys.readouterr().out == "here\n" * (RANK == 0)
        if version == 2:
            coordinator = ClusterCoordinator(strategy)
            rank, size, is_first = coordinator.schedule(lambda: answers(ms.get_strategy())).fetch()
            assert (1 <= rank < size, size, is_first) == (True, SIZE - 1, False)
        strategy.shutdown()


def enter_first(strategy: Any) -> Callable[[], None]:
    def call() -> None:
        with strategy.first_rank_first():
            pass

    return call
