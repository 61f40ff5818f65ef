"""ClusterCoordinator over MPI: rank 0 is the chief, the last rank has the variables, those between are workers."""

import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI

import mpistrat as ms
from mpistrat.coordinator import ClusterCoordinator
from mpistrat.coordinator import experimental_get_current_worker_index as get_worker_index

pytestmark = pytest.mark.mpi(min_size=3)
WORKERS = MPI.COMM_WORLD.size - 2


def on_chief(program: Callable[[Any, ClusterCoordinator], None]) -> None:
    try:
        strategy = ms.ParameterServerStrategy(num_ps=1)
    except SystemExit:
        return
    try:
        program(strategy, ClusterCoordinator(strategy))
    finally:
        strategy.shutdown()


def test_every_closure_is_counted_once() -> None:
    def program(strategy: Any, coordinator: ClusterCoordinator) -> None:
        with strategy.scope():
            count = ms.Variable(0)
        with pytest.raises(RuntimeError, match="give them to ClusterCoordinator"):
            strategy.replica()
        for _ in range(500):
            coordinator.schedule(lambda: count.assign_add(1))
        coordinator.join()
        assert int(count) == 500

    on_chief(program)


def test_large_arguments_and_results() -> None:
    """Of more bytes than a pipe holds, while nobody else sends anything."""

    def program(strategy: Any, coordinator: ClusterCoordinator) -> None:
        values = [
            coordinator.schedule(lambda x: x + 1, args=(np.full(1_000_000, i, "float32"),))
            for i in range(2 * WORKERS)
        ]
        for i, value in enumerate(values):
            got = value.fetch()
            assert got.shape == (1_000_000,)
            assert np.all(got == i + 1)

    on_chief(program)


def test_options_of_datasets_do_nothing_and_say_so() -> None:
    def program(strategy: Any, coordinator: ClusterCoordinator) -> None:
        per_replica = ms.InputOptions(
            experimental_replication_mode=ms.InputReplicationMode.PER_REPLICA
        )
        with pytest.raises(NotImplementedError, match="PER_REPLICA"):
            strategy.distribute_datasets_from_function(lambda context: [1], per_replica)
        with pytest.raises(TypeError, match="InputOptions"):
            strategy.experimental_distribute_dataset([1], "options")
        with pytest.warns(UserWarning, match="InputOptions of a ParameterServerStrategy does no"):
            strategy.experimental_distribute_dataset([1], ms.InputOptions())

    on_chief(program)


def large_argument(coordinator: ClusterCoordinator) -> None:
    for _ in range(2 * WORKERS):
        coordinator.schedule(len, args=(np.zeros(6 << 20, np.uint8),))


def large_result(coordinator: ClusterCoordinator) -> None:
    for _ in range(2 * WORKERS):
        coordinator.schedule(np.zeros, args=(6 << 20,))


@pytest.mark.parametrize("schedule", [large_argument, large_result])
def test_the_end_while_more_than_a_pipe_holds_is_under_way(schedule: Any) -> None:
    on_chief(lambda strategy, coordinator: schedule(coordinator))
    MPI.COMM_WORLD.Barrier()  # workers and servers have left


def test_variables_travel_by_reference() -> None:
    def program(strategy: Any, coordinator: ClusterCoordinator) -> None:
        with strategy.scope():
            variable = ms.Variable(np.zeros(3, "float32"))

        def step(variable: Any) -> Any:
            variable.assign_add([1.0, 2.0, 3.0])
            return variable, strategy is ms.get_strategy()

        returned, in_scope = coordinator.schedule(step, args=(variable,)).get()
        assert in_scope
        assert returned.numpy().tolist() == variable.numpy().tolist() == [1, 2, 3]

    on_chief(program)


def test_variables_are_not_made_in_closures() -> None:
    def program(strategy: Any, coordinator: ClusterCoordinator) -> None:
        with pytest.raises(ValueError, match=r"made on worker \d .*inside a scheduled function"):
            coordinator.schedule(lambda: ms.Variable(1.0) and None).get()
        with pytest.raises(ValueError, match="scheduled function"):
            coordinator.join()
        assert coordinator.schedule(lambda: 5).get() == 5

    on_chief(program)


def test_errors_of_the_programs_own_classes() -> None:
    class OfProgram(Exception):
        def __init__(self, first: int, second: int) -> None:
            super().__init__(f"{first} and {second}")

    def broken() -> None:
        raise OfProgram(1, 2)

    def program(strategy: Any, coordinator: ClusterCoordinator) -> None:
        with pytest.raises(OfProgram, match="1 and 2") as caught:
            coordinator.schedule(broken).get()
        assert "on worker" in str(caught.value.__cause__)
        with pytest.raises(OfProgram):
            coordinator.join()

    on_chief(program)


def test_each_worker_shuffles_differently() -> None:
    random.seed(7)
    np.random.seed(7)
    torch.manual_seed(7)

    def make() -> Any:
        drawn = random.sample(range(1000), 1000), np.random.permutation(1000).tolist()
        loader = torch.utils.data.DataLoader(range(1000), batch_size=None, shuffle=True)
        return [get_worker_index(), *drawn, list(loader)]

    def slowly(iterator: Any) -> list[Any]:
        time.sleep(0.1)  # for others to take the next one
        return list(iterator)

    def program(strategy: Any, coordinator: ClusterCoordinator) -> None:
        dataset = coordinator.create_per_worker_dataset(make)
        orders: dict[int, list[list[int]]] = {}
        while len(orders) < WORKERS:
            values = [coordinator.schedule(slowly, args=(iter(dataset),)) for _ in range(WORKERS)]
            orders.update({worker: of_worker for worker, *of_worker in coordinator.fetch(values)})
        for of_one in zip(*orders.values(), strict=True):
            assert all(sorted(order) == list(range(1000)) for order in of_one)
            assert len({tuple(order) for order in of_one}) == WORKERS

    on_chief(program)


def test_scheduling_after_the_end() -> None:
    def program(strategy: Any, coordinator: ClusterCoordinator) -> None:
        strategy.shutdown()
        with pytest.raises(ms.errors.UnavailableError, match="shut down"):
            coordinator.schedule(lambda: 1)

    on_chief(program)
