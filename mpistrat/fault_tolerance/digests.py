"""Digests of arrays' bits: quick, sensitive to where an element stands, and without a copy of the array.

An array's bits, as integers of its elements' size, are laid out in rows; the sums of the rows and of the columns are
hashed. Adding is what all array libraries do fastest, on any device, and a digest is the same wherever it was computed.
One changed element changes a sum for certain, two elements that changed places do, too. What leaves every sum as it was
goes unnoticed: changes at the corners of a rectangle that cancel out.
"""

from __future__ import annotations

from typing import Any

from mpistrat import arrays
from mpistrat.arrays import Array

ROW = 4096  # elements; what fills no row is hashed as it is


def digest(value: Any) -> bytes:
    """Eight bytes for an array's bits, shape and dtype, or for another value's `repr`."""
    import hashlib  # here, because it makes importing mpistrat slower

    if not arrays.is_array(value):
        return hashlib.blake2b(repr(value).encode(), digest_size=8).digest()
    hashed = hashlib.blake2b(describe(value).encode(), digest_size=8)
    flat = bits(value)
    rows = flat.shape[0] // ROW
    table, dtype = flat[: rows * ROW].reshape(rows, ROW), flat.dtype
    for part in (table.sum(0, dtype=dtype), table.sum(1, dtype=dtype), flat[rows * ROW :]):
        hashed.update(arrays.to_numpy(part).data)
    return hashed.digest()


def describe(array: Array) -> str:
    """Dtype and shape: "float32[64, 3]"."""
    return f"{arrays.dtype_name(array)}{list(array.shape)}"


def bits(array: Array) -> Array:
    """The array's elements as integers of their size, one after the other; two for a complex number.

    Its own memory where that is contiguous: NumPy's array on the host, the library's own on a GPU.
    What is on an XLA device is copied to the host, for there the view as integers takes the host anyway.
    """
    if arrays.is_torch(array):
        import torch

        tensor = array.detach()
        if arrays.is_on_xla(tensor):
            tensor = arrays.to_host(tensor)
        if tensor.layout is not torch.strided:
            tensor = tensor.to_dense()
        tensor = tensor.resolve_conj().resolve_neg()
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor)
        flat = tensor.reshape(-1).view(getattr(torch, _integers(tensor.dtype.itemsize)))
        return flat.numpy() if flat.is_cpu else flat  # a thread of NumPy's adds faster
    return array.reshape(-1).view(_integers(array.real.dtype.itemsize))


def _integers(itemsize: int) -> str:
    return f"int{8 * itemsize}"
