"""Scopes and runs of strategies over ranks, the strategies of one rank beside them, and the v1 face."""

import numpy as np
import pytest
import torch
from mpi4py import MPI

import mpistrat as ms
from mpistrat.compat import v1
from support.rank_errors import assert_usable

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
KINDS = {
    "mirrored": lambda: ms.MirroredStrategy(),
    "mirrored k=2": lambda: ms.MirroredStrategy(["cpu:0", "cpu:1"]),
    "multi_worker": lambda: ms.MultiWorkerMirroredStrategy(),
    "central_storage": lambda: ms.CentralStorageStrategy(),
    "central_storage k=2": lambda: ms.CentralStorageStrategy(["cpu:0", "cpu:1"]),
    "one_device": lambda: ms.OneDeviceStrategy("cpu:0"),
}


@pytest.fixture(scope="module", params=KINDS)
def strategy(request):
    return KINDS[request.param]()


def context_here():
    return ms.has_strategy(), ms.in_cross_replica_context(), ms.get_strategy()


def test_contexts(strategy):
    assert context_here()[:2] == (False, False)
    with strategy.scope() as entered:
        assert entered is strategy
        assert context_here() == (True, True, strategy)
        with strategy.scope():
            assert context_here() == (True, True, strategy)
    inside = strategy.run(lambda: (ms.has_strategy(), ms.in_cross_replica_context()))
    for flags in strategy.experimental_local_results(inside):
        assert flags == (True, False)
    assert context_here()[:2] == (False, False)


def test_the_same_program_on_every_strategy(strategy):
    n = strategy.num_replicas_in_sync
    with strategy.scope():
        weight = ms.Variable(np.array([2.0]), aggregation=ms.VariableAggregation.MEAN)

    def step(x):
        weight.assign_add(x)
        return weight.read_value() * 1

    result = strategy.run(step, args=(np.array([1.0]),))
    assert strategy.reduce("mean", result, axis=None).tolist() == [3.0]
    assert weight.numpy().tolist() == [3.0]
    assert n == strategy.extended.num_local_replicas * strategy.extended.communicator.size


def test_run_passes_each_replica_its_own_component(strategy):
    made = strategy.experimental_distribute_values_from_function(
        lambda context: {"id": context.replica_id_in_sync_group}
    )
    ids = strategy.run(
        lambda x, same, *, y: (x["id"], same, y["id"]), args=(made, "same"), kwargs={"y": made}
    )
    first, k = strategy.extended.first_replica_id, strategy.extended.num_local_replicas
    x, same, y = ids
    assert strategy.experimental_local_results(x) == tuple(range(first, first + k))
    assert strategy.experimental_local_results(y) == tuple(range(first, first + k))
    assert same == "same"


def test_misuse_is_an_error_at_once(strategy):
    other = ms.OneDeviceStrategy("cpu:0")
    with strategy.scope():
        with pytest.raises(RuntimeError, match="mixed"):
            other.run(lambda: None)
        with pytest.raises(RuntimeError, match="mixed"), other.scope():
            pass
        with pytest.raises(RuntimeError, match="mixed"):
            other.reduce("sum", np.ones(1), axis=None)

    def enter_scope():
        with strategy.scope():
            pass

    for misuse, call in [
        (lambda: strategy.run(lambda: None), "run was called inside run"),
        (lambda: strategy.reduce("sum", np.ones(1), axis=None), "merge_call"),
        (lambda: strategy.gather(np.ones(1), axis=0), "merge_call"),
        (enter_scope, r"scope\(\) was entered inside run"),
    ]:
        with pytest.raises(RuntimeError, match=call):
            strategy.run(misuse)
    assert context_here()[:2] == (False, False)
    assert_usable(strategy)


def test_an_exception_leaves_the_contexts_as_they_were(strategy):
    def fails():
        raise KeyError("mine")

    for _ in range(2):
        with pytest.raises(KeyError, match="mine"):
            strategy.run(fails)
    with pytest.raises(KeyError), strategy.scope():
        fails()
    assert context_here()[:2] == (False, False)
    assert_usable(strategy)


def test_a_variable_belongs_to_its_strategy(strategy):
    with strategy.scope():
        variable = ms.Variable(1.0)
    assert strategy.extended.variable_created_in_scope(variable)
    if isinstance(variable, ms.DistributedValues):
        with ms.OneDeviceStrategy("cpu:0").scope(), pytest.raises(RuntimeError, match="mixed"):
            variable.assign(2.0)


def test_a_set_strategy_stays_in_force(strategy):
    ms.experimental_set_strategy(strategy)
    try:
        assert context_here() == (True, True, strategy)
        ms.experimental_set_strategy(strategy)
        variable = ms.Variable(3.0)
        assert strategy.extended.variable_created_in_scope(variable)
        assert_usable(strategy)
    finally:
        ms.experimental_set_strategy(None)
    assert context_here()[:2] == (False, False)
    with strategy.scope(), pytest.raises(RuntimeError, match="outside every scope"):
        ms.experimental_set_strategy(strategy)


def test_strategies_of_one_rank_do_not_communicate():
    if RANK == 0:  # the others do nothing
        for strategy in (
            ms.OneDeviceStrategy("cpu:0"),
            ms.get_strategy(),
        ):
            n = strategy.num_replicas_in_sync
            total = strategy.reduce("sum", strategy.run(lambda: np.ones(2)), axis=None)
            assert total.tolist() == [n, n]


def test_torch_values_stay_on_this_rank_s_autograd_graph_inside_run():
    strategy = ms.MultiWorkerMirroredStrategy()
    x = torch.ones(2, requires_grad=True)
    inside = strategy.run(lambda: x * 3)
    assert inside.requires_grad
    assert not strategy.reduce("sum", inside, axis=None).requires_grad


V1 = {
    "mirrored": lambda: v1.MirroredStrategy(["cpu:0", "cpu:1"]),
    "multi_worker": lambda: v1.experimental.MultiWorkerMirroredStrategy(),
    "one_device": lambda: v1.OneDeviceStrategy("cpu:0"),
}


@pytest.mark.parametrize("kind", V1)
def test_the_v1_face(kind):
    strategy = V1[kind]()
    n = strategy.num_replicas_in_sync
    value = strategy.experimental_run_v2(lambda: np.ones(2))
    assert strategy.reduce("sum", value).tolist() == [n, n]  # axis is optional there
    assert len(strategy.unwrap(value)) == strategy.extended.num_local_replicas
    batches = iter([np.ones(1), np.ones(1) * 2])
    strategy.experimental_run(lambda x: x, batches)
    second = strategy.experimental_run(lambda x: x, batches)
    assert float(strategy.unwrap(second)[0][0]) == 2
    with strategy.scope():
        variable = ms.Variable(1.0)
        with strategy.colocate_vars_with(variable):
            pass
    assert v1.get_loss_reduction() is ms.ReduceOp.SUM
