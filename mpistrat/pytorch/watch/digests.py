"""The bits of arrays: digests of them, and how much two arrays differ.

A digest is quick, sensitive to the position of each element, and takes no copy of the array. It lays out an array's
bits in rows, as integers of the element's size, and hashes the sums of the rows and of the columns. Adding is the
fastest operation of all array libraries, on any device, and gives the same sums on each. A digest always changes if one
element changes, or if two elements change places. Only changes that cancel out in all sums are not seen, such as +1,
-1, -1 and +1 at the corners of a rectangle.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from mpistrat import arrays
from mpistrat.arrays import Array

ROW = 4096  # elements; the elements after the last full row are hashed as they are
_EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}


def digest(value: Any) -> bytes:
    """Return eight bytes: the digest of an array's bits, shape and dtype, or of another value's `repr`."""
    import hashlib  # imported here, so that `import mpistrat` stays fast

    hashed = hashlib.blake2b(describe(value).encode(), digest_size=8)
    if arrays.is_array(value):
        flat = bits(value)
        rows = flat.shape[0] // ROW
        end = rows * ROW
        table = flat[:end].reshape(rows, ROW)
        sums = [table.sum(axis, dtype=flat.dtype) for axis in (0, 1)]
        for part in (*sums, flat[end:]):
            hashed.update(arrays.to_numpy(part).data)
    return hashed.digest()


def describe(value: Any) -> str:
    """Return the dtype and the shape of an array as a text, "float32[64, 3]"; the `repr` of another value."""
    if not arrays.is_array(value):
        return repr(value)
    return f"{arrays.dtype_name(value)}{list(value.shape)}"


def bits(array: Array) -> Array:
    """Return the bits of the array's elements as a 1-D array of integers of the elements' size.

    A complex number gives two integers. The result shares the array's memory if that is contiguous.

    Returns: a NumPy array for an array on the host; an array of the same library for an array on a GPU. A tensor on an
        XLA device is copied to the host, because XLA would not view it as integers without computing a copy.
    """
    if arrays.is_torch(array):
        flat = flat_bits(array)
        return flat.numpy() if flat.is_cpu else flat  # NumPy adds faster than torch on one thread
    return array.reshape(-1).view(_integers(array.real.dtype.itemsize))


def flat_bits(array: Any) -> Any:
    """Return the bits of a tensor's elements as a 1-D tensor of integers; `bits` says more."""
    import torch

    tensor = array.detach()
    if arrays.is_on_xla(tensor):
        tensor = arrays.to_host(tensor)
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    tensor = tensor.resolve_conj().resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    integers = getattr(torch, _integers(tensor.dtype.itemsize))
    return tensor.reshape(-1).view(integers)


def _integers(itemsize: int) -> str:
    return f"int{8 * itemsize}"


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
        found, reference: bits of arrays as `bits` returns them, 1-D integers on the host.
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
    place = np.unravel_index(int(different[most]), shape)
    index = tuple(int(number) for number in place)
    value = float(values[most])
    instead = float(references[most])
    return Difference(len(different), found.size, index, value, instead, roundings)


def _values(flat: np.ndarray, like: Array) -> np.ndarray:
    if arrays.is_torch(like):
        import torch

        return torch.from_numpy(flat).view(like.real.dtype).double().numpy()
    return flat.view(str(like.real.dtype)).astype(np.float64)
