"""Policies that reduce among the devices of one rank, and copy the result to each of these devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpistrat import arrays
from mpistrat.cross_device_ops import accumulation, packing
from mpistrat.cross_device_ops.cross_device_ops import place
from mpistrat.cross_device_ops.reduction_to_one_device import ReductionToOneDevice
from mpistrat.indexed_slices import IndexedSlices
from mpistrat.options import CommunicationImplementation, CommunicationOptions, is_integer
from mpistrat.reduce_op import ReduceOp
from mpistrat.values import PerReplica


class _PackedAllReduce(ReductionToOneDevice):
    """Joins the arrays of a batch into a few flat arrays (packs), and reduces these among the devices of one rank.

    It joins dense arrays that have the dtype and the number of components of the batch's first value, if there are at
    least two; it reduces each other value alone.

    Args:
        num_packs: number of packs, of equal length, for the dense arrays of a batch; 0 joins nothing.

    Raises: TypeError or ValueError unless `num_packs` is an integer >= 0.
    """

    def __init__(self, num_packs: int = 1) -> None:
        if not is_integer(num_packs):
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
        rows = [pairs[i][0].values for i in dense]
        for components in rows:
            accumulation.check_summable(components)
        columns = list(zip(*rows, strict=True))
        packs = [packing.concat_and_split(column, self.num_packs) for column in columns]
        reduced = [self.combine(reduce_op, pieces) for pieces in zip(*packs, strict=True)]
        unpacked = packing.unpack(arrays.concatenate(reduced), columns[0])
        totals = dict(zip(dense, unpacked, strict=True))
        results = []
        for i, (value, where) in enumerate(pairs):
            if i in totals:
                results.append(place(totals[i], where))
            else:
                results.append(self.reduce_implementation(reduce_op, value, where, options))
        return results

    @staticmethod
    def _can_pack(value: PerReplica, like: PerReplica) -> bool:
        components = like.values[0], *value.values
        dtypes = {getattr(component, "dtype", None) for component in components}  # None: sparse
        are_dense_and_alike = len(dtypes - {None}) == len(dtypes) == 1
        return are_dense_and_alike and len(value.values) == len(like.values) > 1


class NcclAllReduce(_PackedAllReduce):
    """All-reduce among the GPUs of one rank, by torch's NCCL if each component is a tensor on a different GPU.

    Other values are added up on one device. A rank with one GPU has nothing to reduce inside the rank. Between ranks,
    also on several nodes, a strategy with this policy uses NCCL if all ranks can use it.

    Args:
        num_packs: number of flat arrays, of equal length, that the dense arrays of a batch are joined into; 0 joins
            nothing.

    Example:
        >>> ops = ms.NcclAllReduce(num_packs=2)
        >>> strategy = ms.MirroredStrategy(["cpu:0", "cpu:1"], cross_device_ops=ops)
        >>> strategy.reduce("sum", ms.PerReplica([np.ones(2), np.ones(2)]), axis=None)  # NCCL itself only on GPUs
        array([2., 2.])
    """

    between_ranks = CommunicationImplementation.NCCL

    def add(self, values: Sequence[Any]) -> Any:
        devices = {
            value.get_device() for value in values if arrays.is_torch(value) and value.is_cuda
        }
        if len(devices) < len(values):
            return super().add(values)
        from torch.nn.parallel import comm

        accumulation.check_summable(values)
        contiguous = [value.contiguous() for value in values]
        return comm.reduce_add(contiguous, values[0].get_device())


class HierarchicalCopyAllReduce(_PackedAllReduce):
    """All-reduce among the devices of one rank in two levels: each half of the devices, then the two halves' sums.

    Each half is added up on its first device. This suits machines with two groups of GPUs and fast links inside
    each group. With fewer than four components, or IndexedSlices, all are added up at once. Between ranks on several
    nodes, large values on GPUs move as with `CommunicationImplementation.HIERARCHICAL`.

    Args:
        num_packs: number of flat arrays, of equal length, that the dense arrays of a batch are joined into; 0 joins
            nothing.

    Example:
        >>> ops = ms.HierarchicalCopyAllReduce()
        >>> ops.reduce(ms.ReduceOp.SUM, ms.PerReplica([np.ones(2)] * 4), "cpu:0")
        array([4., 4.])
    """

    between_ranks = CommunicationImplementation.HIERARCHICAL

    def add(self, values: Sequence[Any]) -> Any:
        add = super().add
        half = len(values) // 2
        if half < 2 or isinstance(values[0], IndexedSlices):
            return add(values)
        accumulation.check_summable(values)
        sums = [add(values[:half]), add(values[half:])]
        return add(sums)
