"""Packs: fuse many arrays into few messages, reduce these, and cut the results into arrays again.

A pack is a flat buffer of one dtype and device, with a piece for each of its arrays. Packs carry values of structures,
gradients, buffers of modules and mirrored values; nothing else in this package joins arrays for a message.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import operator
import sys
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import array_api_compat as api
import numpy as np

from mpistrat import arrays
from mpistrat.arrays import Array
from mpistrat.communicators import Communicator
from mpistrat.communicators.node.memory import NO_MEMORY, NodeMemory
from mpistrat.communicators.recycled_buffers import SMALLEST, RecycledBuffers
from mpistrat.indexed_slices import IndexedSlices

_NEEDS_GRAD = operator.attrgetter("requires_grad")
LAYOUT = operator.attrgetter("dtype", "device", "shape")
# Programs may reduce different parameters in turn, such as a generator's and a discriminator's, so a packer keeps the
# last _TURNS plans. A plan keeps _PACKS packs for each group of tensors, because a program that accumulates gradients
# still holds the gradients of earlier backwards in one of them.
_TURNS = 4
_PACKS = 2


@dataclasses.dataclass(eq=False)
class Pack:
    """A flat buffer that holds some tensors of a list, side by side in their order.

    Attributes:
        flat: the buffer, of shape [elements].
        indices: the indices of the tensors in their list.
        pieces: views of `flat`, in the shapes of the tensors.
        operand: `flat` as a NumPy array if it is on the host and NumPy has its dtype, because NumPy's calls take a
            third of the time of torch's; else `flat`.
        alone: the value of `references()` while nothing outside the pack refers to its memory; if `references()` still
            returns it, the pack may be used again. None on an accelerator, where packs are not used again.
    """

    flat: Array
    indices: list[int]
    pieces: list[Array]
    operand: Array
    alone: Any = None

    def references(self) -> Any:
        """Return how many references Python and torch have to the memory and to each piece.

        Returns: a tuple of these counts, the addresses of the memory and of the pieces, and whether each piece needs
            gradients. If it equals `alone`, nobody uses the pack, and nobody has changed its pieces.
        """
        torch = sys.modules["torch"]
        storage = self.flat.untyped_storage()
        of_memory = torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage)
        # Maps of C functions: a loop in Python would take twice as long, for each kept pack in each reduction.
        in_python = list(map(sys.getrefcount, self.pieces))
        in_torch = list(map(torch.Tensor._use_count, self.pieces))
        addresses = [self.flat.data_ptr(), *map(torch.Tensor.data_ptr, self.pieces)]
        need_gradients = list(map(_NEEDS_GRAD, self.pieces))
        return of_memory, in_python, in_torch, addresses, need_gradients


class PackPlan(NamedTuple):
    """How `Packer.packs` divides some tensors into packs, and the packs that it may use again.

    Attributes:
        key: the communicator, `asks`, the indices, and the tensors' dtypes, devices, shapes and strides. The plan
            serves every call of `Packer.packs` with an equal key.
        packs: for each pack, the indices of its tensors, and the last two packs made for them in host memory.
    """

    key: tuple[Any, ...]
    packs: list[tuple[list[int], list[Pack]]]


_packers: weakref.WeakSet[Packer] = weakref.WeakSet()  # all packers of this process


class Packer:
    """Makes packs (flat buffers of several arrays). On the host, it uses memory again once nothing refers to it."""

    def __init__(self) -> None:
        self._recycled = RecycledBuffers()
        # Makes an uninitialized array on the host.
        self.empty = self._recycled.empty
        _packers.add(self)
        self._plans: collections.deque[PackPlan] = collections.deque(maxlen=_TURNS)
        self._asked: dict[Communicator, int] = {}  # bytes of the largest window asked for

    def forget(self) -> None:
        """Drop all packs and plans, so that their idle memory is free. Memory that is in use stays valid."""
        self._plans.clear()

    def packs(
        self, like: Any, indices: Sequence[int], communicator: Communicator, *, asks: bool = True
    ) -> list[Pack]:
        """Return uninitialized packs with a piece for each tensor: one pack for each dtype and device.

        A pack may be one that an earlier call returned, if nobody uses it any more.

        Args:
            like: the tensors; only their dtype, device, shape and strides count. Nothing is copied.
            indices: the indices in `like` of the tensors to pack; pieces lie in this order.
            communicator: host packs lie in its window (memory that a node's ranks share), if there is room.
            asks: True asks for a larger window if a pack needs it; then the call is collective. False takes the window
                as it is; a pack that does not fit lies in ordinary memory.
        """
        tensors = map(like.__getitem__, indices)
        key = (communicator, asks, list(indices), layouts(tensors))
        for plan in [*self._plans]:
            if plan.key == key:
                self._plans.remove(plan)
                break
        else:
            plan = _new_plan(key, like, indices)
        packs = []
        for group, kept in plan.packs:
            for pack in kept:
                if pack.references() == pack.alone:
                    break
            else:
                pack = self._new_pack([like[i] for i in group], group, communicator, asks)
                if pack.alone:
                    kept[:] = [pack, *kept][:_PACKS]
            packs.append(pack)
        self._plans.append(plan)
        return packs

    def _new_pack(
        self, tensors: list[Any], group: list[int], communicator: Communicator, asks: bool
    ) -> Pack:
        first = tensors[0]
        length = sum([tensor.numel() for tensor in tensors])
        nbytes = length * first.itemsize
        window = communicator.memory
        asked = self._asked
        largest = asked.get(communicator, 0)
        if nbytes > window.window_capacity:
            if asks and nbytes > largest:
                self._plans.clear()  # a smaller window is freed once no pack lies in it
                largest = nbytes
            else:
                window = NO_MEMORY
        flat = self.memory(length, first, first.dtype, window)
        if largest:  # remembered also if there is no room for it, as all ranks know
            asked[communicator] = largest
        pack = Pack(flat, group, pieces_of(flat, tensors), flat)
        if not arrays.is_on_accelerator(flat):  # an accelerator's own allocator recycles memory
            if arrays.numpy_knows(flat.dtype):
                pack.operand = arrays.to_numpy(flat)
            pack.alone = pack.references()
        return pack

    def memory(self, length: int, like: Array, dtype: Any, window: NodeMemory = NO_MEMORY) -> Array:
        """Return an uninitialized array of shape [length] on the device of `like`.

        Args:
            dtype: a dtype of the library of `like`.
            window: its window (memory that a node's ranks share) holds the array, if the array is on the host and
                there is room; else ordinary memory. More than `window.window_capacity` bytes make the call collective.
        """
        if arrays.is_on_accelerator(like):  # the accelerator's own allocator recycles memory
            return api.array_namespace(like).empty(length, dtype=dtype, device=api.device(like))
        nbytes = length * dtype.itemsize
        memory = window.window_buffer(nbytes)
        if memory is None and 0 < nbytes <= window.window_capacity:
            for packer in list(_packers):  # idle packs of all packers leave the window
                packer.forget()
            memory = window.window_buffer(nbytes)
        if memory is None:
            return self._recycled.empty((length,), dtype)
        if arrays.is_torch(like):
            return sys.modules["torch"].from_numpy(memory).view(dtype)
        return memory.view(dtype)

    def join(
        self, values: Sequence[Array], length: int, shape: Sequence[int] | None
    ) -> tuple[Array, list[Array]]:
        """Copy `values`, host arrays of one dtype, side by side into a flat array.

        Args:
            length: number of elements of all values together.
            shape: the shape of each value if all have the same shape, else None.

        Returns: the flat array, of shape [length], and for each value a view of it in the value's shape.
        """
        first = values[0]
        nbytes = length * first.dtype.itemsize
        if not arrays.is_torch(first) or nbytes >= SMALLEST:
            flat = self._recycled.empty((length,), first.dtype)
        else:
            flat = first.new_empty(length)
        if shape is not None and arrays.is_torch(first):
            # In half the time of the code below. Views that one torch call makes of all rows could not be written to.
            rows = flat.view(len(values), *shape)
            sys.modules["torch"].stack(tuple(values), out=rows)
            return flat, [rows[i] for i in range(len(values))]
        pieces = unpack(flat, values)
        fill(pieces, values)
        return flat, pieces


def _new_plan(key: tuple[Any, ...], like: Any, indices: Sequence[int]) -> PackPlan:
    """Return a plan with the largest group of tensors first, still without packs.

    Args:
        key: the attribute of the plan.
        like: the tensors.
        indices: the indices in `like` of the tensors to pack.
    """

    def nbytes(group: list[int]) -> int:
        return sum([like[i].nbytes for i in group])

    # The largest pack comes first: all other packs then lie in the window that it asks for.
    by_size = sorted(alike(like, indices), key=nbytes, reverse=True)
    return PackPlan(key, [(group, []) for group in by_size])


def layouts(tensors: Iterable[Any]) -> list[Any]:
    """Return the dtypes, devices, shapes and strides of tensors, to compare: equal lists have equal packs."""
    some = list(tensors)
    return [*map(LAYOUT, some), *map(sys.modules["torch"].Tensor.stride, some)]


def alike(like: Any, indices: Sequence[int]) -> list[list[int]]:
    """Group `indices` by dtype and device of the tensors of `like`; groups are in the order of their first index.

    A tensor on torch's device "meta" (without memory) counts as on the host.
    """
    some = [like[i] for i in indices]
    dtypes = {tensor.dtype for tensor in some}
    if len(dtypes) == 1 and _are_on_host(some):
        return [list(indices)]
    found = collections.defaultdict(list)
    for i, tensor in zip(indices, some, strict=True):
        found[tensor.dtype, _device_of(tensor)].append(i)
    return list(found.values())


def _are_on_host(values: Sequence[Any]) -> bool:
    """Whether all values, of one dtype, are on the host; False also if they are not NumPy's nor torch's."""
    if arrays.is_torch(values[0]):
        return all(value.is_cpu for value in values)
    return {type(value) for value in values} == {np.ndarray}


def _device_of(array: Array) -> Any:
    if not arrays.is_torch(array):
        return None
    if array.is_meta or array.is_cpu:
        return "cpu"
    return array.device


def group_by_size(values: Sequence[Array], bytes_per_pack: int) -> list[list[Array]]:
    """Cut `values`, in order, into groups of consecutive arrays of one dtype.

    Args: bytes_per_pack: a group ends once its bytes exceed this, so the array that exceeds it is in the group; 0 is no
        limit.
    """
    cut = []
    group: list[Array] = []
    limit = bytes_per_pack or sys.maxsize
    filled = math.inf  # the first value begins a group
    for value in values:
        if filled > limit or value.dtype != group[0].dtype:
            group = []
            cut.append(group)
            filled = 0
        group.append(value)
        filled += arrays.num_elements(value) * arrays.itemsize(value)
    return cut


def concat_and_split(values: Sequence[Array], num_packs: int) -> list[Array]:
    """Join `values` into one flat array, cut into `num_packs` equal parts; the last part also takes the remainder."""
    flat = concatenated(values)
    length = arrays.num_elements(flat) // num_packs
    packs = []
    for i in range(num_packs - 1):
        start = i * length
        packs.append(flat[start : start + length])
    last = (num_packs - 1) * length
    return [*packs, flat[last:]]


def concatenated(values: Sequence[Array]) -> Array:
    """Return a new flat array of `values`, side by side."""
    return arrays.concatenate([value.reshape(-1) for value in values])


def unpack(flat: Array, like: Sequence[Array]) -> list[Array]:
    """Return views of `flat`, one after the other, in the shapes of `like`."""
    if arrays.is_torch(flat):
        import torch

        # As in DistributedDataParallel: a loop in C++. A loop in Python would take as long as the message.
        return list(torch._C._nn.unflatten_dense_tensors(flat, list(like)))
    unpacked = []
    end = 0
    for value in like:
        start = end
        end += value.size
        unpacked.append(flat[start:end].reshape(value.shape))
    return unpacked


def pieces_of(flat: Array, like: Sequence[Any]) -> list[Array]:
    """Return views of `flat`, one after the other, in the shapes and strides of the tensors `like`.

    With the strides of the parameter, a gradient needs no copy in the optimizer. NumPy views have only the shapes.
    """
    if not arrays.is_torch(flat):
        return unpack(flat, like)
    pieces = []
    flat_pieces = flat.split([tensor.numel() for tensor in like])
    for piece, tensor in zip(flat_pieces, like, strict=True):
        if _has_contiguous_piece(tensor):
            pieces.append(piece.view(tensor.shape))
        else:
            pieces.append(piece.as_strided(tensor.shape, tensor.stride(), piece.storage_offset()))
    return pieces


def pack_of_itself(
    like: Sequence[Any], indices: Sequence[int], contributions: Sequence[Sequence[Any]]
) -> list[Pack]:
    """Return a list with one pack: the memory of the only gradient itself, if it is on a GPU.

    Returns: [] if the gradient is None, on another device, or if `flat_view` cannot use its memory.

    Args:
        like: the parameters.
        indices: one index in `like`.
        contributions: a list with the gradients of the only replica, one for each of `like`.
    """
    (index,) = indices
    (gradients,) = contributions
    gradient = gradients[index]
    if gradient is None or not arrays.is_on_gpu(gradient):
        return []
    flat = flat_view(gradient, like[index])
    if flat is None:
        return []
    return [Pack(flat, [index], [gradient], flat)]


def flat_view(tensor: Any, like: Any) -> Any:
    """Return a flat view of a torch tensor's memory, so that a reduction overwrites the tensor without a copy.

    Args: like: the tensor's parameter. `tensor` must have the parameter's dtype, and the parameter's strides; for a
        parameter with gaps, contiguous strides.

    Returns: None if the tensor is sparse, if it has another dtype or other strides, if the memory is larger than the
        tensor, or if another object refers to the memory.
    """
    import torch

    if tensor.layout != torch.strided or tensor.dtype != like.dtype:
        return None
    storage = tensor.untyped_storage()
    # One reference is the tensor's, and one is of `storage`.
    references = torch._C._storage_Use_Count(storage._cdata)
    shared = references > 2 or storage.nbytes() > tensor.nbytes
    fits = tensor.stride() == like.stride()
    if _has_contiguous_piece(like):
        fits = tensor.is_contiguous()
    if shared or not fits:
        return None
    return tensor.as_strided((tensor.numel(),), (1,))


def _has_contiguous_piece(tensor: Any) -> bool:
    """Whether the tensor's piece of a pack is contiguous; else the piece has the tensor's strides."""
    return tensor.is_contiguous() or not is_dense(tensor)


def is_dense(tensor: Any) -> bool:
    """Whether the elements of a tensor fill their memory without gaps or overlap, in any order."""
    return sys.modules["torch"].ops.aten.is_non_overlapping_and_dense(tensor)


def fill(pieces: Sequence[Array], values: Sequence[Any]) -> None:
    """Copy each of `values` into its piece; None fills the piece with zeros, a sparse tensor becomes dense."""
    if pieces[0].__class__ is np.ndarray:
        for piece, value in zip(pieces, values, strict=True):
            piece[...] = 0 if value is None else value
        return
    targets = []
    sources = []
    for piece, value in zip(pieces, values, strict=True):
        if value is None:
            piece.zero_()
        else:
            targets.append(piece)
            sources.append(value.to_dense() if value.is_sparse else value)
    if targets:
        sys.modules["torch"]._foreach_copy_(targets, sources)


def add(pieces: Sequence[Array], values: Sequence[Any], absent: str = "skipped") -> None:
    """Add `values` to `pieces`; sparse tensors become dense.

    Args: absent: "skipped" ignores None; "zero" adds zero for None, so that minus zero becomes zero.
    """
    for piece, value in zip(pieces, values, strict=True):
        if value is not None:
            if getattr(value, "is_sparse", False):
                value = value.to_dense()
            piece += value
        elif absent == "zero":
            piece += 0


# The types of values that share no pack.
_WITHOUT = frozenset([IndexedSlices, type(None)])


def groups(values: Sequence[Any], bytes_per_pack: int) -> list[list[int]]:
    """Return for each pack the indices of its `values`: arrays of one dtype and device.

    IndexedSlices and None are in no pack.

    Args: bytes_per_pack: a pack ends once it has more than this many bytes; 0 is no limit.
    """
    dense = [i for i, value in enumerate(values) if type(value) not in _WITHOUT]
    if len(dense) == 1:
        return [dense]
    found = alike(values, dense)
    if not bytes_per_pack:
        return found
    packs = []
    for group in found:
        start = 0
        for part in group_by_size([values[i] for i in group], bytes_per_pack):
            end = start + len(part)
            packs.append(group[start:end])
            start = end
    return packs


def name_of(name: str, like: Sequence[Array]) -> str:
    """Return the label of a pack: `name`, and for several arrays also their shapes."""
    if len(like) == 1:
        return name
    return _with_shapes(name, tuple([array.shape for array in like]))


@functools.lru_cache(maxsize=1024)
def _with_shapes(name: str, shapes: tuple[tuple[int, ...], ...]) -> str:
    listed = ",".join(str(list(shape)) for shape in shapes)
    return f"{name} {listed}"
