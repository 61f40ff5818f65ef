"""`ShardedVariable`: a variable that is split into several variables along its first axis."""

from __future__ import annotations

import bisect
import types
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from mpistrat import arrays
from mpistrat.arrays import Array
from mpistrat.indexed_slices import IndexedSlices
from mpistrat.variables.updates import check_is_slices, check_rows, check_shape, numbers_for
from mpistrat.variables.variable import Variable


class ShardedVariable(Variable):
    """A variable that is split into several variables, its shards: they hold its rows, in order.

    A program reads and indexes it like the whole variable, by integers, slices, `...`, None and masks. Reading rows by
    an integer, a slice or `sparse_read` reads only the shards that have them. `assign`, `assign_add` and `assign_sub`
    take the whole value. These and the `scatter` methods return the sharded variable itself. Arithmetic reads the whole
    value. Iteration yields the shards.

    Args:
        variables: the shards, of one dtype, with shapes that differ only in their first size.
        name: name for error messages and checkpoints.
    Attributes:
        variables: list of the shards.
        offsets: list of the first row of each shard.
    Raises:
        TypeError: `variables` is no list of variables.
        ValueError: their dtypes or shapes do not fit together.

    Example:
        >>> table = ms.ShardedVariable([ms.Variable([1.0, 2.0]), ms.Variable([3.0])], name="table")
        >>> table.read_value(), table.sparse_read([2, 0])
        (array([1., 2., 3.], dtype=float32), array([3., 1.], dtype=float32))
        >>> table.load_state(table.state() + 1)
        >>> table[1:], table.offsets
        (array([3., 4.], dtype=float32), [0, 2])
    """

    def __init__(self, variables: Sequence[Variable], name: str = "ShardedVariable") -> None:
        if not isinstance(variables, (list, tuple)) or not variables:
            raise TypeError(f"ShardedVariable takes a list of variables, got {variables!r:.80}")
        first = variables[0]
        for variable in variables:
            if not isinstance(variable, Variable):
                raise TypeError(f"ShardedVariable takes variables, got {variable!r:.80}")
            if not variable.shape:
                raise ValueError(
                    f"variable {variable.name!r} is a number, and has no rows to be a shard of"
                )
            if variable.dtype != first.dtype or variable.shape[1:] != first.shape[1:]:
                raise ValueError(
                    "shards must have one dtype, and shapes that differ in their first size only, got "
                    f"{first.dtype} {list(first.shape)} and {variable.dtype} {list(variable.shape)}"
                )
        self.variables = list(variables)
        self.name = name
        self._division = Division(name, [variable.shape[0] for variable in variables])
        self.offsets = self._division.offsets
        self.trainable = first.trainable
        self.synchronization = first.synchronization
        self.aggregation = first.aggregation
        self.strategy = getattr(first, "strategy", None)

    @property
    def shape(self) -> tuple[int, ...]:
        rows = self._division.ends[-1]
        return (rows, *self.variables[0].shape[1:])

    @property
    def dtype(self) -> Any:
        return self.variables[0].dtype

    def read_value(self) -> Array:
        values = [variable.read_value() for variable in self.variables]
        return self._joined(values)

    def state(self) -> Array:
        states = [variable.state() for variable in self.variables]
        return self._joined(states)

    def load_state(self, state: Any) -> None:
        rows_of_shards = self._rows_of_shards(state)
        for variable, rows in zip(self.variables, rows_of_shards, strict=True):
            variable.load_state(rows)

    def sparse_read(self, indices: Any) -> Array:
        """Return the rows at `indices`, in the order of `indices`. Only the shards that have them are read.

        Args:
            indices: integers of shape [n].
        Returns: an array of shape [n, ...].
        Raises: NotImplementedError unless the shards have equally many rows; the first ones may have one more.
        """
        positions, owners = self._division.owners(indices, "sparse_read")
        parts = []
        for shard in np.unique(owners):
            rows = positions[owners == shard] - self.offsets[shard]
            parts.append(self.variables[shard].sparse_read(rows))
        by_shard = np.argsort(owners, kind="stable")  # the numbers of the indices, shard by shard
        return self._joined(parts)[np.argsort(by_shard)]

    def __iter__(self) -> Iterator[Variable]:
        return iter(self.variables)

    def __getitem__(self, key: Any) -> Array:
        keys = key if isinstance(key, tuple) else (key,)
        for part in keys:
            _check_index(part)
        if not keys:
            return self.read_value()
        first, *rest = keys
        size = self.shape[0]
        if isinstance(first, slice):
            wanted = range(*first.indices(size))
            return self._rows(wanted)[(slice(None), *rest)]
        if isinstance(first, (int, np.integer)):
            row = int(first)
            if not -size <= row < size:
                raise IndexError(f"row {row} is outside {self.name!r}: it has {size} rows")
            row %= size
            shard = bisect.bisect_right(self._division.ends, row)
            row_of_shard = row - self.offsets[shard]
            return self.variables[shard].read_value()[(row_of_shard, *rest)]
        return self.read_value()[key]

    def _rows(self, wanted: range) -> Array:
        if wanted.step < 0:
            return arrays.flipped(self._rows(wanted[::-1]))
        parts = []
        ends = self._division.ends
        for variable, offset, end in zip(self.variables, self.offsets, ends, strict=True):
            steps = max(0, -((wanted.start - offset) // wanted.step))
            begin = wanted.start + steps * wanted.step
            stop = min(end, wanted.stop)
            if begin < stop:
                rows = slice(begin - offset, stop - offset, wanted.step)
                parts.append(variable.read_value()[rows])
        return self._joined(parts)

    def _joined(self, parts: list[Array]) -> Array:
        """Return the rows of all `parts` in one array; without parts, an array without rows."""
        if len(parts) > 1:
            return arrays.concatenate(parts)
        if parts:
            return parts[0]
        return self.variables[0].read_value()[:0]

    def _shown(self) -> str:
        return f" shards={self.variables}"

    def _update(self, method: str, operand: Any) -> ShardedVariable:
        parts: Sequence[Any]
        if method.startswith("scatter_"):
            check_is_slices(self.name, operand)
            parts = self._division.slices(operand, method)
        else:
            parts = self._rows_of_shards(operand)
        self._update_shards(method, parts)
        return self

    def _update_shards(self, method: str, operands: Sequence[Any]) -> None:
        for variable, operand in zip(self.variables, operands, strict=True):
            variable._update(method, operand)

    def _rows_of_shards(self, value: Any) -> list[Array]:
        whole = arrays.detach_read(value)
        if not arrays.is_array(whole):
            numbers = numbers_for(self.name, whole)
            whole = arrays.cast_like(numbers, self.variables[0].read_value())
        check_shape(self.name, self.shape, whole)
        return self._division.parts(whole)


class Division:
    """Divides the rows of the variable `name` into shards of these sizes.

    Attributes:
        offsets: first row of each shard.
        ends: the row after the last row of each shard.
    """

    def __init__(self, name: str, sizes: list[int]) -> None:
        self._name = name
        self._sizes = sizes
        self.ends: list[int] = np.cumsum(sizes).tolist()
        self.offsets = [0, *self.ends[:-1]]

    def parts(self, whole: Array) -> list[Array]:
        bounds = zip(self.offsets, self.ends, strict=True)
        return [whole[start:end] for start, end in bounds]

    def slices(self, whole: IndexedSlices, method: str) -> list[IndexedSlices]:
        """Return a part of `whole` for each shard; a part may have no rows. Raises: the errors of `owners`."""
        positions, owners = self.owners(whole.indices, method)
        parts = []
        for shard, offset in enumerate(self.offsets):
            # A shard gets an update without rows, too, because all ranks together update a distributed variable.
            (rows,) = np.nonzero(owners == shard)
            indices = positions[rows] - offset
            parts.append(IndexedSlices(whole.values[rows], indices))
        return parts

    def owners(self, indices: Any, method: str) -> tuple[np.ndarray, np.ndarray]:
        """Return `indices` as a NumPy array, int64[n], and for each the number of the shard with that row, int64[n].

        Args: indices: rows of the whole variable. method: the calling method, for the message.
        Raises: ValueError unless they have shape [n]; TypeError unless they are integers; IndexError for a row that
            does not exist; NotImplementedError unless the shards have the sizes of `equal_parts`.
        """
        array = arrays.as_array(indices)
        if array.ndim != 1:
            raise ValueError(f"indices must have shape [n], got {list(array.shape)}")
        # An empty list has a floating dtype.
        if not (arrays.is_integer(array) or not arrays.num_elements(array)):
            raise TypeError(f"indices must be integers, got {arrays.dtype_name(array)}")
        positions = arrays.to_numpy(array).astype(np.int64, copy=False)
        check_rows(self._name, positions, self.ends[-1])
        if self._sizes != equal_parts(self.ends[-1], len(self._sizes)):
            raise NotImplementedError(
                f"variable {self._name!r}: {method} needs shards of equal sizes; only the first ones may have a "
                f"row more. The shards have {self._sizes} rows"
            )
        return positions, np.searchsorted(self.ends, positions, side="right")


def equal_parts(rows: int, count: int) -> list[int]:
    """Return the number of rows of each of `count` shards, as in TensorFlow: the first `rows % count` have one more."""
    each, more = divmod(rows, count)
    return [each + (part < more) for part in range(count)]


def _check_index(part: Any) -> None:
    if isinstance(part, slice):
        for bound in (part.start, part.stop, part.step):
            if not isinstance(bound, (int, np.integer, type(None))):
                raise TypeError(
                    f"bounds of slices of a ShardedVariable are Python integers, got {bound!r:.60}"
                )
        if part.step == 0:
            raise ValueError("the step of a slice of a ShardedVariable must not be 0")
        return
    plain = (int, np.integer, types.NoneType, types.EllipsisType)
    if isinstance(part, plain) and not isinstance(part, bool):
        return
    array = arrays.as_array(part) if isinstance(part, list) else part
    if arrays.is_array(array) and arrays.is_bool(array) and array.ndim:
        return
    raise TypeError(
        "a ShardedVariable is indexed by Python integers, slices of them, ..., None and masks, got "
        f"{part!r:.60}; sparse_read takes arrays of rows"
    )
