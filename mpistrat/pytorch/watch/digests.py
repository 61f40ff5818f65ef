"""Digests of arrays' bits: quick, sensitive to the position of each element, and without a copy of the array.

A digest lays out an array's bits in rows, as integers of the element's size, and hashes the sums of the rows and of the
columns. Adding is the fastest operation of all array libraries, on any device, and gives the same sums on each. A
digest always changes if one element changes, or if two elements change places. Only changes that cancel out in all sums
are not seen, such as +1, -1, -1 and +1 at the corners of a rectangle.
"""

from __future__ import annotations

from typing import Any

from mpistrat import arrays
from mpistrat.arrays import Array

ROW = 4096  # elements; the elements after the last full row are hashed as they are


def digest(value: Any) -> bytes:
    """Return eight bytes: the digest of an array's bits, shape and dtype, or of another value's `repr`."""
    import hashlib  # imported here, so that `import mpistrat` stays fast

    if not arrays.is_array(value):
        return hashlib.blake2b(repr(value).encode(), digest_size=8).digest()
    hashed = hashlib.blake2b(describe(value).encode(), digest_size=8)
    flat = bits(value)
    rows = flat.shape[0] // ROW
    table = flat[: rows * ROW].reshape(rows, ROW)
    dtype = flat.dtype
    for part in (table.sum(0, dtype=dtype), table.sum(1, dtype=dtype), flat[rows * ROW :]):
        hashed.update(arrays.to_numpy(part).data)
    return hashed.digest()


def describe(array: Array) -> str:
    """Return the dtype and the shape of an array as a text: "float32[64, 3]"."""
    return f"{arrays.dtype_name(array)}{list(array.shape)}"


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
    return tensor.reshape(-1).view(getattr(torch, _integers(tensor.dtype.itemsize)))


def _integers(itemsize: int) -> str:
    return f"int{8 * itemsize}"
