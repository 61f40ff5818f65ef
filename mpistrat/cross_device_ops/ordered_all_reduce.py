"""All-reduce whose sums do not depend on how replicas are spread over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpistrat import arrays
from mpistrat.arrays import Array
from mpistrat.communicators.communicator import Communicator
from mpistrat.communicators.reduction_tree import tree_of_ranks, tree_of_replicas
from mpistrat.cross_device_ops import accumulation, packing
from mpistrat.cross_device_ops.all_reduce import MpiAllReduce
from mpistrat.options import CommunicationOptions
from mpistrat.reduce_op import ReduceOp


class OrderedAllReduce(MpiAllReduce):
    """`MpiAllReduce` that adds up the replicas of all ranks in the order of `communicators.reduction_tree`.

    Integers, whose sums no order changes, and sparse values, which are joined in replica order, take the usual way.

    Args:
        components_of_ranks: how many components of a value each rank has, in rank order.
    """

    def __init__(self, communicator: Communicator, components_of_ranks: tuple[int, ...]) -> None:
        super().__init__(communicator)
        self._components_of_ranks = components_of_ranks

    def all_reduce(
        self,
        reduce_op: ReduceOp,
        values: Sequence[Sequence[Any]],
        options: CommunicationOptions,
        label: str = "",
    ) -> list[Any]:
        with self.communicator.raising_together():
            for components in values:
                self._check_number(components)
            rounded = [_is_rounded(components) for components in values]
        label = f"{reduce_op.name} of {label}" if label else reduce_op.name
        results: list[Any] = [None] * len(values)
        others = [i for i in range(len(values)) if not rounded[i]]
        if others:
            # A mean is divided below: the ranks may have different numbers of components.
            sums = super().all_reduce(ReduceOp.SUM, [values[i] for i in others], options, label)
            for i, total in zip(others, sums, strict=True):
                results[i] = total
        alike = [i for i in range(len(values)) if rounded[i]]
        position = 0
        for pack in packing.group_by_size([values[i][0] for i in alike], options.bytes_per_pack):
            group = alike[position : position + len(pack)]
            position += len(pack)
            for i, total in zip(
                group, self._add_up([values[i] for i in group], label), strict=True
            ):
                results[i] = total
        if reduce_op is ReduceOp.MEAN:
            count = sum(self._components_of_ranks)
            results = [accumulation.divide(total, count) for total in results]
        return results

    def _check_number(self, components: Sequence[Any]) -> None:
        expected = self._components_of_ranks[self.communicator.rank]
        if len(components) != expected:
            raise ValueError(
                f"a value with {expected} components was expected on rank {self.communicator.rank}, one per replica, "
                f"got {len(components)}"
            )

    def _add_up(self, pack: Sequence[Sequence[Array]], label: str) -> list[Array]:
        """The sums of several values of one dtype, in one message."""
        like = [components[0] for components in pack]
        counted = self._components_of_ranks
        replicas = counted[self.communicator.rank]
        first = sum(counted[: self.communicator.rank])
        tree = tree_of_replicas(sum(counted), first, first + replicas)
        sums = [_joined([components[i] for components in pack]) for i in range(replicas)]
        if max(counted) > 1 and arrays.is_floating(like[0]) and arrays.itemsize(like[0]) < 4:
            sums = [arrays.cast(flat, "float32") for flat in sums]  # rounded once, at the end
        for to, added in tree.additions:
            sums[to] = sums[to] + sums[added]
        host = [arrays.to_host(sums[position])[None] for position in tree.left]
        given = host[0] if len(host) == 1 else arrays.concatenate(host)
        total = self._results.like(given)
        total[...] = given
        shapes = ",".join(str(list(value.shape)) for value in like)
        self.communicator.all_reduce_by_tree(
            total, tree_of_ranks(counted), label=f"{label} {shapes}"
        )
        flat = arrays.to_device_of(total[0], like[0])
        if flat.dtype != like[0].dtype:
            flat = arrays.cast(flat, like[0].dtype)
        return packing.unpack(flat, like)


def _is_rounded(components: Sequence[Any]) -> bool:
    """Whether these are dense numbers whose sum depends on the order of additions."""
    if accumulation.are_slices(components):
        return False
    accumulation.check_summable(components)
    return arrays.is_floating(components[0]) or arrays.dtype_name(components[0]).startswith(
        "complex"
    )


def _joined(values: Sequence[Array]) -> Array:
    flats = [value.reshape(-1) for value in values]
    return flats[0] if len(flats) == 1 else arrays.concatenate(flats)
