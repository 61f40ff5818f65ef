"""All-reduce whose sums do not depend on how replicas are spread over ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mpistrat import arrays
from mpistrat.arrays import Array
from mpistrat.communicators import Communicator, Reduction, reducing
from mpistrat.communicators.reduction.tree import tree_of_ranks, tree_of_replicas
from mpistrat.cross_device_ops import accumulation, extrema, packing
from mpistrat.cross_device_ops.all_reduce import MpiAllReduce, as_given, name_of
from mpistrat.options import CommunicationOptions
from mpistrat.reduce_op import ReduceOp


class OrderedAllReduce(MpiAllReduce):
    """`MpiAllReduce` that adds up the replicas of all ranks in the order of `communicators.reduction.tree`.

    Integers, whose sums no order changes, and sparse values, which are joined in replica order, take the usual way.

    Args:
        components_of_ranks: how many components of a value each rank has, in rank order.
    """

    def __init__(
        self,
        communicator: Communicator,
        components_of_ranks: tuple[int, ...],
        options: CommunicationOptions | None = None,
    ) -> None:
        super().__init__(communicator, options)
        self._components_of_ranks = components_of_ranks

    def all_reduce(
        self,
        reduce_op: ReduceOp,
        values: Sequence[Sequence[Any]],
        options: CommunicationOptions | None = None,
        label: str = "",
    ) -> list[Any]:
        with self.communicator.raising_together():
            merged = self.merged(options)
            for components in values:
                self._check_number(components)
        if reduce_op is ReduceOp.PRODUCT:
            return as_given([self._product(each, merged, label) for each in values], values)
        if not reduce_op.adds_up:  # no order changes these
            return super().all_reduce(reduce_op, values, options, label)
        with self.communicator.raising_together():
            operands = [accumulation.operands(components) for components in values]
            rounded = [_is_rounded(components) for components in operands]
        results: dict[int, Any] = {}
        others = [i for i in range(len(values)) if not rounded[i]]
        if others:
            # A mean is divided below: the ranks may have different numbers of components.
            exact = [operands[i] for i in others]
            sums = super().all_reduce(ReduceOp.SUM, exact, options, name_of(reduce_op, label))
            results.update(zip(others, sums, strict=True))
        firsts = [operands[i][0] if rounded[i] else None for i in range(len(values))]
        for group in packing.groups(firsts, merged.bytes_per_pack):
            like = [firsts[i] for i in group]
            replicas = range(len(operands[group[0]]))
            own = [[operands[i][replica] for i in group] for replica in replicas]
            name = packing.name_of(name_of(reduce_op, label), like)
            reduction = reducing(label=name)
            flat = self._sum(self._packer, None, like, own, reduction, packing.unpack)
            results.update(zip(group, packing.unpack(flat, like), strict=True))
        totals = [results[i] for i in range(len(values))]
        if reduce_op is ReduceOp.MEAN:
            count = sum(self._components_of_ranks)
            totals = [accumulation.divide(total, count) for total in totals]
        return as_given(totals, values)

    def all_reduce_packs(
        self,
        packer: packing.Packer,
        like: Sequence[Any],
        indices: Sequence[int],
        contributions: Sequence[Sequence[Array | None]],
        reduction_of: Callable[[Sequence[int]], Reduction],
    ) -> dict[int, Array]:
        sums: dict[int, Array] = {}
        for group in packing.alike(like, indices):
            parameters = [like[i] for i in group]
            own = [[gradients[i] for i in group] for gradients in contributions]
            reduction = reduction_of(group)
            cut = packing.pieces_of
            flat = self._sum(packer, self.communicator, parameters, own, reduction, cut)
            sums.update(zip(group, cut(flat, parameters), strict=True))
        return sums

    def _product(
        self, components: Sequence[Any], options: CommunicationOptions, label: str
    ) -> Array:
        """Over all replicas in the order of their ids, whichever ranks they are on."""
        with self.communicator.raising_together():
            own = extrema.operands(ReduceOp.PRODUCT, components)
        label = name_of(ReduceOp.PRODUCT, label)
        everyone = self.all_gather([factor[None] for factor in own], 0, label, options)
        return extrema.restored(ReduceOp.PRODUCT, extrema.product(everyone), components[0])

    def _check_number(self, components: Sequence[Any]) -> None:
        expected = self._components_of_ranks[self.communicator.rank]
        if len(components) != expected:
            raise ValueError(
                f"a value with {expected} components was expected on rank {self.communicator.rank}, one per replica, "
                f"got {len(components)}"
            )

    def _sum(
        self,
        packer: packing.Packer,
        window: Communicator | None,
        like: Sequence[Any],
        values: Sequence[Sequence[Array | None]],
        reduction: Reduction,
        cut: Callable[[Array, Sequence[Any]], list[Array]],
    ) -> Array:
        """The sums over all replicas of arrays of one dtype and device, side by side, in one message.

        Args:
            window: in whose window the sums are, where there is room.
            values: for each replica of this rank one for each of `like`; None counts as zero.
            cut: how the result will be cut into arrays.
        """
        counted = self._components_of_ranks
        first = sum(counted[: self.communicator.rank])
        mine = tree_of_replicas(sum(counted), first, first + len(values))
        tree = tree_of_ranks(counted)
        length = sum(map(arrays.num_elements, like))
        # Of several replicas of a rank, 16-bit floats are summed as float32, and rounded once, at the end.
        short = arrays.is_floating(like[0]) and arrays.itemsize(like[0]) < 4
        widens = short and max(counted) > 1
        summed = arrays.dtype_like("float32", like[0]) if widens else like[0].dtype
        within = window if tree.one_each else None
        sums = packer.memory(len(mine.left) * length, like[0], summed, within)
        sums = sums.reshape(len(mine.left), length)
        places = dict(zip(mine.left, sums, strict=True))
        flats: dict[int, Array] = {}  # by replica: its values, and what was added to them

        def flat_of(replica: int) -> Array:
            if replica not in flats:
                flat = places.get(replica)
                if flat is None:
                    flat = packer.memory(length, like[0], summed)
                packing.fill(cut(flat, like), values[replica])
                flats[replica] = flat
            return flats[replica]

        for to, added in mine.additions:
            total = flat_of(to)
            if added in flats:
                total += flats.pop(added)
            else:
                # Minus zero must not survive on some splits of replicas only.
                packing.add(cut(total, like), values[added], absent="zero")
        for position in mine.left:
            flat_of(position)
        host = arrays.to_host(sums)
        self.communicator.all_reduce_by_tree(host, tree, reduction)
        total = arrays.to_device_of(host[0], like[0])
        if widens:
            rounded = packer.memory(length, like[0])
            rounded[...] = total
            total = rounded
        return total


def _is_rounded(components: Sequence[Any]) -> bool:
    """Whether these are dense numbers whose sum depends on the order of additions."""
    if accumulation.are_slices(components):
        return False
    accumulation.check_summable(components)
    first = components[0]
    return arrays.is_floating(first) or arrays.dtype_name(first).startswith("complex")
