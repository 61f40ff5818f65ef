"""Checks of a call's operands. Each rank checks its own operands before the ranks agree on the call."""

from __future__ import annotations

from collections.abc import Sequence

from mpistrat.arrays import Array, dtype_name, is_floating, is_torch, num_elements
from mpistrat.communicators.reduction import BITWISE, OPS


def check_reduction(op: str, scale: float | None, buffer: Array) -> None:
    """Check that `buffer` can be reduced.

    Raises: ValueError if `op` is not in `OPS`, or if integers have a scale. TypeError for a bitwise `op` on floats.
    """
    if op not in OPS:
        raise ValueError(f"op must be one of {OPS}, got {op!r}")
    name = dtype_name(buffer)
    inexact = is_floating(buffer) or name.startswith("complex")
    if op in BITWISE and inexact:
        raise TypeError(f"{op!r} combines the bits of integers, got {name}")
    if scale is not None and not inexact:
        raise ValueError(f"scale is for floating point, got {name}")


def _described(array: Array) -> str:
    """Return the array's dtype and shape for messages: "float32 of (2, 3)"."""
    return f"{dtype_name(array)} of {tuple(array.shape)}"


def check_out(buffer: Array, out: Array) -> None:
    """Check the operands of `all_reduce`. Raises: ValueError unless `out` has the shape and dtype of `buffer`."""
    if (out.shape, out.dtype) != (buffer.shape, buffer.dtype):
        raise ValueError(
            f"out must be {_described(buffer)}, like the buffer, got {_described(out)}"
        )


def check_parts(buffer: Array, out: Array, size: int) -> None:
    """Check the operands of `reduce_scatter`.

    Raises: ValueError unless `buffer` has `size` times as many rows as `out`, and the same dtype.
    """
    expected: tuple[int, ...] = (size,)
    if out.ndim:
        rows, *row_shape = out.shape
        expected = (size * rows, *row_shape)
    shape = tuple(buffer.shape)
    if (shape, dtype_name(buffer)) != (expected, dtype_name(out)):
        raise ValueError(
            f"reduce_scatter over {size} ranks into {_described(out)} needs a buffer of {size} "
            f"times as many rows, got {_described(buffer)}"
        )


def check_gathered(buffer: Array, out: Array, size: int) -> None:
    """Check the operands of `all_gather_into`.

    Raises: ValueError unless `out` has `size` times as many elements as `buffer`, in any shape, and the same dtype.
    """
    expected = size * num_elements(buffer)
    if (num_elements(out), out.dtype) != (expected, buffer.dtype):
        raise ValueError(
            f"all_gather_into over {size} ranks of {_described(buffer)} needs an out of "
            f"{size} times as many elements, got {_described(out)}"
        )


def check_exchange(
    buffer: Array, out: Array, sent: Sequence[int], received: Sequence[int], size: int
) -> None:
    """Check the operands of `all_to_all`.

    Raises: ValueError if rows of `buffer` and `out` differ in dtype or shape, or unless `sent` and `received` have a
        count >= 0 for each of `size` ranks that add up to the rows of `buffer` and of `out`.
    """
    row = buffer.dtype, buffer.shape[1:]
    row_of_out = out.dtype, out.shape[1:]
    if not buffer.ndim or row != row_of_out:
        raise ValueError(
            f"all_to_all needs a buffer and an out of rows of one dtype and shape, got {_described(buffer)} "
            f"and {_described(out)}"
        )
    for name, array, counts in (("sent", buffer, sent), ("received", out, received)):
        rows = array.shape[0]
        add_up = (len(counts), sum(counts)) == (size, rows)
        if not add_up or min(counts) < 0:
            raise ValueError(
                f"all_to_all over {size} ranks: {name} must be {size} counts that add up to the "
                f"{rows} rows, got {list(counts)}"
            )


def check_arrived(starts: Sequence[Sequence[int]], received: Sequence[int], rank: int) -> None:
    """Check after `all_to_all` that each rank has sent this rank as many rows as `received` says.

    Args:
        starts: for each rank, its `Operands.own_starts`: the index of its first row for each rank, and its number of
            rows.
        received: how many rows this rank expected from each rank.

    Raises: ValueError if a rank has sent another number of rows.
    """
    arrived = [of_rank[rank + 1] - of_rank[rank] for of_rank in starts]
    if arrived != list(received):
        raise ValueError(
            f"all_to_all over {len(starts)} ranks: rank {rank} expected {list(received)} rows from the ranks, in rank "
            f"order, and got {arrived}"
        )


def check_contiguous(buffer: Array, out: Array) -> None:
    """Check the memory of `buffer` and `out`. Raises: ValueError unless both are C-contiguous."""
    for name, array in (("buffer", buffer), ("out", out)):
        contiguous = array.is_contiguous() if is_torch(array) else array.flags.c_contiguous
        if not contiguous:
            raise ValueError(
                f"{name} must be C-contiguous, got an array of shape {tuple(array.shape)} with other strides; copy it "
                "first"
            )
