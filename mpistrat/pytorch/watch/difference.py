"""Measures how two arrays of one shape and dtype differ."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from mpistrat import arrays
from mpistrat.arrays import Array

_EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}


class Difference(NamedTuple):
    """How an array differs from a reference array. `str()` gives a text for messages."""

    differing: int  # elements with other bits
    elements: int
    place: tuple[int, ...]  # index of the largest difference; a NaN differs more than any number
    value: float
    reference: float
    roundings: float  # the norm of the difference, by eps and the reference's norm; inf for other arrays than floats

    def __str__(self) -> str:
        at = f" at {list(self.place)}" if self.place else ""
        return (
            f"{self.differing} of {self.elements} elements, most{at}: {self.value:.9g} instead of "
            f"{self.reference:.9g}"
        )


def difference(found: np.ndarray, reference: np.ndarray, like: Array) -> Difference | None:
    """Return how many elements of `found` differ from `reference`, and the element with the largest difference.

    Args:
        found, reference: bits of arrays as `digests.bits` returns them, 1-D integers on the host.
        like: an array with the shape and dtype of both. A complex number counts as two elements.
    Returns: a `Difference`; None if all bits are equal.
    """
    different = np.flatnonzero(found != reference)
    if not len(different):
        return None
    all_references = _values(reference, like)
    references = all_references[different]
    values = _values(found, like)[different]
    with np.errstate(all="ignore"):
        sizes = np.abs(values - references)
        most = int(np.argmax(sizes))  # of a NaN, if there is one
        sizes[np.isnan(values) & np.isnan(references)] = 0.0
        distance = np.linalg.norm(sizes)
        norm = np.linalg.norm(all_references[np.isfinite(all_references)])
        eps = _EPS.get(arrays.dtype_name(like), 0.0)
        roundings = float(distance and distance / (eps * norm))
    is_complex = arrays.dtype_name(like).startswith("complex")
    shape = (*like.shape, 2) if is_complex else tuple(like.shape)
    index = tuple(map(int, np.unravel_index(int(different[most]), shape)))
    value = float(values[most])
    instead = float(references[most])
    return Difference(len(different), found.size, index, value, instead, roundings)


def _values(flat: np.ndarray, like: Array) -> np.ndarray:
    if arrays.is_torch(like):
        import torch

        return torch.from_numpy(flat).view(like.real.dtype).double().numpy()
    return flat.view(str(like.real.dtype)).astype(np.float64)
