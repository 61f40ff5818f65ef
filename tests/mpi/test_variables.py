"""Variables over ranks: first values, updates inside and outside `run`, and errors that all ranks raise."""

import numpy as np
import pytest
import torch
from mpi4py import MPI

import mpistrat as ms
from support.rank_errors import assert_all_raise, assert_usable, errors_of_ranks

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
LAST = SIZE - 1
SUM, MEAN = ms.VariableAggregation.SUM, ms.VariableAggregation.MEAN
FIRST, NONE = ms.VariableAggregation.ONLY_FIRST_REPLICA, ms.VariableAggregation.NONE
ON_READ = ms.VariableSynchronization.ON_READ
every_library = pytest.mark.parametrize("make", [np.array, torch.tensor], ids=["numpy", "torch"])


@pytest.fixture(scope="module", params=[1, 2], ids=["k=1", "k=2"])
def strategy(request):
    return ms.MultiWorkerMirroredStrategy(devices=[f"cpu:{i}" for i in range(request.param)])


def make_variable(strategy, *args, **kwargs):
    with strategy.scope():
        return ms.Variable(*args, **kwargs)


def replica_id():
    return ms.get_replica_context().replica_id_in_sync_group


def on_each_replica(strategy, function):
    """`function(i)` on replica i; what this rank's replicas returned."""
    value = strategy.run(lambda: function(replica_id()))
    return strategy.experimental_local_results(value)


def triangle(n):
    return n * (n - 1) // 2


@every_library
def test_the_first_rank_s_initial_value_is_everybody_s(strategy, make):
    variable = make_variable(strategy, make([float(RANK), 5.0 + RANK]))
    assert variable.numpy().tolist() == [0, 5]
    assert [v.numpy().tolist() for v in variable.values] == [[0, 5]] * len(variable.values)
    assert type(variable.read_value()) is type(make([1.0]))
    drawn = make_variable(strategy, lambda: np.random.default_rng(RANK).random(3))
    assert MPI.COMM_WORLD.allgather(drawn.numpy().tolist()) == [drawn.numpy().tolist()] * SIZE


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int8, torch.bool])
def test_initial_values_of_any_dtype(strategy, dtype):
    variable = make_variable(strategy, torch.tensor([RANK == 0, True], dtype=dtype))
    assert variable.dtype == dtype
    assert variable.read_value().tolist() == [1, 1]


@every_library
def test_updates_inside_run_are_aggregated(strategy, make):
    n = strategy.num_replicas_in_sync
    after = {SUM: triangle(n), MEAN: (n - 1) / 2, FIRST: 0.0}
    for aggregation, expected in after.items():
        variable = make_variable(strategy, make([10.0]), aggregation=aggregation)
        returned = on_each_replica(strategy, lambda i, v=variable: v.assign_add(make([float(i)])))
        assert [r.tolist() for r in returned] == [[10 + expected]] * len(returned)
        on_each_replica(strategy, lambda i, v=variable: v.assign(make([float(i)])))
        assert variable.numpy().tolist() == [expected]
        on_each_replica(strategy, lambda i, v=variable: v.assign_sub(make([float(i)])))
        assert variable.numpy().tolist() == [0]
        assert MPI.COMM_WORLD.allgather(variable.numpy().tolist()) == [[0.0]] * SIZE


def test_without_aggregation_each_replica_changes_its_own_copy(strategy):
    variable = make_variable(strategy, np.zeros(1))
    own = on_each_replica(strategy, lambda i: float(variable.assign_add(np.array([i + 1.0]))[0]))
    first = strategy.extended.first_replica_id
    assert own == tuple(first + j + 1.0 for j in range(len(own)))


def test_updates_outside_run_change_all_copies(strategy):
    variable = make_variable(strategy, np.zeros(2), aggregation=SUM)
    assert variable.assign_add([1.0, 2.0]).tolist() == [1, 2]
    assert variable.assign_sub(np.ones(2)).tolist() == [0, 1]
    assert [v.numpy().tolist() for v in variable.values] == [[0, 1]] * len(variable.values)


def test_on_read_variables_are_combined_when_read_outside_run(strategy):
    n = strategy.num_replicas_in_sync
    combined = {SUM: triangle(n), MEAN: (n - 1) / 2, FIRST: 0}
    for aggregation, expected in combined.items():
        variable = make_variable(
            strategy, np.zeros(1), synchronization=ON_READ, aggregation=aggregation
        )
        assert not variable.trainable
        on_each_replica(strategy, lambda i, v=variable: v.assign_add(np.array([float(i)])))
        assert variable.read_value().tolist() == [expected]
        mean = strategy.reduce("mean", variable, axis=None)  # of the copies, whatever it reads as
        assert mean.tolist() == ([(n - 1) / 2] if n > 1 else [expected])
        state = variable.state()
        variable.assign([n * 3.0])
        assert variable.numpy().tolist() == [n * 3]
        variable.load_state(state)
        assert variable.numpy() == pytest.approx([expected])


def test_scatter_inside_run(strategy):
    n = strategy.num_replicas_in_sync
    variable = make_variable(strategy, np.zeros((n, 2)), aggregation=SUM)
    on_each_replica(
        strategy,
        lambda i: variable.scatter_add(ms.IndexedSlices(np.full((1, 2), i + 1.0), np.array([i]))),
    )
    assert variable.numpy()[:, 0].tolist() == [i + 1 for i in range(n)]


def test_an_update_on_each_copy(strategy):
    variable = make_variable(strategy, np.ones(2))
    strategy.extended.update(variable, lambda v, x: v.assign_add(x), args=(np.array([1.0, 2.0]),))
    assert [v.numpy().tolist() for v in variable.values] == [[2, 3]] * len(variable.values)


def test_made_inside_run_it_is_one_variable(strategy):
    variable = strategy.run(lambda: ms.Variable(np.array([float(replica_id() + 3)])))
    assert isinstance(variable, ms.Variable)
    assert [v.numpy().tolist() for v in variable.values] == [[3]] * len(variable.values)


# One rank's mistake is every rank's error


@pytest.fixture(scope="module")
def pair():
    """Two replicas per rank: what one of them does wrong, other replicas and other ranks must learn of."""
    return ms.MultiWorkerMirroredStrategy(devices=["cpu:0", "cpu:1"])


def zeros(**kwargs):
    return ms.Variable(np.zeros(2), **kwargs)


def fails():
    raise OSError("no such file")


WRONG_CONSTRUCTIONS = {
    "object": ("TypeError", lambda: ms.Variable(object())),
    "function that fails": ("OSError", lambda: ms.Variable(fails)),
    "synchronization": (
        "ValueError",
        lambda: zeros(synchronization=ms.VariableSynchronization.NONE),
    ),
    "aggregation": ("ValueError", lambda: zeros(aggregation="sum")),
    "mean of integers": ("ValueError", lambda: ms.Variable(np.zeros(2, int), aggregation=MEAN)),
    "dtype": ("TypeError", lambda: zeros(dtype="float31")),
}


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("wrong", WRONG_CONSTRUCTIONS)
def test_one_rank_constructs_wrongly(pair, wrong):
    error, make = WRONG_CONSTRUCTIONS[wrong]

    def construct():
        with pair.scope():
            return make() if RANK == LAST else zeros()

    assert_all_raise(error, LAST, construct)
    assert_usable(pair)


DIFFERENT_CONSTRUCTIONS = {
    "shape": lambda: ms.Variable(np.zeros(3)),
    "dtype": lambda: ms.Variable(np.zeros(2, "f4")),
    "name": lambda: zeros(name="other"),
    "aggregation": lambda: zeros(aggregation=SUM),
    "synchronization": lambda: zeros(synchronization=ON_READ),
    "nothing": lambda: None,
}


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("different", DIFFERENT_CONSTRUCTIONS)
def test_constructions_that_differ_between_ranks(pair, different):
    def construct():
        with pair.scope():
            DIFFERENT_CONSTRUCTIONS[different]() if RANK == LAST else zeros()
        pair.extended.communicator.barrier(label="after")

    errors = errors_of_ranks(construct)
    assert {name for name, _, _ in errors} == {"CollectiveMismatchError"}, errors
    assert_usable(pair)


@every_library
@pytest.mark.parametrize(
    ("dtype", "total"), [("int64", 2**62 + 1), ("int32", 0), ("int32", -7), ("uint8", 255)]
)
def test_a_sum_of_integers_is_divided_without_a_remainder(strategy, make, dtype, total):
    """TensorFlow's copies are all equal, and add up to less."""
    array = np.array([total, total // 2], dtype)
    value = array if make is np.array else torch.from_numpy(array)
    variable = make_variable(strategy, value, synchronization=ON_READ, aggregation=SUM)
    assert variable.assign(value).tolist() == array.tolist()
    assert variable.dtype == value.dtype
    copies = [int(copy.numpy()[0]) for copy in variable.values]
    low, *_, high = sorted(sum(MPI.COMM_WORLD.allgather(copies), copies))
    assert high - low <= 1


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("aggregation", [SUM, FIRST], ids=["SUM", "FIRST"])
@pytest.mark.parametrize("wrong", ["object", "None"])
def test_one_rank_assigns_something_unsupported(pair, wrong, aggregation):
    variable = make_variable(pair, np.zeros(2), aggregation=aggregation)
    operand = {"object": object(), "None": None}[wrong] if RANK == LAST else np.ones(2)
    assert_all_raise(
        "TypeError", LAST, lambda: on_each_replica(pair, lambda i: variable.assign(operand))
    )
    assert variable.numpy().tolist() == [0, 0]
    assert_usable(pair)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("aggregation", [SUM, MEAN, FIRST], ids=["SUM", "MEAN", "FIRST"])
@pytest.mark.parametrize("wrong", ["bool", "dtype", "shape", "number", "slices"])
def test_one_rank_assigns_something_else(pair, wrong, aggregation):
    variable = make_variable(pair, np.zeros(2), aggregation=aggregation)
    odd = {
        "bool": np.ones(2, bool),
        "dtype": np.ones(2, "f4"),
        "shape": np.ones(3),
        "number": 1.0,
        "slices": ms.IndexedSlices(np.ones(1), np.zeros(1, int)),
    }[wrong]
    operand = odd if RANK == LAST else np.ones(2)
    errors = errors_of_ranks(lambda: on_each_replica(pair, lambda i: variable.assign(operand)))
    assert {name for name, _, _ in errors} == {"CollectiveMismatchError"}, errors
    assert variable.numpy().tolist() == [0, 0]
    assert_usable(pair)


@pytest.mark.parametrize(
    ("error", "operand"),
    [
        ("TypeError", object()),
        ("ValueError", 1.0),
        ("InvalidArgumentError", np.ones(3)),
        ("InvalidArgumentError", np.ones(2, "f4")),
    ],
    ids=["object", "number", "shape", "dtype"],
)
def test_all_ranks_assign_wrongly(pair, error, operand):
    variable = make_variable(pair, np.zeros(2), aggregation=SUM)
    errors = errors_of_ranks(lambda: on_each_replica(pair, lambda i: variable.assign(operand)))
    assert [name for name, _, _ in errors] == [error] * SIZE, errors
    assert variable.numpy().tolist() == [0, 0]
    assert_usable(pair)


@pytest.mark.mpi(min_size=2)
def test_the_order_of_updates_is_part_of_the_contract(pair):
    first = make_variable(pair, np.zeros(2), name="first", aggregation=SUM)
    second = make_variable(pair, np.zeros(2), name="second", aggregation=SUM)

    def replica(i):
        for variable in (second, first) if RANK == LAST else (first, second):
            variable.assign_add(np.ones(2))

    errors = errors_of_ranks(lambda: on_each_replica(pair, replica))
    assert {name for name, _, _ in errors} == {"CollectiveMismatchError"}
    assert all("'first'" in message and "'second'" in message for _, message, _ in errors)
    assert_usable(pair)


@pytest.mark.parametrize(
    "kind", [ms.MultiWorkerMirroredStrategy, ms.MirroredStrategy, ms.get_strategy]
)
def test_in_a_replica_block_a_metric_reads_as_the_sum(kind):
    """Each rank adds its own to an ON_READ variable, made there or in the scope, and reads everybody's."""
    strategy = kind()
    size = strategy.world_size
    loss = make_variable(strategy, 0.0, synchronization=ON_READ, aggregation=SUM)
    with strategy.scope() if strategy.is_default else strategy.replica():
        right = ms.Variable(torch.tensor(0), synchronization=ON_READ, aggregation=SUM)
        for epoch in range(2):
            for i in range(3):
                loss.assign_add(0.5 * i)
                right.assign_add((torch.arange(4) > strategy.rank).sum())
            assert float(loss) == 1.5 * size
            assert int(right) == 3 * sum(3 - rank for rank in range(size))
            assert strategy.reduce("sum", right, axis=None) == int(right)
            total, count = strategy.reduce("sum", (0.5 + epoch, strategy.rank), axis=None)
            assert (total, count) == ((0.5 + epoch) * size, triangle(size))
            loss.assign(0.0)
            right.assign(0)
        right.assign_add(1)
        assert int(right.state()) == size
    assert int(right) == size
    assert strategy.run(lambda: int(right)) == 1


@every_library
def test_variables_are_compared_by_their_values(strategy, make):
    steps = make_variable(strategy, make(0), aggregation=FIRST)
    reached = 0
    for _ in range(5):
        strategy.run(lambda: steps.assign_add(make(1)))
        reached += bool(steps == 3)
    assert (reached, bool(steps == 5), bool(steps != 5), steps == None) == (1, True, False, False)  # noqa: E711
    assert all(strategy.experimental_local_results(strategy.run(lambda: bool(steps == 5))))
    with pytest.raises(RuntimeError, match=r"variable\.assign_sub"):
        steps -= make(1)
    total = make_variable(strategy, make(2), synchronization=ON_READ, aggregation=SUM)
    # No rank waits for another.
    if RANK == LAST:
        with pytest.raises(TypeError, match=r"Call variable\.read_value\(\) on every rank"):
            assert total in [steps]
        assert "value=2" in repr(total)
    assert int(total) == 2 * strategy.num_replicas_in_sync
