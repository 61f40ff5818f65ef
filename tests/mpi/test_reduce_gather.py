"""`Strategy.reduce` and `gather` over ranks: closed forms of the replica's number, and errors on every rank."""

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


def per_replica(strategy, function):
    """`function(i)` on replica i, i counted over all ranks."""
    return strategy.run(lambda: function(ms.get_replica_context().replica_id_in_sync_group))


def triangle(n):
    return n * (n - 1) // 2


@every_library
def test_sum_and_mean(strategy, make):
    n = strategy.num_replicas_in_sync
    value = per_replica(strategy, lambda i: make([float(i), 1.0]))
    total = strategy.reduce(ms.ReduceOp.SUM, value, axis=None)
    assert type(total) is type(make([1.0]))
    assert total.tolist() == [triangle(n), n]
    assert strategy.reduce("mean", value, axis=None).tolist() == [(n - 1) / 2, 1]


def test_python_numbers_stay_numbers(strategy):
    n = strategy.num_replicas_in_sync
    numbers = per_replica(strategy, lambda i: i)
    assert strategy.reduce("sum", numbers, axis=None) == triangle(n)
    assert type(strategy.reduce("sum", numbers, axis=None)) is int
    # Equal numbers may be one object; they count once per replica all the same
    assert strategy.reduce("sum", per_replica(strategy, lambda i: 3), axis=None) == 3 * n


@every_library
def test_the_mean_of_integers_is_floating(strategy, make):
    n = strategy.num_replicas_in_sync
    mean = strategy.reduce("mean", per_replica(strategy, lambda i: make([i, 1])), axis=None)
    assert mean.tolist() == ([(n - 1) / 2, 1.0] if n > 1 else [0, 1])


@every_library
def test_a_mean_over_an_axis_weighs_uneven_batches(strategy, make):
    n = strategy.num_replicas_in_sync
    value = per_replica(strategy, lambda i: make([float(i)] * i))  # replica 0's batch is empty
    sum_of_squares = sum(i * i for i in range(n))
    assert float(strategy.reduce("sum", value, axis=0)) == sum_of_squares
    mean = float(strategy.reduce("mean", value, axis=0))
    assert mean == pytest.approx(sum_of_squares / triangle(n)) if n > 1 else np.isnan(mean)


def test_a_structure_is_one_message_and_keeps_its_shape(strategy):
    n = strategy.num_replicas_in_sync
    value = per_replica(
        strategy, lambda i: {"b": [np.ones(2) * i, np.int32(i)], "a": (np.ones((2, 1), "f4"),)}
    )
    total = strategy.reduce("sum", value, axis=None)
    assert list(total) == ["b", "a"]
    assert total["b"][0].tolist() == [triangle(n)] * 2
    assert int(total["b"][1]) == triangle(n)
    assert total["a"][0].tolist() == [[n], [n]]


@pytest.mark.parametrize(
    "make",
    [
        lambda i: np.arange(6.0).reshape(2, 3).T + i,
        lambda i: np.asfortranarray(
            np.arange(6.0).reshape(3, 2) * 0 + [[0, 3], [1, 4], [2, 5]] + i
        ),
        lambda i: (torch.arange(6.0).reshape(2, 3) + i).T,
        lambda i: np.repeat(np.arange(6.0).reshape(2, 3).T + i, 2, axis=0)[::2],
        lambda i: torch.arange(6.0).reshape(2, 3).repeat_interleave(2, 1)[:, ::2].T + i,
    ],
    ids=["transposed", "fortran", "torch transposed", "strided", "torch strided"],
)
def test_memory_layout_does_not_matter(strategy, make):
    n = strategy.num_replicas_in_sync
    value = per_replica(strategy, make)
    expected = [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
    total = strategy.reduce("sum", value, axis=None)
    assert total.tolist() == [[n * x + triangle(n) for x in row] for row in expected]
    gathered = strategy.gather(value, axis=1)
    assert tuple(gathered.shape) == (3, 2 * n)
    assert gathered[:, -2:].tolist() == [[x + n - 1 for x in row] for row in expected]


def test_operands_are_not_written_to(strategy):
    operand = np.arange(3.0)
    operand.flags.writeable = False
    total = strategy.reduce("sum", per_replica(strategy, lambda i: operand[:]), axis=None)
    again = strategy.reduce("sum", per_replica(strategy, lambda i: operand + 0), axis=None)
    assert operand.tolist() == [0, 1, 2]
    assert again.tolist() == [
        0.0,
        strategy.num_replicas_in_sync,
        2.0 * strategy.num_replicas_in_sync,
    ]
    assert total is not operand or strategy.num_replicas_in_sync == 1


def test_results_are_the_caller_s_own(strategy):
    """A later reduction must not write into what an earlier one returned, large or small."""
    for elements in (3, 50_000):
        results = [
            strategy.reduce(
                "sum", per_replica(strategy, lambda i, e=elements, v=v: np.full(e, v)), None
            )
            for v in range(6)
        ]
        n = strategy.num_replicas_in_sync
        assert [int(r[-1]) for r in results] == [v * n for v in range(6)]


def test_scalars_and_empty_arrays(strategy):
    n = strategy.num_replicas_in_sync
    total = strategy.reduce("sum", per_replica(strategy, lambda i: np.float32(i)), axis=None)
    assert (np.ndim(total), float(total), total.dtype) == (0, triangle(n), np.float32)
    empty = strategy.reduce("sum", per_replica(strategy, lambda i: np.ones((0, 2))), axis=None)
    assert empty.shape == (0, 2)


def test_dtypes_survive(strategy):
    n = strategy.num_replicas_in_sync
    for dtype in ("int8", "uint8", "int64", "float16", "complex64"):
        total = strategy.reduce(
            "sum", per_replica(strategy, lambda i, d=dtype: np.array([1, 2], d)), axis=None
        )
        assert (total.dtype, total.tolist()) == (dtype, [n, 2 * n])
    value = per_replica(strategy, lambda i: torch.tensor([0.5, i], dtype=torch.bfloat16))
    total = strategy.reduce("sum", value, axis=None)
    assert (total.dtype, total.tolist()) == (torch.bfloat16, [n / 2, triangle(n)])


NARROW = {"int8": 100, "uint8": 200, "int16": 30_000, "int32": 2**31 - 1}
POLICIES = {
    "none": lambda: ms.MultiWorkerMirroredStrategy(devices=["cpu:0", "cpu:1"]),
    "deterministic": lambda: ms.MultiWorkerMirroredStrategy(deterministic=True),
    "one device": lambda: ms.MirroredStrategy(
        ["cpu:0", "cpu:1"], cross_device_ops=ms.ReductionToOneDevice()
    ),
    "one replica": lambda: ms.OneDeviceStrategy("cpu"),
}


def dtype_of(make, name):
    return np.dtype(name) if make is np.array else getattr(torch, name)


@every_library
@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("policy", POLICIES)
def test_narrow_integers_are_added_up_in_int64(policy, dtype, make):
    """A mean has the dtype of every mean of integers, and a sum that fits has the operands' dtype."""
    strategy, number, kind = POLICIES[policy](), NARROW[dtype], dtype_of(make, dtype)
    value = make([number, 1], dtype=kind)
    mean_of_replica = strategy.run(lambda: ms.get_replica_context().all_reduce("mean", value))
    values = strategy.run(lambda: value)
    means = [
        strategy.experimental_local_results(mean_of_replica)[0],
        strategy.reduce("mean", values, axis=None),
        strategy.extended.reduce_to("mean", values, "cpu:0"),
        strategy.extended.batch_reduce_to("mean", [(values, "cpu:0")])[0],
    ]
    for mean in means:
        assert mean.tolist() == make([number, 1.0], dtype=mean.dtype).tolist()
        assert str(mean.dtype).endswith("float64" if dtype == "int32" else "float32")
    rows = strategy.run(lambda: make([[1, number]] * 300, dtype=kind))
    over_rows = strategy.reduce("mean", rows, axis=0)
    assert over_rows.tolist() == make([1.0, number], dtype=over_rows.dtype).tolist()
    small = strategy.reduce("sum", strategy.run(lambda: make([2, 1], dtype=kind)), axis=0)
    assert (small.dtype, int(small)) == (kind, 3 * strategy.num_replicas_in_sync)


@every_library
@pytest.mark.parametrize("dtype", NARROW)
def test_a_sum_that_its_dtype_cannot_hold_is_an_error_on_all_ranks(strategy, dtype, make):
    n, number = strategy.num_replicas_in_sync, NARROW[dtype]
    rows = strategy.run(lambda: make([number] * 3, dtype=dtype_of(make, dtype)))
    for axis, terms in ((0, 3 * n), (None, n))[: 1 + (n > 1)]:
        errors = errors_of_ranks(lambda axis=axis: strategy.reduce("sum", rows, axis=axis))
        assert {name for name, _, _ in errors} == {"InvalidArgumentError"}
        words = f"a sum of {dtype} values", f"magnitude {terms * number},", "Convert the values"
        assert all(word in text for _, text, _ in errors for word in words)
    assert_usable(strategy)


def test_the_read_of_a_sum_that_its_dtype_cannot_hold(strategy):
    n, on_read = strategy.num_replicas_in_sync, ms.VariableSynchronization.ON_READ
    with strategy.scope():
        seen = ms.Variable(
            np.int8(0), synchronization=on_read, aggregation=ms.VariableAggregation.SUM
        )
    strategy.run(lambda: seen.assign_add(np.int8(-100)))
    errors = errors_of_ranks(seen.read_value)
    assert {name for name, _, _ in errors} == {"InvalidArgumentError" if n > 1 else ""}


def test_sums_of_other_unsigned_integers_wrap_around(strategy):
    """As checksums do."""
    n = strategy.num_replicas_in_sync
    for dtype in ("uint16", "uint32", "uint64"):
        bits = 8 * np.dtype(dtype).itemsize
        value = strategy.run(lambda dtype=dtype, bits=bits: np.array([2**bits - 1], dtype))
        assert strategy.reduce("sum", value, axis=None).tolist() == [(2**bits - n) % 2**bits]


def masked(i=0):
    return np.ma.array([1.0, 100.0, 3.0], mask=[False, True, False])


MASKED_CALLS = {
    "sum over an axis": lambda s: s.reduce("sum", masked(), axis=0),
    "greatest over an axis": lambda s: s.reduce("max", masked(), axis=0),
    "variable": lambda s: ms.Variable(masked()),
    "assign": lambda s: ms.Variable(np.zeros(3)).assign(masked()),
    "assign to a tensor": lambda s: ms.Variable(torch.zeros(3)).assign(masked()),
    "loss": lambda s: s.run(lambda: ms.compute_average_loss(masked())),
    "rows": lambda s: ms.IndexedSlices(masked(), [0, 1, 2]),
}
MASKED_CALLS_OF_REPLICAS = {
    "sum": lambda s: s.reduce("sum", per_replica(s, masked), axis=None),
    "greatest": lambda s: s.reduce("max", per_replica(s, masked), axis=None),
    "all": lambda s: s.gather(per_replica(s, masked), axis=0),
    "sum in a replica": lambda s: s.run(
        lambda: ms.get_replica_context().all_reduce("sum", {"loss": masked()})
    ),
    "all in a replica": lambda s: s.run(lambda: ms.get_replica_context().all_gather(masked(), 0)),
}


@pytest.mark.parametrize("call", {**MASKED_CALLS, **MASKED_CALLS_OF_REPLICAS})
def test_a_masked_array_is_an_error_on_all_ranks(strategy, call):
    """One replica needs no copy elsewhere, so that it keeps the mask."""
    of_replicas = MASKED_CALLS_OF_REPLICAS.get(call)
    if of_replicas is not None and strategy.num_replicas_in_sync == 1:
        result = of_replicas(strategy)
        kept = result["loss"] if isinstance(result, dict) else result
        assert kept.mask.tolist() == masked().mask.tolist()
        return
    errors = errors_of_ranks(lambda: {**MASKED_CALLS, **MASKED_CALLS_OF_REPLICAS}[call](strategy))
    assert {name for name, _, _ in errors} == {"TypeError"}
    words = "masked array", "float64[3] with 1 masked", "array.filled("
    assert all(word in text for _, text, _ in errors for word in words)
    assert_usable(strategy)


def test_reduce_detaches(strategy):
    value = per_replica(strategy, lambda i: torch.ones(2, requires_grad=True) * 2)
    assert not strategy.reduce("sum", value, axis=None).requires_grad
    assert not strategy.reduce("mean", value, axis=0).requires_grad


def test_sparse_rows_are_put_one_after_the_other(strategy):
    n = strategy.num_replicas_in_sync
    value = per_replica(
        strategy, lambda i: ms.IndexedSlices(np.full((i + 1, 2), 1.0), np.full(i + 1, i), (n, 2))
    )
    total = strategy.reduce("sum", value, axis=None)
    assert total.indices.tolist() == [i for i in range(n) for _ in range(i + 1)]
    assert total.values.shape == (triangle(n + 1), 2)
    if n > 1:
        assert strategy.reduce("mean", value, axis=None).values[0, 0] == pytest.approx(1 / n)


@every_library
def test_sparse_rows_are_gathered_as_dense_ones(strategy, make):
    n = strategy.num_replicas_in_sync

    def rows(i):
        return ms.IndexedSlices(make([[i + 1.0], [5.0]]), make([i % 2, 1]), (2, 1))

    expected = [row for i in range(n) for row in ([[i + 1], [5]], [[0], [i + 6]])[i % 2]]
    assert strategy.gather(per_replica(strategy, rows), axis=0).tolist() == expected
    error = "NotImplementedError" if strategy.extended.num_local_replicas > 1 else "ValueError"
    without_shape = ms.IndexedSlices(make([[1.0]]), make([0]))
    errors = errors_of_ranks(lambda: strategy.gather(without_shape, axis=0))
    assert [name for name, _, _ in errors] == [error] * SIZE


@every_library
def test_gather_of_uneven_shapes(strategy, make):
    n = strategy.num_replicas_in_sync
    value = per_replica(strategy, lambda i: make([[float(i), 1.0]] * (i + 1))[:i])
    gathered = strategy.gather(value, axis=0)
    assert gathered.tolist() == [[i, 1] for i in range(n) for _ in range(i)]
    columns = strategy.gather(per_replica(strategy, lambda i: make([[i] * (i + 1)])), axis=-1)
    assert columns.tolist() == [[i for i in range(n) for _ in range(i + 1)]]


def test_gather_of_a_structure_and_of_booleans(strategy):
    n = strategy.num_replicas_in_sync
    value = per_replica(strategy, lambda i: {"x": np.array([i]), "ok": np.array([i > 0])})
    gathered = strategy.gather(value, axis=0)
    assert gathered["x"].tolist() == list(range(n))
    assert gathered["ok"].tolist() == [i > 0 for i in range(n)]


def test_local_results_are_this_rank_s(strategy):
    k = strategy.extended.num_local_replicas
    value = per_replica(strategy, lambda i: i)
    assert strategy.experimental_local_results(value) == tuple(range(RANK * k, (RANK + 1) * k))
    made = strategy.experimental_distribute_values_from_function(
        lambda context: (context.replica_id_in_sync_group, context.num_replicas_in_sync)
    )
    assert strategy.experimental_local_results(made) == tuple(
        (i, strategy.num_replicas_in_sync) for i in range(RANK * k, (RANK + 1) * k)
    )


def test_one_object_of_all_replicas_of_a_rank():
    """It is not distributed: over ranks it counts once for each, as recorded; in one process it is no sum."""
    pair = ms.MultiWorkerMirroredStrategy(devices=["cpu:0", "cpu:1"])
    shared = np.ones(2)
    same = pair.run(lambda: shared)
    assert same is shared
    for reduce in (pair.reduce, lambda *a: pair.extended.reduce_to(*a[:2], "cpu:0")):
        if SIZE > 1:
            assert reduce("sum", same, None).tolist() == [SIZE, SIZE]
        else:
            with pytest.raises(ValueError, match="SUM needs a value per replica"):
                reduce("sum", same, None)
        assert reduce("mean", same, None).tolist() == [1, 1]
        assert reduce("sum", np.zeros(2), None).tolist() == [0, 0]
    assert_usable(pair)


# What only one rank does wrong is everybody's error, and nobody hangs


@pytest.fixture(scope="module")
def pair():
    """Two replicas per rank: what one replica's rank does wrong, other ranks must learn of."""
    return ms.MultiWorkerMirroredStrategy(devices=["cpu:0", "cpu:1"])


def ones(i):
    return np.ones(3)


WRONG_OPERANDS = {
    "object": ("TypeError", lambda i: object()),
    "string": ("TypeError", lambda i: f"loss {i}"),
    "None": ("TypeError", lambda i: None),
    "bool": ("InvalidArgumentError", lambda i: np.ones(3, bool)),
}
WRONG_CALLS = {
    "op": ("ValueError", lambda s, v: s.reduce("most", v, axis=None)),
    "axis out of range": ("ValueError", lambda s, v: s.reduce("sum", v, axis=7)),
    "axis of a wrong type": ("ValueError", lambda s, v: s.reduce("sum", v, axis="rows")),
    "mirrored": ("AssertionError", lambda s, v: s.reduce("sum", ms.Mirrored([1.0] * 9), None)),
    "gather axis": ("ValueError", lambda s, v: s.gather(v, axis=7)),
    "gather axis type": ("ValueError", lambda s, v: s.gather(v, axis=None)),
    "gather scalar": ("ValueError", lambda s, v: s.gather(np.float32(1), axis=0)),
    "gather object": ("TypeError", lambda s, v: s.gather(object(), axis=0)),
    "gather slices": (
        "NotImplementedError",
        lambda s, v: s.gather(ms.IndexedSlices(np.ones((1, 2)), np.zeros(1, int)), axis=0),
    ),
    "destinations": ("ValueError", lambda s, v: s.extended.reduce_to("sum", v, 5)),
    "list of destinations": ("AssertionError", lambda s, v: s.extended.reduce_to("sum", v, [])),
    "pairs": ("ValueError", lambda s, v: s.extended.batch_reduce_to("sum", [v])),
    "pairs' op": ("ValueError", lambda s, v: s.extended.batch_reduce_to("most", [(v, v)])),
}


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("wrong", WRONG_OPERANDS)
def test_one_rank_s_operand_is_wrong(pair, wrong):
    error, function = WRONG_OPERANDS[wrong]
    value = per_replica(pair, function if RANK == LAST else ones)
    assert_all_raise(error, LAST, lambda: pair.reduce("sum", value, axis=None))
    assert_usable(pair)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("wrong", WRONG_CALLS)
def test_one_rank_s_call_is_wrong(pair, wrong):
    error, call = WRONG_CALLS[wrong]
    value = per_replica(pair, ones)
    right = call if RANK == 0 else lambda s, v: s.reduce("sum", v, axis=None)
    assert_all_raise(error, 0, lambda: right(pair, value))
    assert_usable(pair)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("wrong", WRONG_CALLS)
def test_all_ranks_calls_are_wrong(pair, wrong):
    """Each then raises what a single process would."""
    error, call = WRONG_CALLS[wrong]
    value = per_replica(pair, ones)
    errors = errors_of_ranks(lambda: call(pair, value))
    assert [name for name, _, _ in errors] == [error] * SIZE
    assert_usable(pair)


DIFFERENT = {
    "shape": (ones, lambda i: np.ones(4)),
    "dtype": (ones, lambda i: np.ones(3, "f4")),
    "narrow dtype": (lambda i: np.ones(3, "i1"), lambda i: np.ones(3, "i4")),
    "keys": (lambda i: {"a": np.ones(3)}, lambda i: {"b": np.ones(3)}),
    "structure": (lambda i: [np.ones(3)], lambda i: (np.ones(3),)),
    "number of leaves": (lambda i: [np.ones(3)], lambda i: [np.ones(3), np.ones(3)]),
    "sparse": (ones, lambda i: ms.IndexedSlices(np.ones((3, 1)), np.arange(3))),
}


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("difference", DIFFERENT)
def test_operands_that_differ_between_ranks(pair, difference):
    usual, odd = DIFFERENT[difference]
    value = per_replica(pair, odd if RANK == LAST else usual)
    errors = errors_of_ranks(lambda: pair.reduce("sum", value, axis=None))
    assert {name for name, _, _ in errors} == {"CollectiveMismatchError"}, errors
    assert_usable(pair)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("usual", "odd"),
    [
        (lambda s, v: s.reduce("sum", v, None), lambda s, v: s.reduce("mean", v, None)),
        (lambda s, v: s.reduce("sum", v, 0), lambda s, v: s.reduce("sum", v, 1)),
        (lambda s, v: s.reduce("sum", v, 0), lambda s, v: s.reduce("mean", v, 0)),
        (lambda s, v: s.reduce("sum", v, None), lambda s, v: s.gather(v, 0)),
        (lambda s, v: s.gather(v, 0), lambda s, v: s.gather(v, 1)),
        (lambda s, v: s.gather({"a": v}, 0), lambda s, v: s.gather({"b": v}, 0)),
        (lambda s, v: s.gather([v], 0), lambda s, v: s.gather([v, v], 0)),
        (lambda s, v: None, lambda s, v: s.reduce("sum", v, None)),
    ],
    ids=["op", "axis", "op over axis", "collective", "gather axis", "keys", "leaves", "missing"],
)
def test_calls_that_differ_between_ranks(pair, usual, odd):
    value = per_replica(pair, lambda i: np.ones((2, 2)))

    def calls():
        (odd if RANK == LAST else usual)(pair, value)
        pair.extended.communicator.barrier(label="after")

    errors = errors_of_ranks(calls)
    assert {name for name, _, _ in errors} == {"CollectiveMismatchError"}, errors
    assert_usable(pair)


@pytest.mark.mpi(min_size=2)
def test_gather_of_shapes_that_do_not_join_names_them(pair):
    value = per_replica(pair, lambda i: np.ones((1, 2 + (RANK == LAST))))
    errors = errors_of_ranks(lambda: pair.gather(value, axis=0))
    assert {name for name, _, _ in errors} == {"InvalidArgumentError"}
    assert all("[1, 3]" in message or "[2, 3]" in message for _, message, _ in errors)
    assert_usable(pair)
