"""Maxima, minima and products over replicas: every dtype, library, way of bytes and strategy, as NumPy has them."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI

import mpistrat as ms
from support.rank_errors import assert_all_raise, assert_usable, errors_of_ranks

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
PAIR = ["cpu:0", "cpu:1"]
By = ms.CommunicationImplementation
OPS = {"max": np.maximum, "MIN": np.minimum, "Product": np.multiply}
DTYPES = ("bool", "uint8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64")


class OnlySums(ms.ReductionToOneDevice):
    """A program's own policy, which takes whatever is no mean for a sum."""

    def combine(self, reduce_op: ms.ReduceOp, values: Sequence[Any]) -> Any:
        assert reduce_op in (ms.ReduceOp.SUM, ms.ReduceOp.MEAN)
        return super().combine(reduce_op, values)


def by(implementation: By) -> ms.CommunicationOptions:
    return ms.CommunicationOptions(implementation=implementation)


KINDS: dict[str, Callable[[], Any]] = {
    "k=1": ms.MultiWorkerMirroredStrategy,
    "k=2": lambda: ms.MultiWorkerMirroredStrategy(devices=PAIR),
    "mpi": lambda: ms.MultiWorkerMirroredStrategy(None, by(By.MPI)),
    "ring": lambda: ms.MultiWorkerMirroredStrategy(None, by(By.RING)),
    "deterministic": lambda: ms.MultiWorkerMirroredStrategy(devices=PAIR, deterministic=True),
    "own policy": lambda: ms.MirroredStrategy(PAIR, OnlySums()),
    "central storage": ms.CentralStorageStrategy,
    "one device": lambda: ms.OneDeviceStrategy("cpu:0"),
}


@pytest.fixture(scope="module", params=KINDS)
def strategy(request: pytest.FixtureRequest) -> Any:
    return KINDS[request.param]()


def context() -> Any:
    return ms.get_replica_context()


def replica_id() -> int:
    return context().replica_id_in_sync_group


def values_of(dtype: str, replica: int, library: str = "numpy") -> Any:
    """One replica's: its number, with both signs, both zeros, and NaN and infinity on the first two replicas."""
    power = 2.0 ** (replica % 3)  # products of which no dtype rounds
    values = np.array([power, -power, 2.0, [0.0, -0.0][replica % 2], replica != 1])
    if "float" in dtype:
        odd = [[np.nan, 1.0], [np.inf, -np.inf]][replica] if replica < 2 else [1.0, 1.0]
        values = np.concatenate([values, odd, [-np.nan if replica == 1 else -np.inf]])
    if library == "numpy":
        return np.abs(values).astype(dtype) if dtype == "uint8" else values.astype(dtype)
    values = np.abs(values) if dtype == "uint8" else values
    return torch.as_tensor(values).to(getattr(torch, dtype))


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_every_dtype(strategy: Any, library: str) -> None:
    """In one structure: outside, and inside in one call."""
    dtypes = [name for name in DTYPES if library == "torch" or name != "bfloat16"]
    n = strategy.num_replicas_in_sync

    def make() -> dict[str, Any]:
        return {dtype: values_of(dtype, replica_id(), library) for dtype in dtypes}

    for name, combine in OPS.items():
        outside = strategy.reduce(name, strategy.run(make), axis=None)
        inside = strategy.run(lambda op=name: context().all_reduce(op, make()))
        for dtype in dtypes:
            everyone = [values_of(dtype, i, "torch") for i in range(n)]
            exact = "float64" if "float" in dtype else dtype
            with np.errstate(all="ignore"):
                expected = combine.reduce(
                    [v.to(getattr(torch, exact)).numpy() for v in everyone], dtype=exact
                )
            for result in (outside[dtype], *strategy.experimental_local_results(inside[dtype])):
                assert str(result.dtype).removeprefix("torch.") == dtype
                got = torch.as_tensor(result).to(getattr(torch, exact)).numpy()
                np.testing.assert_array_equal(got, expected)
                if name != "Product" and n > 1 and "float" in dtype:
                    assert np.signbit(got[3]) == (name == "MIN")  # of the zeros


def test_of_numbers_and_along_axes(strategy: Any) -> None:
    n = strategy.num_replicas_in_sync
    last = n - 1
    assert strategy.reduce("max", strategy.run(replica_id), axis=None) == last
    assert strategy.reduce("product", strategy.run(lambda: replica_id() + 1), None) == np.prod(
        range(1, n + 1)
    )
    assert strategy.reduce("min", strategy.run(lambda: replica_id() < last), None) is (n == 0)
    for make in (np.array, torch.tensor):
        # Sizes differ; the first replica has nothing at all
        rows = strategy.run(
            lambda make=make: make([[1.0 + replica_id(), -2.0]] * 3)[: replica_id()]
        )
        assert (
            strategy.reduce("max", rows, axis=0).tolist() == [n, -2.0] if n > 1 else [-np.inf] * 2
        )
        assert float(strategy.reduce("min", rows, axis=(0, 1))) == (-2 if n > 1 else np.inf)
        flags = strategy.run(lambda make=make: make([[replica_id() == last], [False]]))
        reduced = strategy.reduce("max", flags, axis=0)
        assert (reduced.tolist(), str(reduced.dtype)[-4:]) == ([True], "bool")
        assert strategy.reduce("product", flags, axis=[0]).tolist() == [False]


def test_reduce_to(strategy: Any) -> None:
    extended, n = strategy.extended, strategy.num_replicas_in_sync
    value = strategy.run(lambda: np.array([replica_id() + 1.0, 3.0]))
    assert np.asarray(extended.reduce_to("max", value, "cpu:0")).tolist() == [n, 3]
    for result in extended.batch_reduce_to(ms.ReduceOp.MIN, [(value, "cpu:0"), (value, value)]):
        assert np.asarray(strategy.experimental_local_results(result)[0]).tolist() == [1, 3]
    with strategy.scope():
        weight = ms.Variable(np.array([2.0]))
    assert strategy.reduce("max", weight, axis=None).tolist() == [2]
    if n > 1 and isinstance(weight, ms.DistributedValues):
        with pytest.raises(AssertionError, match="PRODUCT of a mirrored value"):
            strategy.reduce("product", weight, axis=None)


def test_a_product_does_not_depend_on_how_replicas_are_spread() -> None:
    values = np.array([1.1, 3.3, 0.7, 1e-3, 5.7, 1e4, 0.3, 9.1], "f4")[: 2 * SIZE]
    strategy = ms.MultiWorkerMirroredStrategy(devices=PAIR, deterministic=True)
    product = strategy.reduce("product", strategy.run(lambda: values[replica_id()].copy()), None)
    total = values[0]
    for value in values[1:]:
        total = total * value
    assert float(product) == float(total)


@pytest.fixture(scope="module")
def pair() -> Any:
    return ms.MultiWorkerMirroredStrategy(devices=PAIR)


WRONG: dict[str, tuple[str, Callable[[], Any]]] = {
    "slices": ("NotImplementedError", lambda: ms.IndexedSlices(np.ones((1, 2)), np.zeros(1, int))),
    "complex": ("InvalidArgumentError", lambda: np.ones(2, complex)),
    "string": ("TypeError", lambda: "loss"),
    "shapes": ("InvalidArgumentError", lambda: np.ones((2, 1 + replica_id() % 2))),
}


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("where", ["reduce", "axis", "all_reduce"])
@pytest.mark.parametrize("wrong", WRONG)
def test_what_has_no_maximum(pair: Any, wrong: str, where: str) -> None:
    """On one rank, an error of all."""
    error, make = WRONG[wrong]

    def call(faulty: bool) -> None:
        made = make if faulty else lambda: np.ones(2)
        if where == "all_reduce":
            pair.run(lambda: context().all_reduce("max", made()))
        else:
            pair.reduce("max", pair.run(made), axis=0 if where == "axis" else None)

    assert_all_raise(error, SIZE - 1, lambda: call(RANK == SIZE - 1))
    assert {name for name, _, _ in errors_of_ranks(lambda: call(True))} == {error}
    assert_usable(pair)


@pytest.mark.parametrize("op", OPS)
def test_tensors_that_require_a_gradient(pair: Any, op: str) -> None:
    def replica(faulty: bool) -> Any:
        x = torch.full((2,), 1.0 + replica_id(), requires_grad=faulty)
        return context().all_reduce(op, x)

    for name, message, _ in errors_of_ranks(lambda: pair.run(replica, (True,))):
        assert name == "NotImplementedError"
        assert "tensor.detach()" in message
    assert_all_raise("NotImplementedError", 0, lambda: pair.run(replica, (RANK == 0,)))
    with torch.no_grad():
        assert pair.run(replica, (True,)) is not None
    assert_usable(pair)


@pytest.mark.mpi(min_size=2)
def test_ranks_that_differ(pair: Any) -> None:
    """In the operation, or in shapes."""
    ones = pair.run(lambda: np.ones(2))
    for call in (
        lambda: pair.reduce("max" if RANK else "min", ones, axis=None),
        lambda: pair.reduce("max", pair.run(lambda: np.ones(2 + RANK)), axis=None),
    ):
        assert {name for name, _, _ in errors_of_ranks(call)} == {"CollectiveMismatchError"}
    assert_usable(pair)
