"""Variables and distributed values have the operators of their arrays. Variables refuse operators in place."""

import operator
import re
import weakref

import numpy as np
import pytest
import torch

import mpistrat as ms

CPUS = ["cpu:0", "cpu:1"]
ON_READ, SUM = ms.VariableSynchronization.ON_READ, ms.VariableAggregation.SUM
MADE_BY = {
    "default": ms.get_strategy,
    "mirrored": lambda: ms.MirroredStrategy(CPUS),
    "central": lambda: ms.CentralStorageStrategy(CPUS),
    "parameter server": lambda: ms.compat.v1.ParameterServerStrategy(),
}
every_library = pytest.mark.parametrize("make", [np.array, torch.tensor], ids=["numpy", "torch"])
OPERATORS = {
    "equal": (lambda v: v == 5, [True, False]),
    "unequal": (lambda v: v != 5, [False, True]),
    "reflected": (lambda v: 5 == v, [True, False]),  # noqa: SIM300
    "None": (lambda v: [v == None, v != None], [False, True]),  # noqa: E711
    "and": (lambda v: v & 6, [4, 6]),
    "or": (lambda v: 8 | v, [13, 15]),
    "xor": (lambda v: v ^ 1, [4, 6]),
    "not": (lambda v: ~v, [-6, -8]),
    "left": (lambda v: v << 1, [10, 14]),
    "right": (lambda v: 64 >> v, [2, 0]),
    "divmod": (lambda v: torch.stack([torch.as_tensor(x) for x in divmod(v, 4)]), [[1, 1], [1, 3]]),
    "rdivmod": (
        lambda v: torch.stack([torch.as_tensor(x) for x in divmod(16, v)]),
        [[3, 2], [1, 2]],
    ),
}


@pytest.fixture(scope="module")
def pair():
    return ms.MirroredStrategy(CPUS)


def variable(strategy, value, **keywords):
    with strategy.scope():
        return ms.Variable(value, **keywords)


def listed(value):
    return value if isinstance(value, list) else value.tolist()


def all_kinds(make):
    """A value of each kind with a single value outside `run`."""
    for strategy in MADE_BY:
        yield variable(MADE_BY[strategy](), make([5, 7]))
    yield ms.ShardedVariable([ms.Variable(make([5])), ms.Variable(make([7]))])
    yield ms.Mirrored([make([5, 7])] * 2)


@every_library
@pytest.mark.parametrize("name", OPERATORS)
def test_operators_of_arrays(make, name):
    call, expected = OPERATORS[name]
    for value in all_kinds(make):
        assert listed(call(value)) == expected


@every_library
def test_an_array_on_the_left(make):
    for value in all_kinds(make):
        assert (make([5, 5]) == value).tolist() == [True, False]
        assert (make([5, 5]) != value).tolist() == [False, True]
        assert (value == value).all()
        assert [x.tolist() for x in divmod(make([16, 16]), value)] == [[3, 2], [1, 2]]
        with pytest.raises((ValueError, RuntimeError), match=r"broadcast|size of tensor"):
            assert value == make([1, 2, 3])


@every_library
def test_numbers_are_rounded_and_formatted(make):
    for v in (ms.Variable(make(2.3456)), ms.Mirrored([make(2.3456)])):
        assert f"{v:.2f} {v:8.1e}" == " 2.35  2.3e+00"[1:]
        assert float(round(v, 2)) == pytest.approx(2.35)
        assert round(v) == 2
        assert f"{v}" == str(v)
    assert round(ms.Variable(make([1.26, 2.5])), 1).tolist() == pytest.approx([1.3, 2.5])
    assert round(ms.Variable(make(7))) == 7
    assert f"{ms.Variable(make(7)):03d}" == "007"
    with pytest.raises(TypeError, match="unsupported format string"):
        format(ms.Variable(make([1.0, 2.0])), ".2f")


def test_values_are_found_by_their_identity(pair):
    on_read = variable(pair, torch.zeros(2), synchronization=ON_READ, aggregation=SUM)
    ones = np.ones(2)
    values = [variable(pair, ones), variable(pair, 1.0), ms.PerReplica([1, 2]), on_read]
    values += [variable(pair, ones), ms.Mirrored([ones, ones]), ms.Variable(torch.ones(2))]
    table = weakref.WeakKeyDictionary({value: i for i, value in enumerate(values)})
    for found in (set(values), weakref.WeakSet(values), dict.fromkeys(values), table):
        assert len(found) == len(values)
        assert all(value in found for value in values)
    for value in (values[0], variable(pair, 0.0)):
        assert pair.extended.value_container(value.values[1]) is value
        assert pair.extended.variable_created_in_scope(value.values[0])
        assert pair.extended.value_container(value) is value
    assert [table.pop(value) for value in values] == [*range(len(values))]
    assert (values[0] == values[0]).tolist() == [True, True]
    assert values.index(values[0]) == 0
    assert values[0] in values
    assert (None in values, values[2] == None) == (False, False)  # noqa: E711


@every_library
def test_values_of_each_replica(pair, make):
    v = variable(pair, make([0, 0]), synchronization=ON_READ, aggregation=SUM)
    values = ms.PerReplica([make([0, 1]), make([0, 2])])

    def step():
        rank = ms.get_replica_context().replica_id_in_sync_group
        v.assign(make([0, rank + 1]))
        for value in (v, values):
            assert (value == make([0, 2])).tolist() == [True, rank == 1]
            assert (value + 1).tolist() == [1, rank + 2]
            assert (value & 1).tolist() == [0, 1 - rank]
            assert bool(value[1] > rank)
        return 1

    pair.run(step)
    assert (v + 0).tolist() == [0, 3]
    local = (operator.eq, operator.ne, operator.and_, operator.xor, divmod, round)
    for call in local:
        with pytest.raises(
            TypeError, match=r"ON_READ.*Call variable\.read_value\(\) on every rank"
        ):
            call(v, 1)
    with pytest.raises(TypeError, match="read_value"):
        assert v in [ms.Variable(make(1))]
    for call in (*local, operator.add, operator.getitem, lambda x, _: bool(x), lambda x, _: [*x]):
        with pytest.raises(TypeError, match=r"no single value outside run; use strategy\.reduce"):
            call(values, 1)


IN_PLACE = {
    "assign_add": [operator.iadd],
    "assign_sub": [operator.isub],
    "assign": [operator.imul, operator.itruediv, operator.ipow, operator.iand, operator.ilshift],
}


@pytest.mark.parametrize("method", IN_PLACE)
@every_library
def test_no_operator_in_place(make, method):
    for value in all_kinds(make):
        for change in IN_PLACE[method]:
            if isinstance(value, ms.Variable):
                with pytest.raises(RuntimeError, match=rf"`-=`.*variable\.{method}\(…\)"):
                    change(value, make([1, 1]))
            else:
                assert not isinstance(change(value, make([1, 1])), ms.Mirrored)
        if isinstance(value, ms.Variable):
            assert value.ndim == 1
            with pytest.raises(RuntimeError, match="scatter_update"):
                value[0] = 1
            assert value.numpy().tolist() == [5, 7]
    array = make([5, 7])
    array -= ms.Variable(make([1, 1]))
    assert array.tolist() == [4, 6]


def test_its_description_has_the_value(pair):
    v = ms.Variable(np.array([1.5, 2.0]), name="w")
    assert repr(v) == f"{v}" == "<PlainVariable 'w' shape=(2,) dtype=float64 value=[1.5 2. ]>"
    assert repr(ms.Variable(torch.tensor([2, 3]))).endswith(
        "dtype=torch.int64 value=tensor([2, 3])>"
    )
    own = variable(pair, 0, synchronization=ON_READ, aggregation=SUM, name="n")
    pair.run(lambda: own.assign(ms.get_replica_context().replica_id_in_sync_group + 4))
    assert re.fullmatch(
        r"SyncOnReadVariable:{\n  0: <.*'n'.* value=4>,\n  1: <.* value=5>\n}", repr(own)
    )
    shards = ms.ShardedVariable([ms.Variable([1.0]), ms.Variable([2.0])])
    assert all(f"value=[{n}.]" in repr(shards) for n in (1, 2))
