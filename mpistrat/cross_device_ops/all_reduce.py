"""The policy that reduces values over all replicas of all ranks."""

from __future__ import annotations

import contextlib
import functools
import operator
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpistrat import arrays
from mpistrat.arrays import Array
from mpistrat.communicators import Communicator, Reduction, reducing
from mpistrat.communicators.recycled_buffers import SMALLEST
from mpistrat.cross_device_ops import accumulation, extrema, packing
from mpistrat.cross_device_ops.cross_device_ops import CrossDeviceOps, place
from mpistrat.indexed_slices import IndexedSlices
from mpistrat.machine.notices import warn_of_no_effect
from mpistrat.options import (
    CommunicationImplementation,
    CommunicationOptions,
    check_options,
    implementation_of,
)
from mpistrat.reduce_op import ReduceOp
from mpistrat.settings import stall_seconds
from mpistrat.values import PerReplica

_KIND = operator.attrgetter("dtype", "shape")
_PLACE, _ON_HOST = operator.attrgetter("is_cpu", "requires_grad"), (True, False)
# How many kinds of values have their packs kept. Beyond them the packs are made again.
_KNOWN_KINDS = 1024


class _ArrayPack(NamedTuple):
    """Some arrays of a list, of one dtype and device, that are reduced together.

    Attributes:
        indices: the indices of the arrays in their list.
        reduction: how the communicator combines them.
        on_device: whether they are in the memory of an accelerator.
        stays: whether the communicator takes them from their own memory; if False, they are copied to the host.
        joined: whether they are copied, side by side, before they are reduced.
        to_numpy: whether they are host tensors of a dtype that NumPy has.
        length: number of elements of all arrays together.
        shape: the shape of each array if all have the same shape, else None.
    """

    indices: list[int]
    reduction: Reduction
    on_device: bool
    stays: bool
    joined: bool
    to_numpy: bool
    length: int
    shape: Sequence[int] | None


class MpiAllReduce(CrossDeviceOps):
    """All-reduce over all replicas of all ranks of a communicator. `explain()` tells how values on GPUs move.

    Each rank first adds up its own components. The sums of a batch are packed by dtype and by
    `CommunicationOptions.bytes_per_pack`; the communicator all-reduces each pack, and the results are unpacked.

    Called by: every rank of `communicator`, in the same order, with the same number of components on each rank.

    Args:
        communicator: the ranks, such as `strategy.extended.communicator`.
        options: defaults for every call.

    Raises: TypeError if `communicator` is not a `Communicator`.

    Example:
        >>> ops = ms.MpiAllReduce(ms.OneDeviceStrategy("cpu").extended.communicator)
        >>> ops.all_reduce(ms.ReduceOp.MEAN, [[np.array([1.0]), np.array([3.0])]])
        [array([2.])]
        >>> ops.merged(ms.CommunicationOptions(bytes_per_pack=1024)).bytes_per_pack
        1024
    """

    reduce_ops = tuple(ReduceOp)

    def __init__(
        self, communicator: Communicator, options: CommunicationOptions | None = None
    ) -> None:
        if not isinstance(communicator, Communicator):
            raise TypeError(
                "MpiAllReduce takes a Communicator, such as strategy.extended.communicator, got "
                f"{communicator!r:.60}"
            )
        self.communicator = communicator
        self.options = check_options(options)
        self._warn_of_timeout(self.options)
        self._implementation = implementation_of(self.options)
        self._packer = packing.Packer()
        self._packs: dict[Any, list[_ArrayPack]] = {}  # by operation, label and kinds of values

    def _warn_of_timeout(self, options: CommunicationOptions) -> None:
        if options.timeout_seconds is not None:
            warn_of_no_effect(
                "timeout_seconds of CommunicationOptions",
                f"a collective that lasts longer than {stall_seconds.name} is reported and ends the job; one that "
                "waits for a dead rank ends at once",
                self.communicator.rank,
            )

    def merged(self, options: CommunicationOptions | None) -> CommunicationOptions:
        """Return the default options, overridden by the `options` of one call; warn of options without effect there."""
        if options is None:
            return self.options
        merged = self.options.merge(options)
        self._warn_of_timeout(options)
        for name in ("overlap", "wire_dtype", "wire_format"):
            if getattr(options, name) is not None:
                warn_of_no_effect(
                    f"{name} in the options of one call",
                    "it is for the gradients that backward() reduces; give it to the strategy",
                    self.communicator.rank,
                )
        return merged

    def reduce_implementation(
        self,
        reduce_op: ReduceOp,
        per_replica_value: PerReplica,
        destinations: Any,
        options: CommunicationOptions,
    ) -> Any:
        pair = (per_replica_value, destinations)
        return self.batch_reduce_implementation(reduce_op, [pair], options)[0]

    def batch_reduce_implementation(
        self,
        reduce_op: ReduceOp,
        value_destination_pairs: Sequence[tuple[PerReplica, Any]],
        options: CommunicationOptions,
    ) -> list[Any]:
        local = [value.values for value, _ in value_destination_pairs]
        totals = self.all_reduce(reduce_op, local, options)
        return [
            place(total, destinations)
            for total, (_, destinations) in zip(totals, value_destination_pairs, strict=True)
        ]

    def all_reduce(
        self,
        reduce_op: ReduceOp,
        values: Sequence[Sequence[Any]],
        options: CommunicationOptions | None = None,
        label: str = "",
    ) -> list[Any]:
        """Combine each of `values` over its components on all ranks. Collective.

        Args:
            values: for each value, its components on this rank: arrays, numbers, variables or IndexedSlices.
            options: override the defaults.
            label: words for the values, such as their structure; equal on all ranks.

        Returns: a fresh array for each value; a Python number for Python numbers, IndexedSlices for IndexedSlices.

        Raises: InvalidArgumentError, on the other ranks CollectiveMismatchError, if components cannot be combined.
        """
        results, kinds = _plain(values) if options is None else ([], None)
        packs = self._packs.get((reduce_op, label, kinds))
        communicator = self.communicator
        if packs is None:
            communicator, results, packs = self._prepare(reduce_op, values, options, label, kinds)
        elif self._implementation is not CommunicationImplementation.AUTO:
            communicator = communicator.by(self._implementation)
        for pack in packs:
            like = list(map(results.__getitem__, pack.indices))
            reduce_pack = self._reduce_joined if pack.joined else self._reduce_alone
            for i, piece in zip(pack.indices, reduce_pack(communicator, pack, like), strict=True):
                results[i] = piece
        if reduce_op is ReduceOp.SUM and kinds is not None:
            return results
        return self._finished(reduce_op, results, values)

    def _finished(
        self, reduce_op: ReduceOp, totals: list[Any], values: Sequence[Sequence[Any]]
    ) -> list[Any]:
        """Return the results: means divided, extrema and products in their own dtype, Python numbers as such."""
        for i, components in enumerate(values):
            first = components[0]
            if reduce_op is ReduceOp.MEAN:
                totals[i] = accumulation.divide(totals[i], self._count_on_all_ranks(components))
            elif not reduce_op.adds_up:
                totals[i] = extrema.restored(reduce_op, totals[i], first)
            if first.__class__ is not np.ndarray and arrays.is_number(first):
                totals[i] = totals[i].item()
        return totals

    def _count_on_all_ranks(self, components: Sequence[Any]) -> int:
        return len(components) * self.communicator.size

    def _prepare(
        self,
        reduce_op: ReduceOp,
        values: Sequence[Sequence[Any]],
        options: CommunicationOptions | None,
        label: str,
        kinds: Any,
    ) -> tuple[Communicator, list[Any], list[_ArrayPack]]:
        """Prepare the reduction of `values`; gather their sparse values. Collective.

        Args:
            kinds: dtypes and shapes, from `_plain`; the packs for sums of such values are kept. None keeps none.

        Returns: the communicator that moves them, this rank's sums (complete for sparse values), and their packs.
        """
        with self.communicator.raising_together():
            merged = self.merged(options)
            communicator = self.communicator.by(implementation_of(merged))
            of_rank = functools.partial(extrema.of_rank, reduce_op)
            totals = list(map(accumulation.sum_of if reduce_op.adds_up else of_rank, values))
        name = name_of(reduce_op, label)
        for i, total in enumerate(totals):
            if isinstance(total, IndexedSlices):
                totals[i] = _all_gather_slices(communicator, total, name)
        op = extrema.OPS.get(reduce_op, "sum")
        packs = [
            _pack_of(communicator, totals, group, op, name)
            for group in packing.groups(totals, merged.bytes_per_pack)
        ]
        if kinds is not None and reduce_op.adds_up:
            if len(self._packs) == _KNOWN_KINDS:
                self._packs.clear()
            self._packs[reduce_op, label, kinds] = packs
        return communicator, totals, packs

    def _reduce_joined(
        self, communicator: Communicator, pack: _ArrayPack, like: Sequence[Array]
    ) -> list[Array]:
        """Combine a pack's arrays over the ranks, side by side in one buffer. Returns: fresh arrays.

        Args: like: the pack's arrays on this rank.
        """
        if pack.on_device:  # the device's allocator recycles memory itself
            flat = packing.concatenated(like)
            pieces = packing.unpack(flat, like)
        else:
            flat, pieces = self._packer.join(like, pack.length, pack.shape)
        host = flat if pack.stays else arrays.to_host(flat)
        communicator.all_reduce(host.numpy() if pack.to_numpy else host, pack.reduction)
        return pieces if pack.stays else packing.unpack(arrays.to_device_of(host, like[0]), like)

    def _reduce_alone(
        self, communicator: Communicator, pack: _ArrayPack, like: Sequence[Array]
    ) -> list[Array]:
        """Combine a pack's only array over the ranks, without a copy of it. Returns: a list with one fresh array."""
        (first,) = like
        # NumPy's calls take a third of the time of torch's.
        host = first.numpy(force=True) if pack.to_numpy else first
        if host.__class__ is not np.ndarray or not host.flags.c_contiguous:
            host = arrays.to_host(host)
        is_small = host.__class__ is np.ndarray and host.nbytes < SMALLEST
        out = np.empty_like(host) if is_small else self._packer.empty(host.shape, host.dtype)
        communicator.all_reduce(host, pack.reduction, out=out)
        if pack.to_numpy:
            out = sys.modules["torch"].from_numpy(out)
        return [arrays.to_device_of(out, first) if pack.on_device else out]

    def all_reduce_packs(
        self,
        packer: packing.Packer,
        like: Sequence[Any],
        indices: Sequence[int],
        contributions: Sequence[Sequence[Array | None]],
        reduction_of: Callable[[Sequence[int]], Reduction],
    ) -> dict[int, Array]:
        """Sum the gradients of parameters over all replicas of all ranks; the sums lie in packs. Collective.

        Args:
            packer: makes the packs.
            like: the parameters.
            indices: the indices of the parameters whose gradients are summed; the same on all ranks.
            contributions: for each replica of this rank, a gradient for each of `like`; None counts as zero.
            reduction_of: a function of some of the indices; it returns the `Reduction` for their sum.

        Returns: a dict from each index to its sum.

        Example:
            >>> from mpistrat.communicators import reducing
            >>> from mpistrat.cross_device_ops.packing import Packer
            >>> ops = ms.MpiAllReduce(ms.OneDeviceStrategy("cpu").extended.communicator)
            >>> parameters, gradients = [torch.zeros(2)], [torch.ones(2)]
            >>> ops.all_reduce_packs(Packer(), parameters, [0], [gradients], lambda indices: reducing())
            {0: tensor([1., 1.])}
        """
        sums: dict[int, Array] = {}
        communicator, (first, *others) = self.communicator, contributions
        own_packs: list[packing.Pack] = []
        if len(indices) == len(contributions) == 1:
            own_packs = packing.pack_of_itself(like, indices, contributions)
        for pack in own_packs or packer.packs(like, indices, communicator):
            if not own_packs:
                packing.fill(pack.pieces, [*map(first.__getitem__, pack.indices)])
            for gradients in others:
                packing.add(pack.pieces, [*map(gradients.__getitem__, pack.indices)])
            stays = pack.flat.is_cpu or communicator.takes_device_buffers
            operand = pack.operand if stays else arrays.to_host(pack.flat)
            communicator.all_reduce(operand, reduction_of(pack.indices), follows=True)
            if not stays:
                pack.flat.copy_(operand)
            sums.update(zip(pack.indices, pack.pieces, strict=True))
        return sums

    def gather_implementation(
        self,
        per_replica_value: PerReplica,
        destinations: Any,
        axis: int,
        options: CommunicationOptions,
    ) -> Any:
        values = per_replica_value.values
        return place(self.all_gather(values, axis, options=options), destinations)

    def all_gather(
        self,
        values: Sequence[Array],
        axis: int,
        label: str = "",
        options: CommunicationOptions | None = None,
    ) -> Array:
        """Concatenate the `values` of all ranks along `axis`, in rank order. Collective.

        Args:
            values: this rank's components. Dtype and sizes along the other axes must be equal on all ranks.
            label: words for the values; equal on all ranks.

        Returns: one array, on the device of `values[0]`.

        Example:
            >>> ops = ms.MpiAllReduce(ms.OneDeviceStrategy("cpu").extended.communicator)
            >>> ops.all_gather([np.array([1.0]), np.array([3.0])], axis=0)
            array([1., 3.])
        """
        with self.communicator.raising_together():
            front = accumulation.check_joinable(values, axis)
            local = arrays.concatenate(values, front) if len(values) > 1 else values[0]
            communicator = self.communicator.by(implementation_of(options))
        stays = communicator.takes_device_buffers and arrays.is_on_accelerator(local)
        operand = arrays.copy(local) if stays else arrays.to_host(local)
        parts = communicator.all_gather(operand, label=f"{label} along axis {front}".lstrip())
        accumulation.check_joinable(parts, front, "rank")
        return arrays.to_device_of(arrays.concatenate(parts, front), values[0])

    def _checks(self) -> contextlib.AbstractContextManager[None]:
        return self.communicator.raising_together()


def _plain(values: Sequence[Sequence[Any]]) -> tuple[list[Any], Any]:
    """Return the only component of each value, and their dtypes and shapes, if all are plain.

    Plain values are host arrays of one library, without autograd, and have one component each.

    Returns: [] and None if any value is not plain.
    """
    if len(values) != 1 or len(values[0]) != 1:
        return _all_plain(values)
    (first,) = values[0]  # not in a loop: loops take as long as a small sum
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)
    is_plain_tensor = first.__class__ is tensor and _PLACE(first) == _ON_HOST
    if is_plain_tensor or first.__class__ is np.ndarray:
        return [first], _KIND(first)
    return [], None


def _all_plain(values: Sequence[Sequence[Any]]) -> tuple[list[Any], Any]:
    """Return the same as `_plain`, for any number of values."""
    if set(map(len, values)) != {1}:
        return [], None
    firsts = list(next(zip(*values, strict=True)))
    tensor, classes = getattr(sys.modules.get("torch"), "Tensor", None), set(map(type, firsts))
    are_plain_tensors = classes == {tensor} and set(map(_PLACE, firsts)) == {_ON_HOST}
    if are_plain_tensors or classes == {np.ndarray}:
        return firsts, tuple(map(_KIND, firsts))
    return [], None


def _pack_of(
    communicator: Communicator, totals: Sequence[Array], group: list[int], op: str, name: str
) -> _ArrayPack:
    """Make the pack of some of `totals`.

    Args:
        group: the indices of its arrays in `totals`.
        op: the communicator's name of the operation.
        name: the beginning of the pack's label.
    """
    like = [totals[i] for i in group]
    first = like[0]
    on_device = arrays.is_on_accelerator(first)
    stays = not on_device or communicator.takes_device_buffers
    return _ArrayPack(
        group,
        reducing(op, packing.name_of(name, like)),
        on_device,
        stays,
        joined=len(group) > 1 or (on_device and stays),
        to_numpy=not on_device and arrays.is_torch(first) and arrays.numpy_knows(first.dtype),
        length=sum(map(arrays.num_elements, like)),
        shape=first.shape if len({value.shape for value in like}) == 1 else None,
    )


def _all_gather_slices(
    communicator: Communicator, slices: IndexedSlices, label: str
) -> IndexedSlices:
    def joined(part: Array) -> Array:
        parts = communicator.all_gather(arrays.to_host(part), label=label)
        return arrays.to_device_of(arrays.concatenate(parts), part)

    return IndexedSlices(joined(slices.values), joined(slices.indices), slices.dense_shape)


def name_of(reduce_op: ReduceOp, label: str) -> str:
    """Return the beginning of a reduction's label: "MEAN of loss", or "MEAN" without a label."""
    return f"{reduce_op.name} of {label}" if label else reduce_op.name
