"""Variables of one rank: every synchronization and aggregation, in and outside `run`."""

import copy

import numpy as np
import pytest
import torch

import mpistrat as ms
from mpistrat.errors import InvalidArgumentError

AUTO, ON_WRITE = ms.VariableSynchronization.AUTO, ms.VariableSynchronization.ON_WRITE
ON_READ = ms.VariableSynchronization.ON_READ
NONE, SUM = ms.VariableAggregation.NONE, ms.VariableAggregation.SUM
MEAN, FIRST = ms.VariableAggregation.MEAN, ms.VariableAggregation.ONLY_FIRST_REPLICA
LIBRARIES = {"numpy": np.array, "torch": torch.tensor}


@pytest.fixture(params=LIBRARIES)
def make(request):
    return LIBRARIES[request.param]


@pytest.fixture(scope="module")
def pair():
    return ms.MirroredStrategy(["cpu:0", "cpu:1"])


def variable(strategy, value, **kwargs):
    with strategy.scope():
        return ms.Variable(value, **kwargs)


def replica():
    return ms.get_replica_context().replica_id_in_sync_group


def copies(variable):
    return [copy.numpy().tolist() for copy in variable.values]


# What replicas 0 and 1 assign is 10 and 20: what each copy holds afterwards
IN_RUN = {
    (AUTO, NONE): [10, 20],
    (ON_WRITE, NONE): [10, 20],
    (ON_WRITE, SUM): [30, 30],
    (ON_WRITE, MEAN): [15, 15],
    (ON_WRITE, FIRST): [10, 10],
    (ON_READ, NONE): [10, 20],
    (ON_READ, SUM): [10, 20],
    (ON_READ, MEAN): [10, 20],
    (ON_READ, FIRST): [10, 20],
}
READ_OUTSIDE = {SUM: 30, MEAN: 15, FIRST: 10}


@pytest.mark.parametrize(("synchronization", "aggregation"), IN_RUN)
def test_assign_in_run(pair, make, synchronization, aggregation):
    v = variable(pair, make(0.0), synchronization=synchronization, aggregation=aggregation)
    returned = pair.run(lambda: v.assign(make(10.0 * (replica() + 1))))
    expected = IN_RUN[synchronization, aggregation]
    assert copies(v) == expected
    assert [float(r) for r in pair.experimental_local_results(returned)] == expected
    if synchronization is ON_READ and aggregation is not NONE:
        assert float(v) == READ_OUTSIDE[aggregation]
    pair.run(lambda: v.assign_sub(make(10.0 * (replica() + 1))))
    assert copies(v) == [0, 0]


@pytest.mark.parametrize("synchronization", [ON_WRITE, ON_READ])
@pytest.mark.parametrize("aggregation", [NONE, SUM, MEAN, FIRST])
def test_assign_outside_run(pair, make, synchronization, aggregation):
    v = variable(pair, make(0.0), synchronization=synchronization, aggregation=aggregation)
    if synchronization is ON_READ and aggregation is NONE:
        assert v.assign(make(6.0)) is None  # it cannot be read outside run
        assert copies(v) == [6, 6]
        with pytest.raises(ValueError, match="no single value"):
            v.numpy()
        return
    assert float(v.assign(make(6.0))) == 6
    shared = synchronization is ON_READ and aggregation is SUM  # the copies add up to the value
    assert copies(v) == ([3, 3] if shared else [6, 6])
    if shared:
        with pytest.raises(ValueError, match="once per replica"):
            v.assign_add(make(1.0))
    else:
        assert float(v.assign_add(make(1.0))) == 7


def test_first_values(pair, make):
    calls = []
    v = variable(pair, lambda: calls.append(1) or make([1.0, 2.0]), name="v")
    assert len(calls) == 1
    assert copies(v) == [[1, 2], [1, 2]]
    assert [c.name for c in v.values] == ["v", "v/replica_1"]
    assert (v.name, v.shape, v.trainable) == ("v", (2,), True)
    assert not variable(pair, make(1.0), synchronization=ON_READ).trainable
    assert variable(pair, make(1.0), synchronization=ON_READ, trainable=True).trainable


def test_numbers_become_float32_unless_told(pair):
    assert variable(pair, 1.5).dtype == np.float32
    assert variable(pair, [1, 2]).dtype == np.int64
    assert variable(pair, 1.5, dtype="float64").dtype == np.float64
    assert variable(pair, torch.ones(1), dtype=torch.float16).dtype == torch.float16


def test_a_variable_has_its_own_memory(pair, make):
    value = make([1.0, 2.0])
    v = variable(pair, value)
    value[0] = 9
    read = v.read_value()
    v.assign_add(make([1.0, 1.0]))
    assert v.numpy().tolist() == [2, 3]
    assert read.tolist() == [1, 2]


def test_a_variable_acts_as_an_array(pair, make):
    v = variable(pair, make([1.0, 2.0]))
    assert (v + 1).tolist() == [2, 3]
    assert (2 - v).tolist() == [1, 0]
    assert (v * v).tolist() == [1, 4]
    assert (-v).tolist() == [-1, -2]
    assert (v > 1).tolist() == [False, True]
    assert v[1] == 2
    assert np.asarray(v).tolist() == [1, 2]


SCATTERED = {
    "scatter_add": [1, 16, 3],
    "scatter_sub": [1, -12, 3],
    "scatter_mul": [1, 90, 3],
    "scatter_min": [1, 2, 3],
    "scatter_max": [1, 9, 3],
    "scatter_update": [1, 9, 3],
}


@pytest.mark.parametrize("method", SCATTERED)
def test_scatter_outside_run(pair, make, method):
    v = variable(pair, make([1.0, 2.0, 3.0]))
    rows = make([9.0, 9.0] if method == "scatter_update" else [5.0, 9.0])
    getattr(v, method)(ms.IndexedSlices(rows, make([1, 1])))
    assert copies(v) == [SCATTERED[method]] * 2


def test_integers_are_divided_as_by_tensorflow(pair, make):
    """They are rounded toward zero, after each division of a row that comes several times."""
    v = variable(pair, make([7, -7, 8, -100, 2**62 + 1]))
    v.scatter_div(ms.IndexedSlices(make([2, 2, -3, 3, 7, 1]), make([0, 1, 2, 3, 3, 4])))
    assert copies(v) == [[3, -3, -2, -4, 2**62 + 1]] * 2
    small = variable(pair, make([[200, 7], [9, 9]]), dtype="uint8")
    small.scatter_div(ms.IndexedSlices(make([[3, 3], [2, 2]]), make([0, 0])))
    assert copies(small) == [[[33, 1], [9, 9]]] * 2
    pair.run(lambda: small.scatter_div(ms.IndexedSlices(make([[2, 2]]), make([replica()]))))
    assert copies(small) == [[[16, 0], [9, 9]], [[33, 1], [4, 4]]]
    with pytest.raises(ZeroDivisionError, match="without 0"):
        v.scatter_div(ms.IndexedSlices(make([0]), make([0])))


def test_scatter_in_run_is_aggregated(pair, make):
    for aggregation, expected in {SUM: [1, 2], MEAN: [0.5, 1], FIRST: [1, 0], NONE: None}.items():
        v = variable(pair, make([0.0, 0.0]), aggregation=aggregation)
        pair.run(
            lambda v=v: v.scatter_add(ms.IndexedSlices(make([replica() + 1.0]), make([replica()])))
        )
        assert copies(v) == ([expected] * 2 if expected else [[1, 0], [0, 2]])


@pytest.mark.parametrize("synchronization", [ON_WRITE, ON_READ])
@pytest.mark.parametrize("aggregation", [SUM, MEAN, FIRST])
def test_state_is_one_array_and_comes_back(pair, make, synchronization, aggregation):
    v = variable(pair, make([4.0]), synchronization=synchronization, aggregation=aggregation)
    before = v.read_value().tolist()
    state = v.state()
    pair.run(lambda: v.assign_add(make([1.0])))
    v.load_state(state)
    assert v.read_value().tolist() == before
    assert state.tolist() == before


def test_per_replica_operands_are_refused_outside_run(pair, make):
    v = variable(pair, make(0.0))
    with pytest.raises(ValueError, match="reduce it first"):
        v.assign(ms.PerReplica([make(1.0), make(2.0)]))


def test_nothing_is_broadcast_or_converted(pair, make):
    v = variable(pair, make([1.0, 2.0]))
    for wrong in (make([1.0]), make([1, 2]), make(3.0)):
        with pytest.raises(InvalidArgumentError):
            v.assign(wrong)
    assert v.assign([3, 4]).tolist() == [3, 4]  # Python's numbers have no dtype of their own
    assert copies(v) == [[3, 4], [3, 4]]


@pytest.mark.parametrize("wrong", [1.5, 2.0, float("nan"), 1j])
def test_python_numbers_are_not_cut_off(make, wrong):
    whole, real = ms.Variable(make(3)), ms.Variable(make(3.0))
    for update in (whole.assign, whole.assign_add, whole.assign_sub):
        with pytest.raises(TypeError, match=r"dtype int\d\d, which would cut off"):
            update(wrong)
    assert int(whole) == 3
    assert int(whole.assign_add(True)) == 4
    if isinstance(wrong, complex):
        with pytest.raises(TypeError, match=r"dtype float\d\d, which would cut off"):
            real.assign(wrong)
    assert float(real.assign(5)) == 5


def test_central_storage_keeps_one_copy(make):
    strategy = ms.CentralStorageStrategy(["cpu:0", "cpu:1"])
    for aggregation, expected in {SUM: 30, MEAN: 15, FIRST: 10}.items():
        v = variable(strategy, make(0.0), aggregation=aggregation)
        assert len(v.values) == 1
        strategy.run(lambda v=v: v.assign(make(10.0 * (replica() + 1))))
        assert float(v) == expected
    state = v.state()
    v.assign(make(1.0))
    v.load_state(state)
    assert float(v) == 10


def test_one_replica_has_plain_variables(make):
    strategy = ms.OneDeviceStrategy("cpu:0")
    for v in (variable(strategy, make(1.0), aggregation=SUM), ms.Variable(make(1.0))):
        assert not isinstance(v, ms.DistributedValues)
        assert float(strategy.run(lambda v=v: v.assign_add(make(2.0)))) == 3
        assert float(v) == 3


def test_a_variable_made_outside_is_changed_by_every_replica(pair, make):
    v = ms.Variable(make(0.0))
    pair.run(lambda: v.assign_add(make(1.0)))
    assert float(v) == 2


NUMBERS = {
    "float32": [np.float64(2), np.float16(2), np.int64(2), np.array(2.0)],
    "int64": [np.int8(2), np.array(2), np.uint8(2)],
    "complex64": [np.complex128(2), np.float64(2)],
}


@pytest.mark.parametrize("dtype", NUMBERS)
def test_numbers_of_numpy_are_converted_as_python_s_are(pair, make, dtype):
    for number in NUMBERS[dtype]:
        for aggregation in (NONE, FIRST, SUM):
            v = variable(pair, make(1), dtype=dtype, aggregation=aggregation)
            kind, n = v.dtype, 2 if aggregation is SUM else 1
            v.assign_add(number)
            assert v.numpy() == 1 + number
            pair.run(lambda v=v, number=number: v.assign_add(number) and None)
            assert v.numpy() == 1 + number + number * n
            v.assign(number)
            assert v.numpy() == number
            assert v.dtype == kind
    with pytest.raises(InvalidArgumentError, match="convert it first"):
        variable(pair, make(1), dtype="int64").assign_add(np.float64(1))


@pytest.mark.parametrize("number", [300, -129, np.int64(300), np.array(-129), np.uint64(1 << 63)])
def test_integers_that_do_not_fit_are_refused(pair, make, number):
    v = variable(pair, make(1), dtype="int8")
    with pytest.raises((TypeError, InvalidArgumentError), match=r"dtype int8.*; convert it first"):
        v.assign_add(number)
    if make is torch.tensor:
        with pytest.raises(InvalidArgumentError, match="dtype int8, the operand"):
            variable(pair, make([1]), dtype="int8").assign(np.array([number]))
    v.assign(np.int64(-128))
    assert v.numpy() == -128


def test_arrays_of_numpy_are_converted_to_tensors(pair):
    v = variable(pair, torch.ones(2), aggregation=SUM)
    v.assign_add(np.ones(2))
    pair.run(lambda: v.assign_add(np.ones(2, np.int32)))
    assert v.read_value().tolist() == [4, 4]
    assert v.dtype == torch.float32
    with pytest.raises(InvalidArgumentError, match="shape"):
        v.assign(np.ones(3))
    with pytest.raises(InvalidArgumentError, match="dtype float32, the operand complex128"):
        v.assign(np.ones(2, complex))
    with pytest.raises(InvalidArgumentError, match="dtype float32, the operand float64"):
        v.assign(torch.ones(2).double())


def test_a_boolean_of_numpy_is_a_number(pair, make):
    v = variable(pair, make(1.0))
    v.assign_add(np.bool_(True))
    assert v.numpy() == 2


@pytest.mark.parametrize("synchronization", [ON_WRITE, ON_READ])
def test_a_deep_copy_is_the_same_strategy_s(pair, make, synchronization):
    v = variable(pair, make([1.0, 2.0]), synchronization=synchronization, aggregation=MEAN)
    assert copy.deepcopy(pair) is pair
    (twin, strategy) = copy.deepcopy([v, pair])
    assert strategy is twin.strategy is pair
    pair.run(lambda: twin.assign_add(make([replica(), 1.0])))
    assert twin.numpy().tolist() == [1.5, 3]
    assert v.numpy().tolist() == [1, 2]
    with pytest.raises(RuntimeError, match="cannot be copied"):
        copy.copy(pair)
    alone = ms.Variable(make([1.0]))
    assert copy.deepcopy({"of the default strategy": alone})["of the default strategy"] is not alone
    assert copy.deepcopy(ms.get_strategy()) is ms.get_strategy()
