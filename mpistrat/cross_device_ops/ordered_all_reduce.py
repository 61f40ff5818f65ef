"""The all-reduce of deterministic strategies: its sums do not depend on how replicas are spread over ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mpistrat import arrays
from mpistrat.arrays import Array
from mpistrat.communicators import Communicator, Reduction, reducing
from mpistrat.communicators.node.memory import NO_MEMORY, NodeMemory
from mpistrat.communicators.reduction.arithmetic import SUMMED_AS_FLOAT32
from mpistrat.communicators.reduction.tree import ReductionTree, tree_of_ranks, tree_of_replicas
from mpistrat.cross_device_ops import accumulation, extrema, packing
from mpistrat.cross_device_ops.all_reduce import MpiAllReduce, name_of
from mpistrat.options import CommunicationOptions
from mpistrat.reduce_op import ReduceOp


class OrderedAllReduce(MpiAllReduce):
    """An `MpiAllReduce` that adds up the replicas' values in a fixed order, the reduction tree: neighbours first.

    See `communicators.reduction.tree` for the order. Integers and IndexedSlices move as in `MpiAllReduce`, because
    sums of integers are the same in any order, and slices are joined in replica order anyway. A MEAN is the sum divided
    by the sum of `components_of_ranks`.

    Made by: deterministic strategies.

    Args:
        components_of_ranks: the number of components of a value on each rank, in rank order. `all_reduce` raises
            ValueError on a rank that passes another number.
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
        rank = self.communicator.rank
        expected = self._components_of_ranks[rank]
        with self.communicator.raising_together():
            merged = self.merged(options)
            for components in values:
                if len(components) != expected:
                    raise ValueError(
                        f"rank {rank}: expected a value with {expected} components, one per replica, got "
                        f"{len(components)}"
                    )
        if reduce_op is ReduceOp.PRODUCT:
            name = name_of(reduce_op, label)
            totals = [self._product(components, merged, name) for components in values]
            return self._finished(reduce_op, totals, values)
        if reduce_op.adds_up:
            return self._sums(reduce_op, values, merged, options, label)
        # No order changes maxima and minima.
        return super().all_reduce(reduce_op, values, options, label)

    def _sums(
        self,
        reduce_op: ReduceOp,
        values: Sequence[Sequence[Any]],
        merged: CommunicationOptions,
        options: CommunicationOptions | None,
        label: str,
    ) -> list[Any]:
        """Return the sum or mean of each of `values` over all replicas. Collective.

        Floating-point and complex values are added up in the order of the reduction tree, other values in any order.

        Args:
            values: for each value, its components on this rank.
            merged: the default options, overridden by `options`; only `bytes_per_pack` counts here.
            options: the options of this call; None: the defaults.
            label: words for the values, as in `all_reduce`.
        """
        with self.communicator.raising_together():
            operands = [accumulation.operands(components) for components in values]
            firsts = [_first_of_rounded(components) for components in operands]
        exact = [i for i, first in enumerate(firsts) if first is None]
        exact_values = [values[i] for i in exact]
        sums = super().all_reduce(reduce_op, exact_values, options, label)
        totals = dict(zip(exact, sums, strict=True))
        for group in packing.groups(firsts, merged.bytes_per_pack):
            like = [firsts[i] for i in group]
            components = [operands[i] for i in group]
            of_replicas = list(zip(*components, strict=True))
            name = packing.name_of(name_of(reduce_op, label), like)
            reduction = reducing(label=name)
            sums = self._sum(self._packer, NO_MEMORY, like, of_replicas, reduction, packing.unpack)
            sums = self._finished(reduce_op, sums, [values[i] for i in group])
            totals.update(zip(group, sums, strict=True))
        return [totals[i] for i in range(len(values))]

    def _count_on_all_ranks(self, components: Sequence[Any]) -> int:
        return sum(self._components_of_ranks)

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
            of_replicas = [[gradients[i] for i in group] for gradients in contributions]
            reduction = reduction_of(group)
            window = self.communicator.memory
            pieces = self._sum(
                packer, window, parameters, of_replicas, reduction, packing.pieces_of
            )
            sums.update(zip(group, pieces, strict=True))
        return sums

    def _product(
        self, components: Sequence[Any], options: CommunicationOptions, name: str
    ) -> Array:
        """Gather one value of all replicas, and return their product, multiplied in replica order. Collective."""
        with self.communicator.raising_together():
            factors = extrema.operands(ReduceOp.PRODUCT, components)
        gathered = self.all_gather([factor[None] for factor in factors], 0, name, options)
        return extrema.product(gathered)

    def _sum(
        self,
        packer: packing.Packer,
        window: NodeMemory,
        like: Sequence[Any],
        values: Sequence[Sequence[Array | None]],
        reduction: Reduction,
        cut: Callable[[Array, Sequence[Any]], list[Array]],
    ) -> list[Array]:
        """Sum arrays of one dtype and device over all replicas, in one message and in the tree's order. Collective.

        Args:
            packer: makes the memory for sums.
            window: holds the sums in its window (memory that a node's ranks share), if there is room.
            like: arrays with the shapes and the dtype of the sums.
            values: for each replica of this rank, an array for each of `like`; None counts as zero.
            reduction: the label and the scale.
            cut: a function of a flat array and `like`; it returns views in the shapes of `like`.

        Returns: the sums, one for each of `like`: views made by `cut`.
        """
        counted = self._components_of_ranks
        first = sum(counted[: self.communicator.rank])
        of_rank = tree_of_replicas(sum(counted), first, first + len(values))
        tree = tree_of_ranks(counted)
        length = sum(arrays.num_elements(array) for array in like)
        # If any rank has several replicas, 16-bit floats are summed as float32, and rounded once, at the end.
        short = arrays.dtype_name(like[0]).startswith(SUMMED_AS_FLOAT32)
        widens = short and max(counted) > 1
        summed = arrays.dtype_like("float32", like[0]) if widens else like[0].dtype
        within = window if tree.one_each else NO_MEMORY
        rows = len(of_rank.left)
        sums = packer.memory(rows * length, like[0], summed, within)
        sums = sums.reshape(rows, length)
        _add_up(of_rank, sums, packer, like, values, cut)
        host = arrays.to_host(sums)
        self.communicator.all_reduce_by_tree(host, tree, reduction)
        total = arrays.to_device_of(host[0], like[0])
        if widens:
            rounded = packer.memory(length, like[0], like[0].dtype)
            rounded[...] = total
            total = rounded
        return cut(total, like)


def _add_up(
    tree: ReductionTree,
    sums: Array,
    packer: packing.Packer,
    like: Sequence[Any],
    values: Sequence[Sequence[Array | None]],
    cut: Callable[[Array, Sequence[Any]], list[Array]],
) -> None:
    """Add up the values of this rank's replicas into `sums`, in the order of `tree`. Not collective.

    Some sums may remain apart, because the order puts values of other ranks first; an all-reduce adds them later.
    Args:
        tree: the order of additions over the rank's replicas. `tree.left` lists the positions (numbers of replicas on
            this rank) of the sums that remain.
        sums: uninitialized, of shape [len(tree.left), elements]. Row i gets the sum that remains at `tree.left[i]`.
        packer: makes memory for unfinished sums.
        like: arrays with the shapes of the values.
        values: for each replica of this rank, an array for each of `like`; None counts as zero.
        cut: a function of a flat array and `like`; it returns views in the shapes of `like`.
    """
    places = dict(zip(tree.left, sums, strict=True))
    flats: dict[int, Array] = {}  # for each replica, its values; later ones are added

    def flat_of(replica: int) -> Array:
        if replica not in flats:
            flat = places.get(replica)
            if flat is None:
                flat = packer.memory(sums.shape[1], like[0], sums.dtype)
            packing.fill(cut(flat, like), values[replica])
            flats[replica] = flat
        return flats[replica]

    for to, added in tree.additions:
        total = flat_of(to)
        if added in flats:
            total += flats.pop(added)
        else:
            # None is added as zero, because minus zero plus zero is zero: if None were skipped, the sign of a zero
            # would depend on the distribution of replicas over ranks.
            packing.add(cut(total, like), values[added], absent="zero")
    for position in tree.left:
        flat_of(position)


def _first_of_rounded(components: Sequence[Any]) -> Array | None:
    """Return the first of `components` if their sum depends on the order of additions; else None.

    Called by: `all_reduce`, for each value. The first component stands for the value's dtype and shape in the packs.
    Args: components: one value's component for each replica of this rank.
    Returns: None for IndexedSlices, and for numbers that are neither floating-point nor complex.

    Raises: InvalidArgumentError if the components cannot be added up.
    """
    if accumulation.are_slices(components):
        return None
    accumulation.check_summable(components)
    first = components[0]
    is_rounded = arrays.is_floating(first) or arrays.dtype_name(first).startswith("complex")
    return first if is_rounded else None
