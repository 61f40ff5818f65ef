"""Fusing many small arrays into few large messages: pack, all-reduce, unpack."""

from __future__ import annotations

from collections.abc import Sequence

from mpistrat import arrays
from mpistrat.arrays import Array


def group_by_size(values: Sequence[Array], bytes_per_pack: int) -> list[list[Array]]:
    """Cut `values`, in order, into groups of one dtype; 0 bytes is no limit.

    A group is closed once its bytes exceed the limit, so the array that crosses it stays inside.
    """
    groups: list[list[Array]] = []
    filled = 0
    for value in values:
        starts = not groups or value.dtype != groups[-1][0].dtype
        if starts or (bytes_per_pack and filled > bytes_per_pack):
            groups.append([])
            filled = 0
        groups[-1].append(value)
        filled += arrays.num_elements(value) * arrays.itemsize(value)
    return groups


def concat_and_split(values: Sequence[Array], num_packs: int) -> list[Array]:
    """All elements of `values` as `num_packs` flat arrays of equal length; the last takes the rest."""
    flat = arrays.concatenate([value.reshape(-1) for value in values])
    length = arrays.num_elements(flat) // num_packs
    cuts = [*range(0, length * num_packs, length)] if length else [0] * num_packs
    return [flat[a:b] for a, b in zip(cuts, [*cuts[1:], None], strict=True)]


def unpack(flat: Array, like: Sequence[Array]) -> list[Array]:
    """`flat` cut into arrays of the shapes of `like`: views, not copies."""
    unpacked = []
    start = 0
    for value in like:
        end = start + arrays.num_elements(value)
        unpacked.append(flat[start:end].reshape(tuple(value.shape)))
        start = end
    return unpacked
