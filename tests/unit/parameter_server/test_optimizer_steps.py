"""Gradients of all workers, combined on a server when all have ended a step."""

import itertools

import numpy as np
import pytest
import torch

from mpistrat.indexed_slices import IndexedSlices
from mpistrat.parameter_server.protocol.messages import GradientMethod, TensorSpec
from mpistrat.parameter_server.protocol.tables import Table
from mpistrat.parameter_server.rpc.segments import Segments
from mpistrat.parameter_server.server.server_optimizers import OptimizerDefinition, ServerOptimizer
from mpistrat.parameter_server.server.store import ServerOptimizers

KEY, OPTIMIZER = 5, 1


def table_and_steps(array, cls=torch.optim.SGD, **keywords) -> tuple[Table, ServerOptimizers]:
    table = Table("w", TensorSpec.of(array), Segments())
    table.update("assign", array)
    steps = ServerOptimizers()
    definition = OptimizerDefinition(cls, {"lr": 1.0, **keywords})
    steps.by_key[OPTIMIZER, KEY] = ServerOptimizer(table.array, definition)
    return table, steps


def end(steps, before, workers=0) -> list[tuple[str, Exception]]:
    """Args: workers: that took part in each round; no fewer than sent a gradient."""
    return steps.end_rounds(before, lambda number: workers)


def push(steps, table, gradient, worker, number, mean=False, lr=1.0) -> None:
    steps.step(KEY, table, GradientMethod(OPTIMIZER, {"lr": lr}, number, mean), gradient, worker)


@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_a_round_is_one_step_of_the_sum_or_the_mean(dtype: str, mean: bool) -> None:
    kind = getattr(torch, dtype)
    table, steps = table_and_steps(torch.zeros(4, dtype=kind))
    for worker in range(4):
        push(steps, table, torch.full((4,), worker + 1.0, dtype=kind), worker, 0, mean)
    assert not table.array.any()
    end(steps, 0)
    assert not table.array.any()
    end(steps, 1)
    assert table.array.tolist() == [-2.5 if mean else -10] * 4
    assert table.updates == 2  # the first value, and one step
    end(steps, 1 << 62)
    assert table.updates == 2


def test_the_bits_do_not_depend_on_who_came_first() -> None:
    rng = np.random.default_rng(0)
    gradients = [
        (rng.standard_normal(1000) * 10.0 ** rng.integers(-6, 7)).astype(np.float32)
        for _ in range(4)
    ]
    expected = None
    for order in itertools.permutations(range(4)):
        table, steps = table_and_steps(np.zeros(1000, np.float32))
        for worker in order:
            push(steps, table, gradients[worker].copy(), worker, 0)
        end(steps, 1)
        expected = table.array.copy() if expected is None else expected
        assert np.array_equal(table.array, expected)
    others = [-sum(gradients[worker] for worker in order) for order in ((3, 2, 1, 0), (1, 3, 0, 2))]
    assert any(not np.array_equal(other, expected) for other in others)  # the order matters


def test_a_worker_ahead_does_not_mix_rounds() -> None:
    table, steps = table_and_steps(np.zeros(2, np.float32), momentum=0.5)
    for number in range(3):
        push(steps, table, np.full(2, number + 1, np.float32), 0, number)
    push(steps, table, np.full(2, 10, np.float32), 1, 0)
    end(steps, 1)
    assert table.array.tolist() == [-11, -11]
    push(steps, table, np.full(2, 20, np.float32), 1, 1)
    end(steps, 2)
    assert table.array.tolist() == [-11 - (5.5 + 22)] * 2


def test_two_steps_within_a_round_are_two_steps() -> None:
    table, steps = table_and_steps(np.zeros(1, np.float32))
    for worker, value in ((0, 1), (0, 10), (1, 2), (1, 20)):
        push(steps, table, np.full(1, value, np.float32), worker, 0)
    end(steps, 1)
    assert table.array.tolist() == [-33]
    assert table.updates == 3


@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("make", [np.asarray, torch.as_tensor], ids=["numpy", "torch"])
def test_rows_of_all_workers(make, mean: bool) -> None:
    table, steps = table_and_steps(make(np.zeros((5, 2), np.float32)))
    for worker, rows in enumerate(([0, 4, 4], [4], [])):
        values = make(np.full((len(rows), 2), worker + 1, np.float32))
        push(steps, table, IndexedSlices(values, make(np.array(rows, np.int64))), worker, 0, mean)
    end(steps, 1)
    expected = np.zeros((5, 2))
    expected[0], expected[4] = -1, -4
    np.testing.assert_allclose(table.array, expected / (3 if mean else 1), rtol=1e-6)


def test_a_gradient_may_change_once_it_was_pushed() -> None:
    table, steps = table_and_steps(np.zeros(3, np.float32))
    gradient = np.ones(3, np.float32)
    push(steps, table, gradient, 0, 0)
    gradient[:] = 100
    end(steps, 1)
    assert table.array.tolist() == [-1, -1, -1]


@pytest.mark.parametrize("number", [None, 0], ids=["at once", "in a round"])
def test_gradients_that_do_not_fit_are_refused_when_they_come(number) -> None:
    table, steps = table_and_steps(np.zeros((3, 2), np.float32))
    ones, rows = np.ones((1, 2), np.float32), np.array([0])
    for error, gradient in (
        (ValueError, np.ones((2, 3), np.float32)),
        (ValueError, np.float32(1)),
        (TypeError, np.ones((3, 2))),
        (ValueError, IndexedSlices(np.ones((1, 3), np.float32), rows)),
        (TypeError, IndexedSlices(np.ones((1, 2)), rows)),
        (IndexError, IndexedSlices(ones, np.array([3]))),
        (IndexError, IndexedSlices(ones, np.array([-1]))),
    ):
        with pytest.raises(error):
            push(steps, table, gradient, 0, number)
    push(steps, table, IndexedSlices(ones, np.array([2])), 0, number)
    end(steps, 1)
    assert table.array.tolist() == [[0, 0], [0, 0], [-1, -1]]


def test_rows_and_the_whole_in_one_round() -> None:
    table, steps = table_and_steps(np.zeros((3, 2), np.float32))
    push(steps, table, np.ones((3, 2), np.float32), 1, 0)
    with pytest.raises(TypeError, match=r"'w' is one of some rows .* \(rank 1\)"):
        push(steps, table, IndexedSlices(np.ones((1, 2), np.float32), np.array([0])), 2, 0)
    end(steps, 1)
    assert table.array.tolist() == [[-1, -1]] * 3


@pytest.mark.parametrize("cls", [torch.optim.SparseAdam, torch.optim.ASGD])
def test_optimizers_that_take_one_kind_only(cls) -> None:
    table, steps = table_and_steps(np.zeros((3, 2), np.float32), cls)
    whole = np.ones((3, 2), np.float32)
    rows = IndexedSlices(whole[:1], np.array([0]))
    bad, good = (whole, rows) if cls is torch.optim.SparseAdam else (rows, whole)
    with pytest.raises(TypeError, match="some rows"):
        push(steps, table, bad, 0, 0)
    push(steps, table, good, 0, 0)
    end(steps, 1)
    assert table.array.any()


def test_a_step_that_a_dead_worker_did_not_end_is_made_without_it() -> None:
    table, steps = table_and_steps(np.zeros(3, np.float32))
    for worker in range(2):
        push(steps, table, np.ones(3, np.float32), worker, 0, mean=True)
    push(steps, table, np.full(3, 100, np.float32), 1, 1, mean=True)
    steps.forget(1, ended=1)
    push(steps, table, np.ones(3, np.float32), 0, 1, mean=True)
    push(steps, table, np.full(3, 100, np.float32), 1, 2)
    steps.forget(1, ended=1)
    end(steps, 3)
    assert table.array.tolist() == [-2] * 3


@pytest.mark.parametrize("rows", [False, True])
def test_who_sends_no_gradient_counts_in_the_mean(rows: bool) -> None:
    table, steps = table_and_steps(np.zeros((1, 2), np.float32))
    gradient = np.full((1, 2), 8, np.float32)
    for worker in range(2):
        sent = IndexedSlices(gradient, np.array([0])) if rows else gradient
        push(steps, table, sent, worker, 0, mean=True)
    end(steps, 1, workers=4)
    assert table.array.tolist() == [[-4, -4]]


def test_what_the_optimizer_raises_is_told_and_the_next_round_is_made() -> None:
    table, steps = table_and_steps(np.zeros(3, np.float32))
    push(steps, table, np.ones(3, np.float32), 0, 0, lr=None)
    push(steps, table, np.full(3, 10, np.float32), 0, 1)
    ((name, error),) = end(steps, 1)
    assert name == "w"
    assert isinstance(error, TypeError)
    assert table.array.tolist() == [0, 0, 0]
    assert end(steps, 2) == []
    assert table.array.tolist() == [-10] * 3


def test_a_step_that_is_tried_again_is_one_step() -> None:
    table, steps = table_and_steps(np.zeros(1, np.float32))
    push(steps, table, np.ones(1, np.float32), 0, 0)
    push(steps, table, np.ones(1, np.float32), 1, 0)
    steps.forget(1, ended=0)
    push(steps, table, np.full(1, 10, np.float32), 1, 0)
    end(steps, 1)
    assert table.array.tolist() == [-11]
    assert table.updates == 2
