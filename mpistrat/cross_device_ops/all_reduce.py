"""`MpiAllReduce`: the policy (way to combine values) that reduces over all replicas of all ranks."""

from __future__ import annotations

import contextlib
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
_PLACE = operator.attrgetter("is_cpu", "requires_grad")
_ON_HOST = (True, False)
# How many kinds of values have their packs kept. Beyond them the packs are made again.
_KNOWN_KINDS = 1024


class _ArrayPack(NamedTuple):
    """A pack: arrays of one dtype and device that one message of the communicator reduces together.

    Attributes:
        indices: the indices of the arrays in the list of all values.
        reduction: the operation and the label for the communicator.
        on_device: whether the arrays are in the memory of an accelerator.
        stays: whether the communicator takes buffers in that memory; if False, they are copied to the host and back.
        joined: whether the arrays are first copied side by side into one buffer; False for one array alone.
        to_numpy: whether the arrays are host tensors of a dtype that NumPy has.
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
    """All-reduce over all replicas of all ranks of a communicator. Every rank gets the results.

    Each rank first adds up its own components (its replicas' values). The sums of a batch are joined into packs: flat
    buffers of one dtype and device, whose size `CommunicationOptions.bytes_per_pack` limits. Each pack is all-reduced
    in one message. A MEAN divides the sum by the number of this rank's components times the number of ranks.

    Called by: every rank of `communicator`, in the same order, with the same number of components on each rank.

    Args:
        communicator: the ranks, such as `strategy.extended.communicator`. Its `explain()` tells how bytes move.
        options: defaults for every call; None: `CommunicationOptions()`.

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
        """Return the default options, overridden by the `options` of one call; None returns the defaults.

        It warns of options that have no effect: `timeout_seconds`, and `overlap`, `wire_dtype` and `wire_format`,
        because these three concern only gradients.
        """
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
            options: override the defaults of this object; None: the defaults.
            label: words for the values, such as their structure; equal on all ranks. Error messages show it.

        Returns: for each value a new array in its dtype (a MEAN of integers is a float), a Python number for Python
            numbers, IndexedSlices for IndexedSlices. The components keep their values.

        Raises: InvalidArgumentError, on the other ranks CollectiveMismatchError, if components cannot be combined;
            InvalidArgumentError, on all ranks, if a sum of int8, int16, int32 or uint8 does not fit that dtype.
        """
        results: list[Any] = []
        kinds = None
        if options is None:
            results, kinds = _plain(values)
        packs = self._packs.get((reduce_op, label, kinds))
        communicator = self.communicator
        narrow = ""
        if packs is None:
            narrow = accumulation.narrow_dtypes(values)
            if narrow:
                label = narrow + label
                kinds = None
            communicator, results, packs = self._prepare(reduce_op, values, options, label, kinds)
        elif self._implementation is not CommunicationImplementation.AUTO:
            communicator = communicator.by(self._implementation)
        for pack in packs:
            if not pack.joined:
                (i,) = pack.indices
                results[i] = self._reduce_alone(communicator, pack, results[i])
                continue
            like = list(map(results.__getitem__, pack.indices))
            pieces = self._reduce_joined(communicator, pack, like)
            for i, piece in zip(pack.indices, pieces, strict=True):
                results[i] = piece
        if reduce_op is not ReduceOp.SUM or kinds is None:
            results = self._finished(reduce_op, results, values)
        if narrow:
            results = accumulation.narrowed(communicator, results, values)
        return results

    def _finished(
        self, reduce_op: ReduceOp, totals: list[Any], values: Sequence[Sequence[Any]]
    ) -> list[Any]:
        """Turn sums or extrema over all ranks into the results, in the list `totals` itself, and return it.

        MEAN divides each sum by the number of components on all ranks. MAX, MIN and PRODUCT go back to the dtype of the
        components. If the first component is a Python number, the result is one, too.
        """
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
        """Combine each value's components on this rank, and plan the packs that the ranks then reduce. Collective.

        IndexedSlices are gathered from all ranks already here, so they are in no pack.

        Args:
            kinds: the values' dtypes and shapes, from `_plain`: the plan for SUM or MEAN is kept for the next values of
                these kinds. None keeps no plan.

        Returns: the communicator that moves the packs; for each value this rank's part of the result (for
            IndexedSlices, the sum over all ranks); the packs.
        """
        with self.communicator.raising_together():
            merged = self.merged(options)
            communicator = self.communicator.by(implementation_of(merged))
            if reduce_op.adds_up:
                totals = [accumulation.sum_of(components) for components in values]
            else:
                totals = [extrema.of_rank(reduce_op, components) for components in values]
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
        """Copy a pack's arrays side by side into one buffer, and all-reduce the buffer. Returns: a new array for each.

        Args: like: the pack's arrays on this rank.
        """
        if pack.on_device:  # the device's allocator recycles memory itself
            flat = packing.concatenated(like)
            pieces = packing.unpack(flat, like)
        else:
            flat, pieces = self._packer.join(like, pack.length, pack.shape)
        if pack.stays:
            operand = flat.numpy() if pack.to_numpy else flat
            communicator.all_reduce(operand, pack.reduction)
            return pieces
        host = arrays.to_host(flat)
        communicator.all_reduce(host, pack.reduction)
        on_device = arrays.to_device_of(host, like[0])
        return packing.unpack(on_device, like)

    def _reduce_alone(self, communicator: Communicator, pack: _ArrayPack, array: Array) -> Array:
        """All-reduce the only array of a pack from its own memory. Returns: a new array."""
        host = array
        if pack.to_numpy:  # NumPy's calls take a third of the time of torch's
            host = array.numpy(force=True)
        if host.__class__ is not np.ndarray or not host.flags.c_contiguous:
            host = arrays.to_host(host)
        if host.__class__ is np.ndarray and host.nbytes < SMALLEST:
            out = np.empty_like(host)
        else:
            out = self._packer.empty(host.shape, host.dtype)
        communicator.all_reduce(host, pack.reduction, out=out)
        if pack.to_numpy:
            out = sys.modules["torch"].from_numpy(out)
        if pack.on_device:
            out = arrays.to_device_of(out, array)
        return out

    def all_reduce_packs(
        self,
        packer: packing.Packer,
        like: Sequence[Any],
        indices: Sequence[int],
        contributions: Sequence[Sequence[Array | None]],
        reduction_of: Callable[[Sequence[int]], Reduction],
    ) -> dict[int, Array]:
        """Sum the gradients of parameters over all replicas of all ranks. Collective.

        Called by: `DenseSums` of `pytorch.gradients`, at the end of a backward.

        Args:
            packer: makes the packs, flat buffers with the sums side by side.
            like: the parameters.
            indices: the indices in `like` of the parameters to sum; the same on all ranks.
            contributions: for each replica of this rank, a gradient for each of `like`; None counts as zero.
            reduction_of: a function of the indices in one pack; it returns the `Reduction` (label, scale, compressor)
                for that pack.

        Returns: a dict from each index to its sum, a view of a pack. A single gradient on a GPU may be summed in its
            own memory.

        Example:
            >>> from mpistrat.communicators import reducing
            >>> from mpistrat.cross_device_ops.packing import Packer
            >>> ops = ms.MpiAllReduce(ms.OneDeviceStrategy("cpu").extended.communicator)
            >>> parameters, gradients = [torch.zeros(2)], [torch.ones(2)]
            >>> ops.all_reduce_packs(Packer(), parameters, [0], [gradients], lambda indices: reducing())
            {0: tensor([1., 1.])}
        """
        sums: dict[int, Array] = {}
        communicator = self.communicator
        first, *others = contributions
        own_packs: list[packing.Pack] = []
        if len(indices) == len(contributions) == 1:
            own_packs = packing.pack_of_itself(like, indices, contributions)
        for pack in own_packs or packer.packs(like, indices, communicator):
            if not own_packs:
                packing.fill(pack.pieces, list(map(first.__getitem__, pack.indices)))
            for gradients in others:
                packing.add(pack.pieces, list(map(gradients.__getitem__, pack.indices)))
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
            axis: negative counts from the end.
            label: words for the values; equal on all ranks.

        Returns: one array with all components, on the device of `values[0]`.

        Raises: ValueError for scalars or an axis out of range. InvalidArgumentError if dtypes or other sizes differ.

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
    """Return the components, and their dtypes and shapes, of values that need no preparation.

    Such values have one component each: NumPy arrays only, or only host tensors that need no gradients. `MpiAllReduce`
    keeps its packs under their dtypes and shapes.

    Returns: [] and None if any value is of another kind.
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
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)
    classes = set(map(type, firsts))
    are_plain_tensors = classes == {tensor} and set(map(_PLACE, firsts)) == {_ON_HOST}
    if are_plain_tensors or classes == {np.ndarray}:
        return firsts, tuple(map(_KIND, firsts))
    return [], None


def _pack_of(
    communicator: Communicator, totals: Sequence[Array], group: list[int], op: str, name: str
) -> _ArrayPack:
    """Return the pack for some of the arrays `totals`. Nothing is copied yet.

    Args:
        group: the indices in `totals` of the pack's arrays.
        op: the operation as communicators name it: "sum", "max".
        name: the beginning of the pack's label; with several arrays, their shapes follow.
    """
    like = [totals[i] for i in group]
    first = like[0]
    on_device = arrays.is_on_accelerator(first)
    stays = not on_device or communicator.takes_device_buffers
    shape = first.shape if len({array.shape for array in like}) == 1 else None
    return _ArrayPack(
        group,
        reducing(op, packing.name_of(name, like)),
        on_device,
        stays,
        joined=len(group) > 1 or (on_device and stays),
        to_numpy=not on_device and arrays.is_torch(first) and arrays.numpy_knows(first.dtype),
        length=sum(arrays.num_elements(array) for array in like),
        shape=shape,
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
    if label:
        return f"{reduce_op.name} of {label}"
    return reduce_op.name
