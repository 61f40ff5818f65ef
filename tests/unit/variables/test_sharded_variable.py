"""A variable of shards does what the whole would do."""

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

import mpistrat as ms

WHOLE = np.arange(12, dtype=np.float32).reshape(6, 2)
SIZES = ([2, 2, 2], [3, 1, 2], [6], [1, 5], [0, 6], [2, 2, 1, 1])


def sharded(sizes: Sequence[int], torch_: bool = False) -> ms.ShardedVariable:
    parts = np.split(WHOLE, np.cumsum(sizes)[:-1])
    return ms.ShardedVariable(
        [ms.Variable(torch.tensor(part) if torch_ else part) for part in parts]
    )


@pytest.mark.parametrize("torch_", [False, True], ids=["numpy", "torch"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_slice(sizes: list[int], torch_: bool) -> None:
    variable = sharded(sizes, torch_)
    bounds = (None, 0, 1, 3, 5, 6, 10, -1, -2, -7)
    for start, stop, step in itertools.product(bounds, bounds, (None, 1, 2, 3, -1, -2, -7)):
        key = slice(start, stop, step)
        found = variable[key]
        assert isinstance(found, torch.Tensor) is torch_
        assert np.array_equal(np.asarray(found), WHOLE[key]), key


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_other_keys(sizes: list[int]) -> None:
    variable = sharded(sizes)
    for row in range(-6, 6):
        assert np.array_equal(variable[row], WHOLE[row])
        assert variable[row, 1] == WHOLE[row, 1]
    assert np.array_equal(variable[1:4, 1], WHOLE[1:4, 1])
    assert np.array_equal(variable[..., 0], WHOLE[..., 0])
    mask = np.array([True, False, True, False, True, True])
    assert np.array_equal(variable[mask], WHOLE[mask])
    assert np.array_equal(variable[()], WHOLE)


def test_a_slice_reads_only_the_shards_that_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    variable = sharded([2, 2, 2])

    def read(self: object) -> None:
        raise AssertionError("it was read")

    for other in variable.variables[:2]:
        monkeypatch.setattr(other, "read_value", read.__get__(other))
    assert np.array_equal(variable[4:], WHOLE[4:])
    assert np.array_equal(variable[-1], WHOLE[-1])
    assert np.array_equal(variable.sparse_read([5, 4]), WHOLE[[5, 4]])


@pytest.mark.parametrize("key", [True, np.array([0, 1]), 1.0, "a", slice(1.0), slice(0, "b")])
def test_keys_that_are_none(key: object) -> None:
    with pytest.raises(TypeError, match="ShardedVariable"):
        sharded([3, 3])[key]


def test_updates_of_rows_go_to_their_shards() -> None:
    variable = sharded([2, 2, 2])
    assert variable.scatter_update(ms.IndexedSlices(np.full((2, 2), 7.0), [5, 0])) is variable
    wanted = WHOLE.copy()
    wanted[[5, 0]] = 7
    assert np.array_equal(variable.read_value(), wanted)
    variable.scatter_add(ms.IndexedSlices(np.ones((3, 2), np.float32), [1, 1, 4]))
    wanted[1] += 2
    wanted[4] += 1
    assert np.array_equal(variable.read_value(), wanted)


@pytest.mark.parametrize("row", [-1, 6])
def test_rows_that_are_not_there(row: int) -> None:
    variable = sharded([2, 2, 2])
    with pytest.raises(IndexError, match=f"row {row} of variable 'ShardedVariable'"):
        variable.sparse_read([0, row])
    with pytest.raises(IndexError, match="it has rows 0 to 5"):
        variable.scatter_add(ms.IndexedSlices(np.ones((2, 2)), [0, row]))
    assert np.array_equal(variable.read_value(), WHOLE)


@pytest.mark.parametrize("rows", [5, 7])
def test_a_value_of_another_size_changes_nothing(rows: int) -> None:
    """TensorFlow leaves out the tail of one that is too long."""
    variable = sharded([2, 2, 2])
    with pytest.raises(ms.errors.InvalidArgumentError, match=rf"the operand \[{rows}, 2\]"):
        variable.assign(np.zeros((rows, 2), np.float32))
    assert np.array_equal(variable.read_value(), WHOLE)


@pytest.mark.parametrize("torch_", [False, True])
@pytest.mark.parametrize("rows", [[4, 0, 2, 0], [5, 5, 1], [3, 2], [0, 1, 4]])
def test_rows_are_read_in_the_order_of_the_indices(torch_: bool, rows: list[int]) -> None:
    for sizes in ([6], [3, 3], [2, 2, 2]):
        assert np.array_equal(sharded(sizes, torch_).sparse_read(rows), WHOLE[rows])


def test_no_rows_at_all_are_read() -> None:
    assert sharded([3, 3]).sparse_read(np.array([], np.int64)).shape == (0, 2)


def test_its_state_is_that_of_the_whole() -> None:
    saved = sharded([2, 2, 2]).state()
    other = sharded([4, 2])
    other.assign(np.zeros((6, 2), np.float32))
    other.load_state(saved)
    assert np.array_equal(other.read_value(), WHOLE)


def test_it_counts_as_a_variable_in_checkpoints(tmp_path: Path) -> None:
    variable = sharded([3, 3])
    manager = ms.checkpoint.CheckpointManager(ms.checkpoint.Checkpoint(table=variable), tmp_path)
    manager.save(1)
    variable.assign(np.zeros((6, 2), np.float32))
    manager.restore_or_initialize()
    assert np.array_equal(variable.read_value(), WHOLE)


def test_what_does_not_fit_together() -> None:
    with pytest.raises(TypeError, match="takes variables, got array"):
        ms.ShardedVariable([np.zeros(2)])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="a list of variables"):
        ms.ShardedVariable([])
    with pytest.raises(ValueError, match="has no rows"):
        ms.ShardedVariable([ms.Variable(1.0)])


def test_lists_are_taken() -> None:
    variable = sharded([3, 3])
    variable.assign([[1, 2]] * 6)
    assert variable.numpy().tolist() == [[1, 2]] * 6


def test_iteration_gives_the_shards() -> None:
    shards = [ms.Variable(np.full((rows, 2), float(rows))) for rows in (2, 1)]
    whole = ms.ShardedVariable(shards)
    assert list(whole) == shards
    assert [shard.shape for shard in whole] == [(2, 2), (1, 2)]
    assert [a is b for a, b in zip(whole, shards, strict=True)] == [True, True]
    assert np.asarray(whole).shape == (3, 2)
    assert not hasattr(whole, "__len__")
