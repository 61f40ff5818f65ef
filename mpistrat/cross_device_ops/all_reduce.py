"""Policies that leave the result on every device: between the devices of a rank, and over MPI."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from mpistrat import arrays
from mpistrat.arrays import Array
from mpistrat.communicators.communicator import Communicator
from mpistrat.cross_device_ops import accumulation, packing
from mpistrat.cross_device_ops.cross_device_ops import CrossDeviceOps, place
from mpistrat.cross_device_ops.reduction_to_one_device import ReductionToOneDevice
from mpistrat.indexed_slices import IndexedSlices
from mpistrat.options import CommunicationOptions, implementation_of
from mpistrat.recycled_buffers import RecycledBuffers
from mpistrat.reduce_op import ReduceOp
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
            return [self.reduce_implementation(reduce_op, v, d, options) for v, d in pairs]
        replicas = range(len(pairs[0][0].values))
        columns = [[pairs[i][0].values[r] for i in dense] for r in replicas]
        for rows in zip(*columns, strict=True):
            accumulation.check_summable(rows)
        packs = [packing.concat_and_split(column, self.num_packs) for column in columns]
        reduced = [self.combine(reduce_op, pieces) for pieces in zip(*packs, strict=True)]
        unpacked = packing.unpack(arrays.concatenate(reduced), columns[0])
        results: list[Any] = [None] * len(pairs)
        for i, value in zip(dense, unpacked, strict=True):
            results[i] = place(value, pairs[i][1])
        for i, (value, where) in enumerate(pairs):
            if i not in dense:
                results[i] = self.reduce_implementation(reduce_op, value, where, options)
        return results

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
    reduce inside a rank; between ranks NCCL is used whatever the policy, wherever it can be.
    """

    def combine(self, reduce_op: ReduceOp, values: Sequence[Any]) -> Any:
        if not _on_gpus_of_their_own(values):
            return super().combine(reduce_op, values)
        from torch.nn.parallel import comm

        accumulation.check_summable(values)
        total = comm.reduce_add([v.contiguous() for v in values], values[0].get_device())
        return accumulation.divide(total, len(values)) if reduce_op is ReduceOp.MEAN else total


def _on_gpus_of_their_own(values: Sequence[Any]) -> bool:
    if not all(arrays.is_torch(value) and value.is_cuda for value in values):
        return False
    return len({value.get_device() for value in values}) == len(values)


class HierarchicalCopyAllReduce(_PackedAllReduce):
    """All-reduce among the devices of one rank in two levels: two halves, then the two sums.

    The copies follow the wiring of machines whose GPUs come in two fully connected groups: each half is added up on its
    own first device. Between ranks it is the communicator that chooses, as for every policy.
    """

    def combine(self, reduce_op: ReduceOp, values: Sequence[Array]) -> Array:
        half = len(values) // 2
        if half < 2 or isinstance(values[0], IndexedSlices):
            return super().combine(reduce_op, values)
        accumulation.check_summable(values)
        combine = super().combine
        halves = (values[:half], values[half:])
        total = combine(ReduceOp.SUM, [combine(ReduceOp.SUM, part) for part in halves])
        return accumulation.divide(total, len(values)) if reduce_op is ReduceOp.MEAN else total


class MpiAllReduce(CrossDeviceOps):
    """All-reduce over all replicas of all ranks of a communicator; values on GPUs go as `explain()` tells.

    Each rank first adds up its own components; the sums of a batch are packed by dtype and by
    `CommunicationOptions.bytes_per_pack`, all-reduced over MPI, and unpacked.

    Called by: every rank of `communicator`, in the same order, with as many components each.
    """

    def __init__(self, communicator: Communicator) -> None:
        if not isinstance(communicator, Communicator):
            raise TypeError(
                "MpiAllReduce takes a Communicator, such as strategy.extended.communicator, got "
                f"{communicator!r:.60}"
            )
        self.communicator = communicator
        self._results = RecycledBuffers()

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
        options: CommunicationOptions,
        label: str = "",
    ) -> list[Any]:
        """Sum or average each of `values` over its components on all ranks; results are fresh arrays.

        Args:
            values: for each value its components on this rank, arrays or IndexedSlices.
            label: what the values are, e.g. their structure; must be equal on all ranks.
        """
        try:
            sums = [_add_up(components) for components in values]
        except Exception as error:
            self.communicator.raise_together(error)
        communicator = self.communicator.by(implementation_of(options))
        label = f"{reduce_op.name} of {label}" if label else reduce_op.name
        results: list[Any] = [None] * len(sums)
        dense = [i for i, total in enumerate(sums) if not isinstance(total, IndexedSlices)]
        for i, total in enumerate(sums):
            if isinstance(total, IndexedSlices):
                results[i] = self._all_gather_slices(communicator, total, label)
        groups = packing.group_by_size([sums[i] for i in dense], options.bytes_per_pack)
        position = len(dense)
        for group in reversed(groups):
            position -= len(group)
            for offset, total in enumerate(self._reduce_pack(communicator, group, label)):
                results[dense[position + offset]] = total
        if reduce_op is ReduceOp.MEAN:
            size = self.communicator.size
            return [
                accumulation.divide(total, len(components) * size)
                for total, components in zip(results, values, strict=True)
            ]
        return results

    def _reduce_pack(
        self, communicator: Communicator, group: list[Array], label: str
    ) -> list[Array]:
        as_it_is = self._goes_as_it_is(communicator, group[0])
        if communicator.size == 1 and arrays.is_on_accelerator(group[0]):
            return [arrays.copy(value) for value in group]
        if len(group) == 1 and not as_it_is:
            host = arrays.to_host(group[0])
            total = self._results.like(host)
            communicator.all_reduce(host, out=total, label=label)
            return [arrays.to_device_of(total, group[0])]
        flat = arrays.detach(arrays.concatenate([value.reshape(-1) for value in group]))
        if not as_it_is:
            flat = arrays.to_host(flat)
        shapes = ",".join(str(list(value.shape)) for value in group)
        communicator.all_reduce(flat, label=f"{label} {shapes}")
        return packing.unpack(arrays.to_device_of(flat, group[0]), group)

    @staticmethod
    def _goes_as_it_is(communicator: Communicator, value: Array) -> bool:
        """Whether `communicator` takes it from the device that it is on."""
        return communicator.takes_device_buffers and arrays.is_on_accelerator(value)

    @staticmethod
    def _all_gather_slices(
        communicator: Communicator, slices: IndexedSlices, label: str
    ) -> IndexedSlices:
        values = communicator.all_gather(arrays.to_host(slices.values), label=label)
        indices = communicator.all_gather(arrays.to_host(slices.indices), label=label)
        return IndexedSlices(
            arrays.to_device_of(arrays.concatenate(values), slices.values),
            arrays.to_device_of(arrays.concatenate(indices), slices.indices),
            slices.dense_shape,
        )

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
        operand = (
            arrays.copy(local)
            if self._goes_as_it_is(communicator, local)
            else arrays.to_host(local)
        )
        parts = communicator.all_gather(operand, label=f"{label} along axis {front}".lstrip())
        accumulation.check_joinable(parts, front, "rank")
        return arrays.to_device_of(arrays.concatenate(parts, front), values[0])

    def _checks(self) -> contextlib.AbstractContextManager[None]:
        return self.communicator.raising_together()


def _add_up(components: Sequence[Any]) -> Any:
    if accumulation.are_slices(components):
        return accumulation.add_slices(components)
    accumulation.check_summable(components)
    return accumulation.add_n(components)
