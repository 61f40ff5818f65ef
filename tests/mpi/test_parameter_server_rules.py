"""What TensorFlow's strategies with parameter servers have as rules, over MPI."""

import warnings

import numpy as np
import pytest
from mpi4py import MPI

import mpistrat as ms
from mpistrat.compat.v1 import ParameterServerStrategy
from mpistrat.experimental.partitioners import FixedShardsPartitioner
from support.parameter_servers.remote_jobs import strategy_on_servers, workers_of

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
pytestmark = pytest.mark.mpi(min_size=2)


def made(num_ps=1, **keywords):
    return strategy_on_servers(lambda: ParameterServerStrategy(num_ps=num_ps, **keywords))


def variable(strategy, value, **keywords):
    with strategy.scope():
        return ms.Variable(value, **keywords)


@pytest.mark.mpi(min_size=3)
def test_run_and_reduce_on_the_chief_warn() -> None:
    with strategy_on_servers(lambda: ms.ParameterServerStrategy(num_ps=1)) as strategy:
        if strategy is None:
            return
        with pytest.warns(RuntimeWarning, match="run works on the chief here") as warned:
            assert strategy.run(lambda: 3) == 3
        assert warned[0].filename == __file__
        with pytest.warns(RuntimeWarning, match="reduce works on the chief here") as warned:
            assert strategy.reduce("SUM", 3.0, axis=None) == 3
        assert warned[0].filename == __file__

        def in_a_function() -> int:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                current = ms.get_strategy()
                return int(current.reduce("SUM", current.run(lambda: 3), axis=None))

        coordinator = ms.coordinator.ClusterCoordinator(strategy)
        assert coordinator.schedule(in_a_function).fetch() == 3


def test_functions_of_shard_info() -> None:
    asked = []

    def first(shard_info):
        asked.append(shard_info)
        return np.full(shard_info.shape, shard_info.offset[0], "float32")

    def keyword_only(*, shard_info=None):
        return first(shard_info)

    with made(variable_partitioner=FixedShardsPartitioner(3)) as strategy:
        if strategy is None:
            return
        v = variable(strategy, first, shape=(7, 4), dtype="float32")
        assert v.numpy()[:, 0].tolist() == [0, 0, 0, 3, 3, 5, 5]
        if strategy.extended.makes_variables:
            assert asked == [((3, 4), (0, 0)), ((2, 4), (3, 0)), ((2, 4), (5, 0))]
        other = variable(strategy, keyword_only, shape=(7,), dtype="float32")
        assert other.numpy().tolist() == [0, 0, 0, 3, 3, 5, 5]
        strategy.extended.variables.partitioner = None
        whole = variable(strategy, first, shape=(2, 2), dtype="float32")
        assert not whole.numpy().any()


@pytest.mark.mpi(min_size=3)
@pytest.mark.parametrize("make", [ParameterServerStrategy, ms.ParameterServerStrategy])
def test_workers_with_different_numbers_of_devices(make) -> None:
    """The server's do not count."""
    devices = ["cpu:0", "cpu:1"] if RANK == 0 else None
    with pytest.raises(ValueError, match=r"same number of devices, got 2 on rank 0, 1 on rank 1"):
        make(num_ps=1, devices=devices)


def test_a_server_has_as_many_devices_as_it_likes() -> None:
    with made(devices=["cpu:0", "cpu:1"] if RANK == SIZE - 1 else None) as strategy:
        assert strategy is None or strategy.num_replicas_in_sync == 1


def test_update_needs_a_variable() -> None:
    with made() as strategy:
        if strategy is None:
            return
        with strategy.scope():
            for wrong in (3, np.zeros(2), "v", None):
                with pytest.raises(ValueError, match="update needs a variable, got"):
                    strategy.extended.update(wrong, lambda v: v)
            v = ms.Variable(2.0)
            assert strategy.extended.update(v, lambda variable_of_update: variable_of_update is v)


def test_reduce_to_the_device_of_another_worker() -> None:
    with made() as strategy:
        if strategy is None:
            return
        own = strategy.extended.job.roles.task_id
        other = f"/job:worker/replica:0/task:{own + 1}/device:CPU:0"
        with strategy.scope():
            with pytest.raises(
                ValueError, match=f"another worker: '{other}'; this is worker {own}"
            ):
                strategy.extended.reduce_to("SUM", np.ones(1), other)
            with pytest.raises(
                ValueError, match=f"another worker: '{other}'; this is worker {own}"
            ):
                strategy.extended.batch_reduce_to("SUM", [(np.ones(1), other)])
            for fine in ("cpu:0", f"/job:worker/task:{own}/cpu:0", "/job:ps/task:0/device:CPU:0"):
                assert strategy.extended.reduce_to("SUM", np.ones(1), fine) == 1


@pytest.mark.mpi(min_size=3)
def test_variables_beside_another_use_no_turn() -> None:
    with made(2 if SIZE > 3 else SIZE - 1) as strategy:
        if strategy is None:
            return
        first, second = variable(strategy, 1.0), variable(strategy, 2.0)
        assert first.device != second.device
        colocated = []
        with strategy.scope():
            with strategy.extended.colocate_vars_with(second):
                colocated += [ms.Variable(3.0), ms.Variable(4.0)]
                with strategy.extended.colocate_vars_with(first):
                    colocated += [ms.Variable(5.0)]
                colocated += [ms.Variable(6.0)]
            third = ms.Variable(7.0)
        assert [v.device for v in colocated] == [
            second.device,
            second.device,
            first.device,
            second.device,
        ]
        assert third.device == first.device
        assert [float(v.numpy()) for v in (*colocated, third)] == [3, 4, 5, 6, 7]


@pytest.mark.mpi(min_size=3)
def test_parts_beside_those_of_another() -> None:
    with made(SIZE - 1, variable_partitioner=FixedShardsPartitioner(2)) as strategy:
        if strategy is None:
            return
        number = variable(strategy, 1.0)  # so that the parts do not begin at the first server
        whole = variable(strategy, np.zeros(4))
        with strategy.scope():
            with strategy.extended.colocate_vars_with(whole):
                slots = ms.Variable(np.ones(4))
            with strategy.extended.colocate_vars_with(number):
                together = ms.Variable(np.ones(4))
        devices = [part.device for part in whole.variables]
        assert len(set(devices)) == 2
        assert [part.device for part in slots.variables] == devices
        assert {part.device for part in together.variables} == {number.device}
        workers_of(strategy).Barrier()
        assert slots.numpy().tolist() == together.numpy().tolist() == [1] * 4
