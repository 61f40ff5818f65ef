"""Steps on a server's arrays equal those of torch.optim on the whole parameter."""

import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import Optimizer

from mpistrat.indexed_slices import IndexedSlices
from mpistrat.parameter_server.server.server_optimizers import (
    OptimizerDefinition,
    ServerOptimizer,
    hyperparameters,
    join_states,
    split_state,
)

ROWS, COLUMNS, STEPS = 11, 5, 5
O = torch.optim  # noqa: E741
MAKERS: dict[str, Callable[[list[torch.Tensor]], Optimizer]] = {
    "sgd": lambda p: O.SGD(p, lr=0.1),
    "decay": lambda p: O.SGD(p, lr=0.1, weight_decay=0.2, maximize=True),
    "momentum": lambda p: O.SGD(p, lr=0.1, momentum=0.9),
    "dampening": lambda p: O.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
    "nesterov": lambda p: O.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: O.Adam(p, lr=0.1, weight_decay=0.1),
    "amsgrad": lambda p: O.Adam(p, lr=torch.tensor(0.1), amsgrad=True, maximize=True),
    "adamw": lambda p: O.AdamW(p, lr=0.1),
    "adamax": lambda p: O.Adamax(p, lr=0.1),
    "nadam": lambda p: O.NAdam(p, lr=0.1),
    "radam": lambda p: O.RAdam(p, lr=0.1),
    "adagrad": lambda p: O.Adagrad(p, lr=0.1, lr_decay=0.1, initial_accumulator_value=0.3),
    "adadelta": lambda p: O.Adadelta(p, lr=0.1),
    "rmsprop": lambda p: O.RMSprop(p, lr=0.1, momentum=0.5, centered=True),
    "rprop": lambda p: O.Rprop(p, lr=0.1),
    "asgd": lambda p: O.ASGD(p, lr=0.1, t0=2),
}
BY_ROWS = [name for name in MAKERS if name != "asgd"]


def values(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(ROWS, COLUMNS)).astype(np.float32)


class Worker:
    """A tensor with the user's optimizer, whose learning rate falls."""

    def __init__(self, make: Callable[[list[torch.Tensor]], Optimizer]) -> None:
        self.parameter = torch.nn.Parameter(torch.from_numpy(values()))
        self.optimizer = make([self.parameter])
        self.group = self.optimizer.param_groups[0]
        # As it reaches a server.
        definition = OptimizerDefinition.of(self.optimizer, self.group)
        self.definition: OptimizerDefinition = pickle.loads(pickle.dumps(definition))

    def steps(self, first: int, end: int) -> Iterator[tuple[np.ndarray, dict[str, Any]]]:
        for step in range(first, end):
            self.group["lr"] = 0.1 / (step + 1)
            gradient = values(seed=step + 1)
            self.parameter.grad = torch.from_numpy(gradient.copy())
            yield gradient, pickle.loads(pickle.dumps(hyperparameters(self.group)))
            self.optimizer.step()

    def optimizer_of(self, array: np.ndarray, **options: Any) -> ServerOptimizer:
        return ServerOptimizer(array, self.definition, **options)

    def expect(self, *pieces: np.ndarray) -> None:
        expected = self.parameter.detach().numpy()
        np.testing.assert_allclose(np.concatenate(pieces), expected, rtol=2e-5, atol=2e-6)


def pieces_of(array: np.ndarray, *rows: int) -> list[np.ndarray]:
    return [piece.copy() for piece in np.split(array, np.cumsum(rows)[:-1])]


@pytest.mark.parametrize("name", MAKERS)
def test_dense_steps(name: str) -> None:
    worker, array = Worker(MAKERS[name]), values()
    remote = worker.optimizer_of(array)
    for gradient, numbers in worker.steps(0, STEPS):
        before = gradient.copy()
        remote.step(gradient, numbers)
        np.testing.assert_array_equal(gradient, before)
    worker.expect(array)


@pytest.mark.parametrize("name", MAKERS)
def test_shards_and_another_number_of_them(name: str) -> None:
    """Two servers, from whose state three go on."""
    worker = Worker(MAKERS[name])
    two = pieces_of(values(), 4, 7)
    shards = [worker.optimizer_of(piece, shard=True) for piece in two]
    for gradient, numbers in worker.steps(0, 3):
        for shard, part in zip(shards, pieces_of(gradient, 4, 7), strict=True):
            shard.step(part, numbers)
    worker.expect(*two)
    whole = join_states([shard.state_dict() for shard in shards])
    kept = pickle.dumps(whole)
    rows = (3, 0, 8)
    three = pieces_of(np.concatenate(two), *rows)
    moved = [worker.optimizer_of(piece, shard=True) for piece in three]
    for shard, state in zip(moved, split_state(whole, rows), strict=True):
        shard.load_state_dict(state)
    for gradient, numbers in worker.steps(3, STEPS):
        for shard, part in zip(moved, pieces_of(gradient, *rows), strict=True):
            shard.step(part, numbers)
    worker.expect(*three)
    assert pickle.dumps(whole) == kept


class ByRow:
    """What lazy steps mean: each row has state of its own, stepped by torch when the row is touched.

    But for the count of steps, which is one for all.
    """

    def __init__(self, make: Callable[[list[torch.Tensor]], Optimizer]) -> None:
        self.rows = [torch.nn.Parameter(torch.from_numpy(row.copy())) for row in values()]
        self.optimizers = [make([row]) for row in self.rows]
        self.counts: dict[str, Any] = {}
        self.begun = False

    def step(self, rows: np.ndarray, indices: list[int], lr: float) -> None:
        sums: dict[int, np.ndarray] = {}
        for row, index in zip(rows, indices, strict=True):
            sums[index] = sums.get(index, 0) + row
        later = self.counts
        for index, total in sums.items():
            parameter, optimizer = self.rows[index], self.optimizers[index]
            state = optimizer.state[parameter]
            if (
                self.begun and not state
            ):  # after the first push rows begin as a step by zero leaves them
                parameter.grad = torch.zeros_like(parameter)
                kept = parameter.detach().clone()
                with torch.no_grad():
                    parameter.zero_()
                    optimizer.step()
                    parameter.copy_(kept)
                state = optimizer.state[parameter]
            state.update({name: torch.clone(value) for name, value in self.counts.items()})
            optimizer.param_groups[0]["lr"] = lr
            parameter.grad = torch.from_numpy(total.copy())
            optimizer.step()
            state = optimizer.state[parameter]
            later = {name: value.clone() for name, value in state.items() if value.ndim == 0}
        self.counts, self.begun = later, True


PUSHES = [[3], [3, 7, 3], [0, 10, 7], [10, 3, 3, 3], [5, 4]]


@pytest.mark.parametrize("name", BY_ROWS)
@pytest.mark.parametrize("rows", [(ROWS,), (4, 7)])
def test_steps_of_some_rows(name: str, rows: tuple[int, ...]) -> None:
    worker, oracle = Worker(MAKERS[name]), ByRow(MAKERS[name])
    arrays = pieces_of(values(), *rows)
    shards = [worker.optimizer_of(array, shard=len(rows) > 1) for array in arrays]
    firsts = np.cumsum((0, *rows[:-1]))
    for number, indices in enumerate(PUSHES):
        gradient, at = values(seed=number + 1)[: len(indices)], np.array(indices)
        oracle.step(gradient, indices, lr=0.1 / (number + 1))
        numbers = {**hyperparameters(worker.group), "lr": 0.1 / (number + 1)}
        for shard, first, count in zip(shards, firsts, rows, strict=True):
            here = (first <= at) & (at < first + count)
            shard.step(IndexedSlices(gradient[here], at[here] - first), numbers)
    expected = np.stack([row.detach().numpy() for row in oracle.rows])
    np.testing.assert_allclose(np.concatenate(arrays), expected, rtol=2e-5, atol=2e-6)
    untouched = sorted(set(range(ROWS)) - {index for push in PUSHES for index in push})
    np.testing.assert_array_equal(np.concatenate(arrays)[untouched], values()[untouched])


def test_sparse_adam() -> None:
    """torch's own lazy Adam, which takes sparse gradients alone."""
    embedding = torch.nn.Embedding(ROWS, COLUMNS, sparse=True)
    optimizer = torch.optim.SparseAdam(embedding.parameters(), lr=0.1)
    array = embedding.weight.detach().numpy().copy()
    remote = ServerOptimizer(array, OptimizerDefinition.of(optimizer, optimizer.param_groups[0]))
    for indices in ([1, 4, 1], [4, 9], [9, 1, 2]):
        optimizer.zero_grad()
        (embedding(torch.tensor(indices)) ** 2).sum().backward()
        gradient = embedding.weight.grad
        assert gradient is not None
        slices = IndexedSlices(gradient._values().numpy(), gradient._indices()[0].numpy())
        remote.step(slices, hyperparameters(optimizer.param_groups[0]))
        optimizer.step()
    np.testing.assert_allclose(array, embedding.weight.detach().numpy(), rtol=1e-5)
    with pytest.raises(TypeError, match="SparseAdam takes gradients of some rows"):
        remote.step(array, {})


def test_dense_and_sparse_steps_share_state() -> None:
    worker, array = Worker(MAKERS["adam"]), values()
    remote = worker.optimizer_of(array)
    for number, (gradient, numbers) in enumerate(worker.steps(0, 4)):
        if number % 2:
            remote.step(gradient, numbers)
        else:
            remote.step(IndexedSlices(gradient, np.arange(ROWS, dtype=np.int32)), numbers)
    worker.expect(array)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", ["momentum", "adam", "rmsprop"])
def test_dtypes(dtype: torch.dtype, name: str) -> None:
    parameter = torch.nn.Parameter(torch.from_numpy(values()).to(dtype))
    optimizer = MAKERS[name]([parameter])
    array = parameter.detach().clone()
    definition = OptimizerDefinition.of(optimizer, optimizer.param_groups[0])
    numbers = hyperparameters(optimizer.param_groups[0])
    state: dict[str, Any] = {}
    for step in range(3):
        remote = ServerOptimizer(array, definition)  # anew, as from a checkpoint
        remote.load_state_dict(state)
        gradient = torch.from_numpy(values(seed=step)).to(dtype)
        rows = IndexedSlices(gradient, np.arange(ROWS))
        remote.step(rows if step == 1 else gradient, numbers)
        state = remote.state_dict()
        parameter.grad = gradient
        optimizer.step()
    tolerance = {torch.float64: 1e-12, torch.bfloat16: 1e-2}[dtype]
    torch.testing.assert_close(array, parameter.detach(), rtol=tolerance, atol=tolerance)


def test_scalar() -> None:
    array = np.array(2.0, np.float32)
    parameter = torch.nn.Parameter(torch.tensor(2.0))
    optimizer = torch.optim.Adam([parameter], lr=0.1)
    remote = ServerOptimizer(array, OptimizerDefinition.of(optimizer, optimizer.param_groups[0]))
    for _ in range(2):
        parameter.grad = torch.tensor(3.0)
        remote.step(np.array(3.0, np.float32), hyperparameters(optimizer.param_groups[0]))
        optimizer.step()
    np.testing.assert_allclose(array, parameter.detach().numpy(), rtol=1e-6)


@pytest.mark.parametrize("name", ["sgd", "adam", "rmsprop"])
def test_how_a_worker_with_a_gpu_steps(name: str) -> None:
    gpu = {"foreach": True, "fused": True, "capturable": True, "differentiable": True}
    worker, array = Worker(MAKERS[name]), values()
    had = worker.definition.keywords
    asked = {**had, **{flag: value for flag, value in gpu.items() if flag in had}}
    remote = ServerOptimizer(array, OptimizerDefinition(type(worker.optimizer), asked))
    for gradient, numbers in worker.steps(0, 3):
        remote.step(gradient, {**numbers, **gpu})
    worker.expect(array)


@pytest.mark.filterwarnings("error")
def test_memory_stays_the_server_s_and_the_caller_s() -> None:
    """Read-only gradients are left alone, and no gradient is kept; the array is updated where it is."""
    memory = np.zeros(2 * ROWS * COLUMNS, np.float32)
    array = memory[ROWS * COLUMNS :].reshape(ROWS, COLUMNS)
    remote = Worker(MAKERS["sgd"]).optimizer_of(array)
    gradient = values()
    gradient.flags.writeable = False
    remote.step(gradient, {"lr": 1.0})
    remote.step(np.asfortranarray(gradient), {"lr": 1.0})
    np.testing.assert_allclose(memory[ROWS * COLUMNS :].reshape(ROWS, COLUMNS), -2 * gradient)
    assert not memory[: ROWS * COLUMNS].any()
    own = np.zeros_like(memory).reshape(-1, COLUMNS)[:ROWS]
    kept = weakref.ref(own)
    remote.step(own, {"lr": 1.0})
    del own
    assert kept() is None


BAD: dict[str, tuple[Any, type[Exception], str]] = {
    "shape": (np.zeros((3, COLUMNS), np.float32), ValueError, r"shape \[3, 5\].*\[11, 5\]"),
    "dtype": (np.zeros((ROWS, COLUMNS)), TypeError, "float64.*float32"),
    "row": (IndexedSlices(np.ones((1, 4), np.float32), [0]), ValueError, r"\[4\].*\[11, 5\]"),
    "rows' dtype": (IndexedSlices(np.ones((1, COLUMNS)), [0]), TypeError, "float64.*float32"),
    "index": (IndexedSlices(np.ones((1, COLUMNS), np.float32), [ROWS]), IndexError, "row 11 of"),
    "negative": (
        IndexedSlices(np.ones((2, COLUMNS), np.float32), [2, -1]),
        IndexError,
        "row -1 of an array of 11",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_gradients_change_nothing(name: str) -> None:
    gradient, error, text = BAD[name]
    worker, array = Worker(MAKERS["adam"]), values()
    remote = worker.optimizer_of(array)
    with pytest.raises(error, match=text):
        remote.step(gradient, {})
    np.testing.assert_array_equal(array, values())
    for good, numbers in worker.steps(0, STEPS):
        remote.step(good, numbers)
    worker.expect(array)


def test_optimizers_that_read_whole_parameters() -> None:
    parameter = torch.nn.Parameter(torch.from_numpy(values()))
    worker, array = Worker(lambda p: torch.optim.Adafactor(p, lr=0.1)), values()
    with pytest.raises(TypeError, match=r"shards.*Adafactor is not known to update el"):
        worker.optimizer_of(array, shard=True)
    remote = worker.optimizer_of(array)
    for gradient, numbers in worker.steps(0, 2):
        with pytest.raises(TypeError, match=r"some rows.*Adafactor"):
            remote.step(IndexedSlices(gradient[:1], [0]), numbers)
        remote.step(gradient, numbers)
        again = worker.optimizer_of(array)
        again.load_state_dict(remote.state_dict())
        remote = again
    worker.expect(array)
    lbfgs = torch.optim.LBFGS([parameter])
    with pytest.raises(TypeError, match=r"LBFGS\.step needs a closure"):
        OptimizerDefinition.of(lbfgs, lbfgs.param_groups[0])
    asgd = Worker(MAKERS["asgd"]).optimizer_of(array)
    with pytest.raises(TypeError, match="ASGD averages"):
        asgd.step(IndexedSlices(values()[:1], [0]), {})


class Halving(Optimizer):
    """One of the user's, of which torch knows nothing."""

    elementwise = True

    def __init__(self, params: Any, factor: float, unknown: int = 0, **more: Any) -> None:
        super().__init__(params, {"factor": factor, **more})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["count"] = state.get("count", 0) + 1
            parameter.sub_(parameter.grad * self.param_groups[0]["factor"] / state["count"])


def test_optimizer_of_the_user_s() -> None:
    parameter = torch.nn.Parameter(torch.from_numpy(values()))
    incomplete = Halving([parameter], 0.5)
    with pytest.raises(TypeError, match=r"Halving.*constructor's unknown"):
        OptimizerDefinition.of(incomplete, incomplete.param_groups[0])
    definition = OptimizerDefinition(Halving, {"factor": 0.5})
    array = values()
    remote = ServerOptimizer(array, definition, shard=True)
    remote.step(IndexedSlices(np.ones((1, COLUMNS), np.float32), [2]), {"factor": 0.25})
    remote.step(IndexedSlices(np.ones((1, COLUMNS), np.float32), [2]), {"factor": 0.5})
    np.testing.assert_allclose(array[2], values()[2] - 0.5, rtol=1e-6)
    assert remote.state_dict() == {"count": 2}


def test_bad_state() -> None:
    worker, array = Worker(MAKERS["adam"]), values()
    remote = worker.optimizer_of(array)
    for gradient, numbers in worker.steps(0, 1):
        remote.step(gradient, numbers)
    with pytest.raises(ValueError, match=r"exp_avg has shape \[11, 5\], its array \[4, 5\]"):
        worker.optimizer_of(array[:4].copy()).load_state_dict(remote.state_dict())
    with pytest.raises(ValueError, match="different state"):
        join_states([remote.state_dict(), {}])
    with pytest.raises(ValueError, match="C-contiguous"):
        worker.optimizer_of(array.T)


@pytest.mark.parametrize(
    "make", [MAKERS["momentum"], lambda p: O.SparseAdam(p, lr=0.1)], ids=["sgd", "sparse adam"]
)
def test_the_array_is_stepped_where_it_is(
    make: Callable[[list[torch.Tensor]], Optimizer],
) -> None:
    """Whatever the program's default device is, "meta" in place of an accelerator."""
    definition, rows = Worker(make).definition, IndexedSlices(values(1)[:3], np.array([4, 2, 4]))
    array, expected = values(), values()
    with torch.device("meta"):
        ServerOptimizer(array, definition).step(rows, {})
    ServerOptimizer(expected, definition).step(rows, {})
    assert (array == expected).all()
    assert (array != values()).any()
