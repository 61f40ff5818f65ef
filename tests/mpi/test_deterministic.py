"""`deterministic=True`: what replicas hold is added up in one order, however they are spread over ranks."""

import numpy as np
import pytest
import torch
from mpi4py import MPI

import mpistrat as ms
from mpistrat.errors import CollectiveMismatchError

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
several_ranks = pytest.mark.mpi(min_size=2)


def strategy_of(each: int, **arguments) -> ms.Strategy:
    return ms.MultiWorkerMirroredStrategy(
        devices=[f"cpu:{i}" for i in range(each)], deterministic=True, **arguments
    )


def value_of(replica: int) -> np.ndarray:
    return np.random.default_rng(replica).standard_normal(37).astype(np.float32)


def by_definition(values: list) -> np.ndarray:
    while len(values) > 1:
        pairs = [values[i : i + 2] for i in range(0, len(values), 2)]
        values = [pair[0] + pair[1] if len(pair) == 2 else pair[0] for pair in pairs]
    return values[0]


@pytest.mark.parametrize("each", [1, 2, 3])
def test_values_of_all_kinds(each: int) -> None:
    strategy = strategy_of(each)
    n = SIZE * each

    def replica():
        context = ms.get_replica_context()
        i = context.replica_id_in_sync_group
        short = torch.from_numpy(value_of(i)).bfloat16()
        mine = {"a": value_of(i), "b": float(value_of(i)[0]), "c": short, "d": np.array([i])}
        return mine, context.all_reduce("sum", mine)

    mine, inside = strategy.run(replica)
    outside = strategy.reduce("sum", mine, axis=None)
    shorts = [torch.from_numpy(value_of(i)).bfloat16().float() for i in range(n)]
    for got in (outside, {k: strategy.experimental_local_results(v)[0] for k, v in inside.items()}):
        assert got["a"].tobytes() == by_definition([value_of(i) for i in range(n)]).tobytes()
        assert got["b"] == by_definition([float(value_of(i)[0]) for i in range(n)])
        assert torch.equal(got["c"], by_definition(shorts).bfloat16())
        assert got["d"].tolist() == [n * (n - 1) // 2]
    mean = strategy.reduce("mean", mine["a"], axis=None)
    assert mean.tobytes() == (outside["a"] / np.float32(n)).tobytes()


@pytest.mark.parametrize("each", [1, 2, 3])
@pytest.mark.parametrize("gradients", ["sum", "mean"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients(each: int, gradients: str, dtype: torch.dtype) -> None:
    """One parameter has none on the odd replicas, another none at all."""
    strategy = strategy_of(each, gradients=gradients)
    with strategy.scope():
        always, often, never = (torch.nn.Parameter(torch.zeros(37, dtype=dtype)) for _ in range(3))
    strategy.mirror([always, often, never])
    n = SIZE * each
    values = [torch.from_numpy(value_of(i)).to(dtype) for i in range(n)]
    found = []

    def step() -> None:
        i = ms.get_replica_context().replica_id_in_sync_group
        loss = (always * values[i]).sum()
        if i % 2 == 0:
            loss = loss + (often * -0.0 * values[i]).sum() + (often * values[i]).sum()
        loss.backward()
        found.append([p.grad for p in (always, often, never)])

    strategy.run(step)
    factor = 1 / n if gradients == "mean" else 1
    zeros = torch.zeros(37, dtype=dtype)
    expected = by_definition([value.float() for value in values]) * factor
    expected_often = (
        by_definition([(zeros if i % 2 else values[i]).float() for i in range(n)]) * factor
    )
    for got_always, got_often, got_never in found:
        assert torch.equal(got_always, expected.to(dtype))
        assert torch.equal(got_often, expected_often.to(dtype))
        assert got_never is None


def test_threads_are_fixed_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    strategy = strategy_of(2)
    assert torch.get_num_threads() == 1
    assert strategy.extended.explain().endswith(
        f"deterministic: {2 * SIZE} replicas are added up in the order of their ids; intra-op threads: 1"
    )
    torch.set_num_threads(before)


def test_a_resumed_job_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    saved = strategy_of(2).extended.state_dict()
    strategy_of(2).extended.load_state_dict(saved)
    with pytest.raises(ValueError, match=f"'num_replicas_in_sync': {2 * SIZE}.*other bits"):
        strategy_of(1).extended.load_state_dict(saved)
    with pytest.raises(ValueError, match="OMP_NUM_THREADS=1"):
        ms.MultiWorkerMirroredStrategy(devices=["cpu:0", "cpu:1"]).extended.load_state_dict(saved)
    other = ms.MultiWorkerMirroredStrategy().extended.state_dict()
    strategy_of(2).extended.load_state_dict(other)  # it promised nothing


@several_ranks
@pytest.mark.parametrize("check", ["always", "never"])
@pytest.mark.parametrize("kind", [ms.MirroredStrategy, ms.MultiWorkerMirroredStrategy])
def test_ranks_that_differ_all_raise(kind: type, check: str) -> None:
    with pytest.raises(CollectiveMismatchError, match="rank 0: 1 threads, rank 1: not determin"):
        kind(comm=MPI.COMM_WORLD, deterministic=RANK == 0, check=check)


@several_ranks
def test_threads_that_differ_raise_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", str(1 + (RANK == 0)))
    with pytest.raises(CollectiveMismatchError, match="rank 0: 2 threads, rank 1: 1 threads"):
        strategy_of(1)
    torch.set_num_threads(1)


def test_what_leaves_the_order_open_is_refused() -> None:
    ops = ms.ReductionToOneDevice()
    with pytest.raises(ValueError, match="give one of them"):
        ms.MirroredStrategy(cross_device_ops=ops, deterministic=True)
    short = ms.experimental.CommunicationOptions(wire_dtype="bfloat16")
    with pytest.raises(ValueError, match="give one of them"):
        ms.MultiWorkerMirroredStrategy(communication_options=short, deterministic=True)
    with pytest.raises(ValueError, match="deterministic must be True or False"):
        ms.MirroredStrategy(deterministic=1)


@several_ranks
def test_ranks_with_different_numbers_of_replicas() -> None:
    """As 4 ranks that go on as 3 have them: the same sums as of equal numbers."""
    each = [1 + (rank < 2) for rank in range(SIZE)]
    strategy = strategy_of(each[RANK])
    n = sum(each)
    assert strategy.num_replicas_in_sync == n
    everyone = [value_of(i) for i in range(n)]

    def replica():
        context = ms.get_replica_context()
        i = context.replica_id_in_sync_group
        short = torch.from_numpy(value_of(i)).bfloat16()
        return (
            value_of(i),
            context.all_reduce("mean", value_of(i)),
            context.all_reduce("sum", short),
        )

    mine, mean, short = strategy.run(replica)
    total = strategy.reduce("sum", mine, axis=None)
    assert np.array_equal(total, by_definition(everyone))
    mean, short = (strategy.experimental_local_results(result)[0] for result in (mean, short))
    assert np.array_equal(mean, by_definition(everyone) / np.float32(n))
    floats = [torch.from_numpy(value).bfloat16().float() for value in everyone]
    assert torch.equal(short, by_definition(floats).bfloat16())
    ids = strategy.run(lambda: np.array([ms.get_replica_context().replica_id_in_sync_group]))
    assert strategy.reduce("mean", ids, axis=None).tolist() == [(n - 1) / 2]
    rows = strategy.run(lambda: ms.IndexedSlices(np.full((1, 2), 6.0), np.array([RANK]), (SIZE, 2)))
    mean = strategy.reduce("mean", rows, axis=None)
    dense = np.zeros((SIZE, 2))
    np.add.at(dense, mean.indices, mean.values)
    assert np.allclose(dense, np.array(each)[:, None] * 6.0 / n)
    assert strategy.gather(ids, axis=0).tolist() == list(range(n))

    batches = strategy.experimental_distribute_dataset([np.arange(2 * n)])
    (batch,) = batches
    for i, part in enumerate(strategy.experimental_local_results(batch)):
        first = 2 * (sum(each[:RANK]) + i)
        assert part.tolist() == [first, first + 1]
    files = ms.input.FileDataset([[i] for i in range(2 * n)], iter, n)
    if n % SIZE:
        with pytest.raises(
            ValueError, match=f"{n} replicas are spread unequally over {SIZE} ranks"
        ):
            list(strategy.experimental_distribute_dataset(files))


@several_ranks
def test_a_plain_value_counts_once_for_its_rank() -> None:
    """However many replicas that has: rank 0 has as many as all others together."""
    strategy = strategy_of(1 if RANK else SIZE - 1 or 1)
    mean = sum(range(SIZE)) / SIZE
    assert strategy.reduce("mean", float(RANK), axis=None) == mean
    ones = strategy.run(lambda: np.ones(3))
    both = strategy.reduce("mean", {"plain": np.array([RANK]), "ones": ones}, axis=None)
    assert both["plain"].tolist() == [mean]
    assert both["ones"].tolist() == [1.0] * 3
    extended = strategy.extended
    assert np.array(extended.reduce_to("mean", np.array([float(RANK)]), "cpu:0")).tolist() == [mean]
    pairs = [(np.array([float(RANK)]), "cpu:0"), (ones, "cpu:0"), (np.array([RANK]), "cpu:0")]
    plain, of_replicas, integers = extended.batch_reduce_to("mean", pairs)
    assert plain.tolist() == integers.tolist() == [mean]
    assert of_replicas.tolist() == [1.0] * 3


@several_ranks
def test_different_numbers_need_deterministic() -> None:
    devices = ["cpu:0", "cpu:1"][: 1 + (RANK == 0)]
    with pytest.raises(CollectiveMismatchError, match="rank 0 with 2 replicas, rank 1 with 1 repl"):
        ms.MultiWorkerMirroredStrategy(devices=devices)
