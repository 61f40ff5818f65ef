"""Policies among the replicas of one rank: sums, means, destinations, and a user's own algorithm."""

from unittest import mock

import numpy as np
import pytest
import torch

import mpistrat as ms
from mpistrat import arrays
from mpistrat.communicators.local import LocalCommunicator
from mpistrat.cross_device_ops import accumulation
from mpistrat.errors import InvalidArgumentError

SUM, MEAN = ms.ReduceOp.SUM, ms.ReduceOp.MEAN
OPS = {
    "one device": ms.ReductionToOneDevice,
    "nccl": ms.NcclAllReduce,
    "nccl unpacked": lambda: ms.NcclAllReduce(num_packs=0),
    "nccl packed": lambda: ms.NcclAllReduce(num_packs=3),
    "hierarchical": ms.HierarchicalCopyAllReduce,
    "over ranks": lambda: ms.MpiAllReduce(LocalCommunicator()),
}
every_library = pytest.mark.parametrize("make", [np.array, torch.tensor], ids=["numpy", "torch"])


@pytest.fixture(params=OPS)
def ops(request):
    return OPS[request.param]()


def per_replica(make, n, offset=0.0):
    return ms.PerReplica([make([float(i), 1.0 + offset]) for i in range(n)])


@every_library
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
def test_reduce(ops, make, n):
    value = per_replica(make, n)
    total = ops.reduce(SUM, value, value)
    mean = ops.reduce(MEAN, value, "cpu:0")
    expected = [n * (n - 1) / 2, n]
    components = total.values if n > 1 else (total,)
    assert type(total) is (ms.Mirrored if n > 1 else type(make([1.0])))
    assert [c.tolist() for c in components] == [expected] * n
    assert mean.tolist() == [x / n for x in expected]
    assert [c.tolist() for c in value.values] == [[i, 1] for i in range(n)]


@every_library
def test_batches_of_several_dtypes_keep_their_order(ops, make):
    library = np if make is np.array else torch
    dtypes = ["float32", "float64", "float32", "int64", "float32"]
    pairs = []
    for length, name in enumerate(dtypes, start=1):
        rows = [make([r] * length, dtype=getattr(library, name)) for r in (1, 2)]
        pairs.append((ms.PerReplica(rows), "cpu:0"))
    reduced = ops.batch_reduce(SUM, pairs)
    assert [r.tolist() for r in reduced] == [[3] * length for length in range(1, 6)]
    assert [arrays.dtype_name(r) for r in reduced] == dtypes
    assert ops.batch_reduce(SUM, []) == []


def test_sparse_values(ops):
    value = ms.PerReplica([ms.IndexedSlices([[i + 1.0]], [i], (3, 1)) for i in range(2)])
    total = ops.reduce(SUM, value, "cpu:0")
    assert (total.values.tolist(), total.indices.tolist()) == ([[1], [2]], [0, 1])
    assert ops.reduce(MEAN, value, "cpu:0").values.tolist() == [[0.5], [1]]
    assert total.dense_shape == (3, 1)


@every_library
def test_gather_and_broadcast(ops, make):
    value = ms.PerReplica([make([[0.0]]), make([[1.0], [2.0]])])
    assert ops.gather(value, "cpu:0", axis=0).tolist() == [[0], [1], [2]]
    everywhere = ops.broadcast(make([5.0]), value)
    assert [c.tolist() for c in everywhere.values] == [[5], [5]]
    assert everywhere.values[0] is not everywhere.values[1]
    with pytest.raises(InvalidArgumentError, match=r"\[1, 1\]"):
        ops.gather(value, value, axis=1)


def test_one_value_is_left_as_it_is(ops):
    value = np.ones(2)
    assert ops.reduce(MEAN, value, "cpu:0").tolist() == [1, 1]
    assert ops.reduce(SUM, [1.0, 2.0], "cpu:0").tolist() == [1, 2]


def test_the_mean_of_integers_is_floating(ops):
    value = ms.PerReplica([np.array([1]), np.array([2])])
    assert ops.reduce(MEAN, value, "cpu:0").tolist() == [1.5]


def test_an_accumulation_of_one_s_own():
    largest = ms.ReductionToOneDevice(accumulation_fn=lambda values: np.maximum.reduce(values))
    value = ms.PerReplica([np.array([4.0]), np.array([2.0])])
    assert largest.reduce(SUM, value, "cpu:0").tolist() == [4]
    assert largest.reduce(MEAN, value, "cpu:0").tolist() == [2]  # divided by n all the same


def test_the_hierarchical_copy_adds_up_halves_first():
    """Of large numbers that cancel, the order of addition decides what is left."""
    terms = [1e8, 1.0, -1e8, 1.0]
    value = ms.PerReplica([np.array([x], "f4") for x in terms])
    one_by_one = ms.ReductionToOneDevice().reduce(SUM, value, "cpu:0")
    halves = ms.HierarchicalCopyAllReduce().reduce(SUM, value, "cpu:0")
    assert one_by_one.tolist() == [1]
    assert halves.tolist() == [0]


class Doubling(ms.CrossDeviceOps):
    """Twice the sum, and a record of what it was asked."""

    def __init__(self):
        self.asked = []

    def reduce_implementation(self, reduce_op, per_replica_value, destinations, options):
        self.asked.append((reduce_op, options.bytes_per_pack))
        values = per_replica_value.values
        return ms.Mirrored([2 * sum(values) for _ in values])


def test_a_strategy_uses_the_user_s_algorithm():
    mine = Doubling()
    strategy = ms.MirroredStrategy(["cpu:0", "cpu:1"], mine)

    def replica():
        options = ms.CommunicationOptions(bytes_per_pack=7)
        return ms.get_replica_context().all_reduce("sum", np.ones(2), options)

    results = strategy.experimental_local_results(strategy.run(replica))
    assert [r.tolist() for r in results] == [[4, 4], [4, 4]]
    assert mine.asked == [(SUM, 7)]


def test_a_policy_is_not_asked_for_what_it_does_not_know():
    """A program's own takes whatever is no mean for a sum."""
    mine = Doubling()
    strategy = ms.MirroredStrategy(["cpu:0", "cpu:1"], mine)
    value = strategy.run(lambda: np.array([ms.get_replica_context().replica_id_in_sync_group]))
    assert strategy.reduce("max", value, axis=None).tolist() == [1]
    (least,) = strategy.extended.batch_reduce_to("min", [(value, value)])
    assert [part.tolist() for part in least.values] == [[0], [0]]
    assert mine.asked == []
    for op in (ms.ReduceOp.MAX, "sum", None):
        with pytest.raises(
            ValueError, match=r"takes as reduce_op one of ReduceOp.SUM, ReduceOp.MEAN; "
        ):
            mine.reduce(op, value, value)
    everyone = ms.MpiAllReduce(strategy.extended.communicator)
    assert everyone.reduce(ms.ReduceOp.PRODUCT, ms.PerReplica([3.0, 5.0]), "cpu:0") == 15


def test_what_cannot_be_added():
    with pytest.raises(InvalidArgumentError, match="booleans"):
        accumulation.check_summable([np.ones(1, bool)] * 2)
    with pytest.raises(InvalidArgumentError, match=r"replica 1: float32\[1\]"):
        accumulation.check_summable([np.ones(1), np.ones(1, "f4")])
    assert accumulation.add_n([np.ones(1)] * 3).tolist() == [3]


def test_tensors_on_gpus_of_their_own_are_added_by_torch(monkeypatch):
    """On a machine without GPUs: torch's function is called as it is declared, with the first tensor's device."""
    calls = mock.create_autospec(torch.nn.parallel.comm.reduce_add, return_value=torch.ones(2) * 6)
    monkeypatch.setattr(torch.nn.parallel.comm, "reduce_add", calls)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.Tensor, "get_device", lambda tensor: int(tensor[0]))
    values = [torch.ones(2) * i for i in (1, 2, 3)]
    policy = ms.NcclAllReduce()
    assert policy.combine(ms.ReduceOp.MEAN, values).tolist() == [2, 2]
    assert calls.call_args.args[1] == 1
    calls.reset_mock()
    assert policy.combine(ms.ReduceOp.SUM, [values[0], values[0]]).tolist() == [2, 2]  # on one GPU
    calls.assert_not_called()


def test_python_s_floats_are_float32(ops):
    for value in ([1.0, 5.0], (1.0, 5.0), 2.0):
        total = ops.reduce(SUM, value, "cpu:0")
        assert total.dtype == np.float32
        assert np.array_equal(total, value)
        assert ops.broadcast(value, "cpu:0").dtype == np.float32
        (batched,) = ops.batch_reduce(SUM, [(value, "cpu:0")])
        assert batched.dtype == np.float32
    total = ops.reduce(SUM, ms.PerReplica([1.0, 5.0]), "cpu:0")
    assert (total, total.dtype) == (6, np.float32)
    assert ops.reduce(SUM, np.array([1.0]), "cpu:0").dtype == np.float64
    assert ops.reduce(SUM, [1, 5], "cpu:0").dtype.kind == "i"
    assert ms.IndexedSlices([[1.0]], [0]).values.dtype == np.float32


@every_library
def test_slices_of_replicas_are_gathered_as_dense_arrays(ops, make):
    rows = [ms.IndexedSlices(make([[i + 1.0]]), make([i]), (2, 1)) for i in range(2)]
    gathered = ops.gather(ms.PerReplica(rows), "cpu:0", axis=0)
    assert gathered.tolist() == [[1], [0], [0], [2]]
    assert type(gathered) is type(make([1.0]))
    with pytest.raises(NotImplementedError, match="cannot be gathered"):
        ops.gather(rows[0], "cpu:0", axis=0)
    with pytest.raises(ValueError, match="dense_shape"):
        ops.gather(ms.PerReplica([ms.IndexedSlices(make([[1.0]]), make([0]))] * 2), "cpu:0", axis=0)
