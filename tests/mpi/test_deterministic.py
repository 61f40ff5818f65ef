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
