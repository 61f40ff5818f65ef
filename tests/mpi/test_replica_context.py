"""`all_reduce`, `all_gather` and `merge_call` inside `run`, over ranks of one and of two replicas."""

import numpy as np
import pytest
import torch
from mpi4py import MPI

import mpistrat as ms
from support.rank_errors import assert_all_raise, assert_usable, errors_of_ranks

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
LAST = SIZE - 1
every_library = pytest.mark.parametrize("make", [np.array, torch.tensor], ids=["numpy", "torch"])


@pytest.fixture(scope="module", params=[1, 2], ids=["k=1", "k=2"])
def strategy(request):
    return ms.MultiWorkerMirroredStrategy(devices=[f"cpu:{i}" for i in range(request.param)])


def on_each_replica(strategy, function):
    """`function(context, i)` on replica i; what this rank's replicas returned."""

    def call():
        context = ms.get_replica_context()
        return function(context, context.replica_id_in_sync_group)

    return strategy.experimental_local_results(strategy.run(call))


def triangle(n):
    return n * (n - 1) // 2


def test_replicas_are_numbered_over_the_ranks(strategy):
    k = strategy.extended.num_local_replicas
    assert strategy.num_replicas_in_sync == SIZE * k
    ids = on_each_replica(strategy, lambda context, i: (i, context.num_replicas_in_sync))
    assert ids == tuple((RANK * k + j, SIZE * k) for j in range(k))
    assert on_each_replica(strategy, lambda context, i: context.devices) == tuple(
        (f"cpu:{j}",) for j in range(k)
    )


@every_library
def test_all_reduce(strategy, make):
    n = strategy.num_replicas_in_sync

    def replica(context, i):
        total = context.all_reduce(ms.ReduceOp.SUM, make([float(i), 1.0]))
        return total.tolist(), context.all_reduce("mean", make([2.0 * i])).tolist()

    assert set(map(str, on_each_replica(strategy, replica))) == {
        str(([float(triangle(n)), float(n)], [n - 1.0]))
    }


def test_all_reduce_of_a_structure(strategy):
    n = strategy.num_replicas_in_sync

    def replica(context, i):
        # Filled in another order by every other replica
        value = {"x": [np.ones(2) * i, i], "y": torch.tensor(1.5), "z": ()}
        value = dict(reversed(value.items())) if i % 2 else value
        return context.all_reduce("sum", value)

    for total in on_each_replica(strategy, replica):
        assert total["x"][0].tolist() == [triangle(n)] * 2
        assert total["x"][1] == triangle(n)
        assert type(total["x"][1]) is int
        assert total["y"] == torch.tensor(1.5 * n)
        assert total["z"] == ()


def test_packing_does_not_change_results(strategy):
    n = strategy.num_replicas_in_sync

    def replica(context, i):
        values = [np.full((2, j), float(i + j), "f4") for j in range(6)]
        values[3] = values[3].astype("f8")
        sums = [
            context.all_reduce("sum", values, ms.CommunicationOptions(bytes_per_pack=b))
            for b in (0, 1, 40)
        ]
        return [[v.tolist() for v in s] for s in sums]

    expected = [[[float(triangle(n) + n * j)] * j] * 2 for j in range(6)]
    for sums in on_each_replica(strategy, replica):
        assert sums == [expected] * 3


def test_results_belong_to_each_replica(strategy):
    def replica(context, i):
        total = context.all_reduce("sum", np.ones(3))
        total += i  # must be nobody else's array
        return total.tolist()

    n = strategy.num_replicas_in_sync
    results = on_each_replica(strategy, replica)
    first = RANK * len(results)
    assert results == tuple([n + first + j] * 3 for j in range(len(results)))


def test_all_reduce_of_sparse_rows(strategy):
    n = strategy.num_replicas_in_sync

    def replica(context, i):
        return context.all_reduce("sum", ms.IndexedSlices(np.ones((1, 2)) * i, np.array([i])))

    for total in on_each_replica(strategy, replica):
        assert total.indices.tolist() == list(range(n))
        assert total.values[:, 1].tolist() == list(range(n))


@every_library
def test_all_gather(strategy, make):
    n = strategy.num_replicas_in_sync

    def replica(context, i):
        rows = context.all_gather(make([[i, 7]] * (i + 1)), axis=0)
        both = context.all_gather({"a": make([[i]]), "b": make([1.0])}, axis=-1)
        return rows.tolist(), both["a"].tolist(), both["b"].tolist()

    rows = [[i, 7] for i in range(n) for _ in range(i + 1)]
    for result in on_each_replica(strategy, replica):
        assert result == (rows, [list(range(n))], [1.0] * n)


def test_gradients_go_back_through_all_reduce_and_all_gather(strategy):
    n = strategy.num_replicas_in_sync
    with torch.enable_grad():
        x = torch.ones(2, requires_grad=True)

        def replica(context, i):
            total = context.all_reduce("sum", x * (i + 1))
            joined = context.all_gather(x * (i + 1), axis=0)
            loss = total.sum() * (i + 1) + joined.sum()
            (gradient,) = torch.autograd.grad(loss, x)
            return gradient.tolist()

        gradients = on_each_replica(strategy, replica)
    k = len(gradients)
    # Of the sum: every replica's upstream gradient, i + 1, times what x was multiplied by
    expected = [(j + 1) * (triangle(n + 1) + n) for j in range(RANK * k, RANK * k + k)]
    assert gradients == tuple([float(e)] * 2 for e in expected)


def test_merge_call_sees_the_replicas_of_its_rank(strategy):
    k = strategy.extended.num_local_replicas

    def merge(merged_strategy, value, shared):
        assert merged_strategy is strategy
        assert ms.in_cross_replica_context()
        local = merged_strategy.experimental_local_results(value)
        total = merged_strategy.reduce("sum", value, axis=None)
        return len(local), float(total), shared

    n = strategy.num_replicas_in_sync
    results = on_each_replica(strategy, lambda c, i: c.merge_call(merge, (np.float32(i), "same")))
    assert results == ((k, triangle(n), "same"),) * k


def test_a_context_is_refused_outside_its_run(strategy):
    context = strategy.experimental_local_results(strategy.run(ms.get_replica_context))[0]
    with pytest.raises(RuntimeError, match=r"all_reduce was called on the context of replica"):
        context.all_reduce("sum", np.ones(1))
    with pytest.raises(RuntimeError, match="ask get_replica_context"):
        context.all_gather(np.ones(1), axis=0)
    assert_usable(strategy)


# One replica's mistake is every rank's error


@pytest.fixture(scope="module")
def pair():
    """Two replicas per rank: what one of them does wrong, other replicas and other ranks must learn of."""
    return ms.MultiWorkerMirroredStrategy(devices=["cpu:0", "cpu:1"])


def ones(context):
    return context.all_reduce("sum", np.ones(3))


WRONG = {
    "op": ("ValueError", lambda c: c.all_reduce("most", np.ones(3))),
    "object": ("TypeError", lambda c: c.all_reduce("sum", object())),
    "None": ("TypeError", lambda c: c.all_reduce("sum", None)),
    "bool": ("InvalidArgumentError", lambda c: c.all_reduce("sum", np.ones(3, bool))),
    "options": ("TypeError", lambda c: c.all_reduce("sum", np.ones(3), "fast")),
    "gather axis": ("ValueError", lambda c: c.all_gather(np.ones(3), axis=1)),
    "gather axis type": ("ValueError", lambda c: c.all_gather(np.ones(3), axis=None)),
    "gather scalar": ("ValueError", lambda c: c.all_gather(np.float32(1), axis=0)),
    "gather object": ("TypeError", lambda c: c.all_gather(object(), axis=0)),
    "gather slices": (
        "NotImplementedError",
        lambda c: c.all_gather(ms.IndexedSlices(np.ones((1, 2)), np.zeros(1, int)), axis=0),
    ),
}


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("wrong", WRONG)
def test_one_rank_s_call_is_wrong(pair, wrong):
    error, call = WRONG[wrong]

    def replica(context, i):
        return (call if RANK == LAST else ones)(context)

    assert_all_raise(error, LAST, lambda: on_each_replica(pair, replica))
    assert_usable(pair)


DIFFERENT = {
    "op": lambda c: c.all_reduce("mean", np.ones(3)),
    "shape": lambda c: c.all_reduce("sum", np.ones(4)),
    "dtype": lambda c: c.all_reduce("sum", np.ones(3, "f4")),
    "structure": lambda c: c.all_reduce("sum", [np.ones(3)]),
    "gather": lambda c: c.all_gather(np.ones(3), axis=0),
    "nothing": lambda c: None,
}


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("different", DIFFERENT)
def test_calls_that_differ_between_ranks(pair, different):
    def replica(context, i):
        (DIFFERENT[different] if RANK == LAST else ones)(context)

    def calls():
        on_each_replica(pair, replica)
        pair.extended.communicator.barrier(label="after")

    errors = errors_of_ranks(calls)
    assert {name for name, _, _ in errors} == {"CollectiveMismatchError"}, errors
    assert_usable(pair)


@pytest.mark.parametrize("different", ["op", "shape", "dtype", "structure"])
def test_calls_that_differ_between_the_replicas_of_one_rank(pair, different):

    def replica(context, i):
        return (DIFFERENT[different] if i == 2 * SIZE - 1 else ones)(context)

    assert_all_raise("InvalidArgumentError", LAST, lambda: on_each_replica(pair, replica))
    assert_usable(pair)


def test_sums_of_equal_tensors_are_the_programs_own(strategy):
    """A list of them is copied at once; each result can be written to, also by what needs a gradient."""
    values = [torch.full((2, 3), 1.0 + i) for i in range(4)]

    def summed(context, _):
        totals = context.all_reduce("sum", values)
        totals[0].mul_(torch.ones(3, requires_grad=True))
        return totals

    for totals in on_each_replica(strategy, summed):
        assert totals[0].requires_grad
        for value, total in zip(values, totals, strict=True):
            assert torch.equal(total, strategy.num_replicas_in_sync * value)
