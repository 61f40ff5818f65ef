"""One copy of every variable on a node: what it holds, who writes it, and what memory that takes."""

import ctypes
import gc
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from mpi4py import MPI

import mpistrat as ms
from support.rank_errors import assert_usable

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
SUM, MEAN = ms.VariableAggregation.SUM, ms.VariableAggregation.MEAN
FIRST = ms.VariableAggregation.ONLY_FIRST_REPLICA
DTYPES = ("float32", "float64", "int64", "bool", "complex64")


@pytest.fixture(scope="module", params=[1, 2], ids=["k=1", "k=2"])
def strategy(request: pytest.FixtureRequest) -> ms.CentralStorageStrategy:
    return ms.CentralStorageStrategy([f"cpu:{i}" for i in range(request.param)])


@pytest.fixture(params=["numpy", "torch"])
def make(request: pytest.FixtureRequest):
    return np.asarray if request.param == "numpy" else torch.as_tensor


def variable(strategy, value, aggregation=SUM):
    with strategy.scope():
        return ms.Variable(value, aggregation=aggregation)


def replica_id() -> int:
    return ms.get_replica_context().replica_id_in_sync_group


def test_replicas_are_those_of_all_ranks(strategy) -> None:
    k = strategy.extended.num_local_replicas
    assert strategy.num_replicas_in_sync == k * SIZE
    ids = strategy.experimental_local_results(strategy.run(replica_id))
    assert ids == tuple(range(RANK * k, RANK * k + k))


def test_an_epoch_goes_on_as_long_as_any_replica_has_data(strategy) -> None:
    n, k = strategy.num_replicas_in_sync, strategy.extended.num_local_replicas
    batches = [np.ones(1)] * (k + (RANK == SIZE - 1))  # the last rank has one more
    distributed = strategy.distribute_datasets_from_function(lambda context: batches)
    sizes = [strategy.reduce("sum", step, axis=0) for step in distributed]
    assert [float(size) for size in sizes] == [n, 1]


@pytest.mark.parametrize("length", [1, 3, 5000])
def test_updates_count_once(strategy, make, length: int) -> None:
    n = strategy.num_replicas_in_sync
    first = make(np.arange(length, dtype=np.float32))
    for aggregation, expected in ((SUM, n * (n + 1) / 2), (MEAN, (n + 1) / 2), (FIRST, 1)):
        v = variable(strategy, first, aggregation)

        def step(v=v) -> None:
            v.assign_add(make(np.full(length, replica_id() + 1, np.float32)))

        strategy.run(step)
        strategy.run(step)
        assert np.array_equal(v.numpy(), np.arange(length) + np.float32(2 * expected))
        strategy.run(lambda v=v: v.assign(make(np.full(length, 3, np.float32))))
        assert np.array_equal(v.numpy(), np.full(length, 3 * (n if aggregation is SUM else 1)))


def test_outside_run_all_ranks_assign_the_same(strategy, make) -> None:
    v = variable(strategy, make(np.arange(6.0).reshape(3, 2)))
    v.assign(v.read_value()[[2, 1, 0]])  # of what it reads as, in another order
    assert v.numpy().tolist() == [[4, 5], [2, 3], [0, 1]]
    v.assign(v)
    v.assign_sub(v)
    assert not v.numpy().any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(strategy, make, dtype: str) -> None:
    value = np.array([[1, 0, 1], [1, 1, 0]], dtype)
    v = variable(strategy, make(value), FIRST)
    assert v.numpy().dtype == value.dtype
    assert np.array_equal(v.numpy(), value)
    v.assign(make(value[::-1].copy()))
    assert np.array_equal(v.numpy(), value[::-1])


def test_bfloat16(strategy) -> None:
    v = variable(strategy, torch.full((3,), 1.5, dtype=torch.bfloat16), FIRST)
    v.assign_add(torch.ones(3, dtype=torch.bfloat16))
    assert torch.equal(v.read_value(), torch.full((3,), 2.5, dtype=torch.bfloat16))


@pytest.mark.parametrize("rows", [1, 7])
def test_rows(strategy, make, rows: int) -> None:
    n = strategy.num_replicas_in_sync
    v = variable(strategy, make(np.zeros((rows, 2), np.float32)))

    def step() -> None:
        v.scatter_add(
            ms.IndexedSlices(make(np.ones((3, 2), np.float32)), make(np.array([rows - 1, 0, 0])))
        )

    strategy.run(step)
    expected = np.zeros((rows, 2))
    np.add.at(expected, [rows - 1, 0, 0], n)
    assert np.array_equal(v.numpy(), expected)
    v.scatter_sub(ms.IndexedSlices(make(np.full((1, 2), n, np.float32)), make(np.array([0]))))
    expected[0] -= n
    assert np.array_equal(v.numpy(), expected)


@pytest.mark.mpi(min_size=2)
def test_it_is_read_in_place(strategy) -> None:
    v = variable(strategy, np.zeros(8))
    read = v.read_value()
    v.assign(np.ones(8))
    assert v.read_value() is read
    assert read.tolist() == [1.0] * 8


@pytest.mark.mpi(min_size=2)
def test_what_a_program_writes_to_what_it_read_stays_its_own(strategy) -> None:
    v = variable(strategy, np.zeros(8))
    if RANK == 0:
        v.read_value()[:] = 7
    WORLD.barrier()
    assert v.read_value().tolist() == [7.0 if RANK == 0 else 0.0] * 8
    WORLD.barrier()
    v.assign_add(np.ones(8))
    assert v.read_value().tolist() == [1.0] * 8


def test_bad_operands_are_refused_on_all_ranks(strategy) -> None:
    v = variable(strategy, np.zeros((2, 3)))
    for operand in (np.zeros((2, 4)), np.zeros((2, 3), np.int32), "x"):
        with pytest.raises((TypeError, ValueError), match=re.escape(v.name)):
            v.assign(operand)
    with pytest.raises(IndexError, match="row 2 of variable 'Variable' is out of bounds"):
        v.scatter_add(ms.IndexedSlices(np.ones((1, 3)), [2]))
    assert not v.numpy().any()
    assert_usable(strategy)


@pytest.mark.mpi(min_size=2)
def test_an_operand_that_is_bad_on_one_rank(strategy) -> None:
    v = variable(strategy, np.zeros(3))
    with pytest.raises(
        (ValueError, ms.errors.CollectiveMismatchError), match=f"rank {SIZE - 1}|shape"
    ):
        v.assign(np.zeros(3 + (RANK == SIZE - 1)))
    assert not v.numpy().any()
    assert_usable(strategy)


@pytest.mark.mpi(min_size=2)
def test_an_update_that_fails_on_one_rank_changes_nothing(strategy) -> None:
    """In its part, where one overflows."""
    v = variable(strategy, np.full(SIZE, 3e38, np.float32), FIRST)
    delta = np.zeros(SIZE, np.float32)
    delta[-1] = 3e38
    with (
        np.errstate(over="raise"),
        pytest.raises((FloatingPointError, ms.errors.CollectiveMismatchError)),
    ):
        v.assign_add(delta)
    WORLD.barrier()
    assert np.array_equal(v.numpy(), np.full(SIZE, 3e38, np.float32))
    v.assign_sub(v)
    assert not v.numpy().any()
    assert_usable(strategy)


@pytest.mark.parametrize("dtype", [np.uint8, np.int16])
def test_rows_of_narrow_indices(strategy, dtype: type) -> None:
    v = variable(strategy, np.zeros((1000, 2)))
    v.scatter_add(ms.IndexedSlices(np.ones((2, 2)), np.array([0, 100], dtype)))
    assert np.flatnonzero(v.numpy()[:, 0]).tolist() == [0, 100]


@pytest.mark.parametrize("kind", [ms.MirroredStrategy, ms.CentralStorageStrategy])
@pytest.mark.parametrize("k", [1, 2])
def test_rows_of_shards_that_each_replica_has_others_of(kind, k: int) -> None:
    strategy = kind([f"cpu:{i}" for i in range(k)])
    n = strategy.num_replicas_in_sync
    with strategy.scope():
        shards = [ms.Variable(np.zeros((2, 1)), aggregation=SUM) for _ in range(n)]
    whole = ms.ShardedVariable(shards)

    def step() -> None:
        whole.scatter_add(ms.IndexedSlices(np.ones((1, 1)), [2 * replica_id()]))

    strategy.run(step)
    assert whole.numpy()[:, 0].tolist() == [1.0, 0.0] * n


def test_arrays_of_objects_are_refused(strategy) -> None:
    with strategy.scope(), pytest.raises(TypeError, match="an array of object objects"):
        ms.Variable(np.array(["a", "b"], object))


def test_wire_formats_are_refused() -> None:
    with pytest.raises(ValueError, match="one node, where nothing is sent"):
        ms.CentralStorageStrategy(
            communication_options=ms.CommunicationOptions(wire_dtype="bfloat16")
        )


def pss() -> int:
    """Bytes of this process, what it shares counted in equal parts."""
    rollup = Path("/proc/self/smaps_rollup").read_text(encoding="ascii")
    found = re.search(r"^Pss: +(\d+) kB", rollup, re.MULTILINE)
    assert found is not None
    return int(found[1]) << 10


def pss_of_all() -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what the C library keeps of memory that was freed
    WORLD.barrier()
    mine = pss()
    WORLD.barrier()
    return WORLD.allreduce(mine)


@pytest.mark.mpi(min_size=2)
def test_a_variable_takes_its_memory_once() -> None:
    strategy = ms.CentralStorageStrategy()
    nbytes = 64 << 20
    initial = np.ones(nbytes // 8)
    variable(strategy, np.ones(4096))  # what the first one takes besides
    before = pss_of_all()
    v = variable(strategy, initial, FIRST)
    float(v.read_value().sum())  # all pages are read on every rank
    assert pss_of_all() - before < 1.4 * nbytes
    v.assign_add(initial)
    assert pss_of_all() - before < 1.4 * nbytes
    assert v.numpy()[::1000].tolist() == [2.0] * len(initial[::1000])


@pytest.mark.mpi(min_size=2)
def test_parameters_take_their_memory_once() -> None:
    strategy = ms.CentralStorageStrategy(gradients="mean")
    with strategy.scope():
        small = torch.nn.Linear(4096, 64, bias=False)
    strategy.run(lambda: small(torch.ones(1, 4096)))  # what the first step takes besides
    before = pss_of_all()
    with strategy.scope():
        model = torch.nn.Linear(
            4096, 4096, bias=False
        )  # 64 MB: malloc may keep up to 32 MB that are freed
    nbytes = 4 * 4096 * 4096
    strategy.run(lambda: model(torch.ones(1, 4096)))
    taken = pss_of_all() - before
    assert taken < 1.5 * nbytes, taken / nbytes


@pytest.mark.mpi(min_size=2)
def test_training_takes_its_memory_once_and_each_rank_its_own_gradients() -> None:
    """Once: the parameters, the gradients' sum, and Adam's two moments. Its own: torch's, and what is summed."""
    strategy = ms.CentralStorageStrategy(gradients="mean")

    def train(inputs: int, outputs: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        with strategy.scope():
            model = torch.nn.Linear(inputs, outputs, bias=False)
            optimizer = torch.optim.Adam(model.parameters())

        def step() -> None:
            model(torch.ones(1, inputs)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(3):
            strategy.run(step)
        return model, optimizer

    train(64, 64)  # what the first steps take besides
    before = pss_of_all()
    kept = train(4096, 2048)  # 32 MB
    taken = (pss_of_all() - before) / (4 * 4096 * 2048)
    assert taken < 4 + 2 * SIZE + 0.5, taken
    del kept


@pytest.mark.parametrize("k", [1, 2])
def test_training_is_that_of_one_process_with_as_many_replicas(k: int) -> None:
    def train(k: int, comm: MPI.Intracomm) -> torch.Tensor:
        torch.manual_seed(1)
        strategy = ms.CentralStorageStrategy(
            [f"cpu:{i}" for i in range(k)], comm=comm, gradients="mean"
        )
        with strategy.scope():
            model = torch.nn.Linear(5, 3)
            optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

        def step() -> None:
            optimizer.zero_grad()
            (model(torch.arange(5.0) + replica_id()) ** 2).sum().backward()
            optimizer.step()

        for _ in range(4):
            strategy.run(step)
        return torch.cat([p.detach().flatten().clone() for p in model.parameters()])

    assert torch.allclose(train(k, WORLD), train(k * SIZE, MPI.COMM_SELF), atol=1e-6)
