"""Policies that leave the result on every device: between the devices of a rank, and over MPI."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpistrat import arrays
from mpistrat.arrays import Array
from mpistrat.communicators import Communicator, Reduction, reducing
from mpistrat.cross_device_ops import accumulation, extrema, packing
from mpistrat.cross_device_ops.cross_device_ops import CrossDeviceOps, place
from mpistrat.cross_device_ops.reduction_to_one_device import ReductionToOneDevice
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


class _PackedAllReduce(ReductionToOneDevice):
    """Reduces packs of fused arrays among the devices of one rank.

    Args:
        num_packs: into how many equal pieces the dense arrays of a batch are fused; 0 fuses nothing.
    """

    def __init__(self, num_packs: int = 1) -> None:
        if isinstance(num_packs, bool) or not isinstance(num_packs, int):
            raise TypeError(f"num_packs must be an integer, got {num_packs!r:.60}")
        if num_packs < 0:
            raise ValueError(f"num_packs must be >= 0 (0: no packing), got {num_packs}")
        self.num_packs = num_packs
        super().__init__()

    def batch_reduce_implementation(
        self,
        reduce_op: ReduceOp,
        value_destination_pairs: Sequence[tuple[PerReplica, Any]],
        options: CommunicationOptions,
    ) -> list[Any]:
        pairs = value_destination_pairs
        dense = [i for i, (value, _) in enumerate(pairs) if self._can_pack(value, pairs[0][0])]
        if self.num_packs == 0 or len(dense) < 2:
            return super().batch_reduce_implementation(reduce_op, pairs, options)
        replicas = range(len(pairs[0][0].values))
        columns = [[pairs[i][0].values[r] for i in dense] for r in replicas]
        for rows in zip(*columns, strict=True):
            accumulation.check_summable(rows)
        packs = [packing.concat_and_split(column, self.num_packs) for column in columns]
        reduced = [self.combine(reduce_op, pieces) for pieces in zip(*packs, strict=True)]
        unpacked = packing.unpack(arrays.concatenate(reduced), columns[0])
        totals = dict(zip(dense, unpacked, strict=True))
        return [
            place(totals[i], where)
            if i in totals
            else self.reduce_implementation(reduce_op, value, where, options)
            for i, (value, where) in enumerate(pairs)
        ]

    @staticmethod
    def _can_pack(value: PerReplica, like: PerReplica) -> bool:
        return len(value.values) == len(like.values) > 1 and not any(
            isinstance(v, IndexedSlices)
            or isinstance(like.values[0], IndexedSlices)
            or v.dtype != like.values[0].dtype
            for v in value.values
        )


class NcclAllReduce(_PackedAllReduce):
    """All-reduce among the GPUs of one rank, by torch's NCCL where each tensor is on a GPU of its own.

    Other values are reduced on one device. One rank per GPU, which is how MPI programs use GPUs, leaves nothing to
    reduce inside a rank; between ranks NCCL is used where it can be, of all ranks alike, on several nodes, too.
    """

    between_ranks = CommunicationImplementation.NCCL

    def add(self, values: Sequence[Any]) -> Any:
        if not _on_gpus_of_their_own(values):
            return super().add(values)
        from torch.nn.parallel import comm

        accumulation.check_summable(values)
        return comm.reduce_add([v.contiguous() for v in values], values[0].get_device())


def _on_gpus_of_their_own(values: Sequence[Any]) -> bool:
    if not all(arrays.is_torch(value) and value.is_cuda for value in values):
        return False
    return len({value.get_device() for value in values}) == len(values)


class HierarchicalCopyAllReduce(_PackedAllReduce):
    """All-reduce among the devices of one rank in two levels: two halves, then the two sums.

    The copies follow the wiring of machines whose GPUs come in two fully connected groups: each half is added up on its
    own first device. Between ranks on several nodes large values on GPUs go by node: see
    `CommunicationImplementation.HIERARCHICAL`.
    """

    between_ranks = CommunicationImplementation.HIERARCHICAL

    def add(self, values: Sequence[Any]) -> Any:
        add, half = super().add, len(values) // 2
        if half < 2 or isinstance(values[0], IndexedSlices):
            return add(values)
        accumulation.check_summable(values)
        return add([add(values[:half]), add(values[half:])])


class MpiAllReduce(CrossDeviceOps):
    """All-reduce over all replicas of all ranks of a communicator; values on GPUs go as `explain()` tells.

    Each rank first adds up its own components; the sums of a batch are packed by dtype and by
    `CommunicationOptions.bytes_per_pack`, all-reduced over MPI, and unpacked.

    Called by: every rank of `communicator`, in the same order, with as many components each.
    Args:
        options: defaults of every call.
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

    def _warn_of_timeout(self, options: CommunicationOptions) -> None:
        if options.timeout_seconds is not None:
            warn_of_no_effect(
                "timeout_seconds of CommunicationOptions",
                f"a collective that lasts longer than {stall_seconds.name} is explained, and ends the job; one that "
                "waits for a rank that has died ends at once",
                self.communicator.rank,
            )

    def merged(self, options: CommunicationOptions | None) -> CommunicationOptions:
        """The defaults, overridden by the options of one call."""
        if options is None:
            return self.options
        merged = self.options.merge(options)
        self._warn_of_timeout(options)
        for name in ("overlap", "wire_dtype", "wire_format"):
            if getattr(options, name) is not None:
                warn_of_no_effect(
                    f"{name} in the options of one call",
                    "it is about the gradients that backward() reduces; give it to the strategy",
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
        """Combine each of `values` over its components on all ranks; results are fresh arrays.

        Args:
            values: for each value its components on this rank: arrays, numbers, variables or IndexedSlices. Python
                numbers give Python numbers.
            options: override the defaults.
            label: what the values are, e.g. their structure; must be equal on all ranks.
        """
        merged, implementation = self.options, self._implementation
        try:
            if options is not None:
                merged = self.merged(options)
                implementation = implementation_of(merged)
            results = (
                accumulation.sums_of(values)
                if reduce_op.adds_up
                else [extrema.of_rank(reduce_op, components) for components in values]
            )
        except Exception as error:
            self.communicator.raise_together(error)
        communicator = self.communicator
        if implementation is not CommunicationImplementation.AUTO:
            communicator = communicator.by(implementation)
        name, op = name_of(reduce_op, label), extrema.OPS.get(reduce_op, "sum")
        groups = packing.groups(results, merged.bytes_per_pack)
        whole = len(groups) == 1 and len(groups[0]) == len(results)
        if not whole:
            for i, total in enumerate(results):
                if isinstance(total, IndexedSlices):
                    results[i] = self._all_gather_slices(communicator, total, name)
        for group in groups:
            like = list(results) if whole else [results[i] for i in group]
            packed, out, pieces = self._pack(communicator, like)
            communicator.all_reduce(packed, reducing(op, packing.name_of(name, like)), out=out)
            if pieces is None:
                total = arrays.to_device_of(packed if out is None else out, like[0])
                pieces = [total] if len(like) == 1 else packing.unpack(total, like)
            for i, piece in zip(group, pieces):  # noqa: B905 - strict takes 0.1 us
                results[i] = piece
        if reduce_op is ReduceOp.MEAN:
            results = [
                accumulation.divide(total, len(components) * communicator.size)
                for total, components in zip(results, values, strict=True)
            ]
        elif not reduce_op.adds_up:
            results = [
                extrema.restored(reduce_op, total, components[0])
                for total, components in zip(results, values, strict=True)
            ]
        return as_given(results, values)

    def _pack(
        self, communicator: Communicator, like: Sequence[Array]
    ) -> tuple[Array, Array | None, list[Array] | None]:
        """What is given to `communicator`; where it puts the result, or None: in place; and its pieces.

        One array on the host is not copied. There are no pieces yet of what has to go back to a device.
        """
        on_device = arrays.is_on_accelerator(like[0])
        stays = not on_device or communicator.takes_device_buffers or communicator.size == 1
        if len(like) == 1 and not (on_device and stays):
            host = arrays.to_host(like[0])
            if on_device or not arrays.is_torch(host) or not arrays.numpy_knows(host.dtype):
                out = self._packer.like(host)
                return host, out, None if on_device else [out]
            view = host.numpy()  # NumPy's calls take a third of the time of torch's
            out = self._packer.like(view)
            return view, out, [sys.modules["torch"].from_numpy(out)]
        flat, pieces = self._packer.join(like)
        return (flat, None, pieces) if stays else (arrays.to_host(flat), None, None)

    def all_reduce_packs(
        self,
        packer: packing.Packer,
        like: Sequence[Any],
        indices: Sequence[int],
        contributions: Sequence[Sequence[Array | None]],
        reduction_of: Callable[[Sequence[int]], Reduction],
    ) -> dict[int, Array]:
        """Sum the gradients of parameters over all replicas of all ranks; the sums lie in packs.

        Args:
            packer: whose memory they lie in.
            like: the parameters.
            indices: of those whose gradients are summed; the same on all ranks.
            contributions: for each replica of this rank its gradients, one for each of `like`; None counts as zero.
            reduction_of: the sum of some of them.
        Returns: the sums, by index.
        """
        sums: dict[int, Array] = {}
        communicator = self.communicator
        own_pack = None
        if len(indices) == len(contributions) == 1:
            own_pack = packing.pack_of_itself(like, indices, contributions)
        for pack in [own_pack] if own_pack else packer.packs(like, indices, communicator):
            for number, own in enumerate(contributions):
                values = [*map(own.__getitem__, pack.indices)]
                if number:
                    packing.add(pack.pieces, values)
                elif pack is not own_pack:
                    packing.fill(pack.pieces, values)
            stays = pack.flat.is_cpu or communicator.takes_device_buffers or communicator.size == 1
            host = pack.flat if stays else arrays.to_host(pack.flat)
            operand = host if pack.host is None else pack.host
            communicator.all_reduce(operand, reduction_of(pack.indices), follows=True)
            if not stays:
                pack.flat.copy_(host)
            sums.update(zip(pack.indices, pack.pieces, strict=True))
        return sums

    @staticmethod
    def _all_gather_slices(
        communicator: Communicator, slices: IndexedSlices, label: str
    ) -> IndexedSlices:
        def joined(part: Array) -> Array:
            everyone = communicator.all_gather(arrays.to_host(part), label=label)
            return arrays.to_device_of(arrays.concatenate(everyone), part)

        return IndexedSlices(joined(slices.values), joined(slices.indices), slices.dense_shape)

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
        """Concatenate `values` of all ranks along `axis`, in rank order.

        Args:
            values: this rank's components.
            label: what the values are; must be equal on all ranks.
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


def name_of(reduce_op: ReduceOp, label: str) -> str:
    """What the label of a reduction begins with."""
    return f"{reduce_op.name} of {label}" if label else reduce_op.name


def as_given(results: list[Any], values: Sequence[Sequence[Any]]) -> list[Any]:
    """`results`, of Python numbers Python numbers."""
    for i, components in enumerate(values):
        first = components[0]
        if first.__class__ is not np.ndarray and arrays.is_number(first):
            results[i] = results[i].item()
    return results
