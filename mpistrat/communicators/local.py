"""The communicator of one rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpistrat.arrays import Array
from mpistrat.communicators.communicator import Communicator
from mpistrat.communicators.operand_checks import (
    check_contiguous,
    check_exchange,
    check_gathered,
    check_out,
    check_parts,
    check_reduction,
)
from mpistrat.communicators.reduction import SUM, Reduction, as_reduction
from mpistrat.communicators.reduction.tree import ReductionTree


class LocalCommunicator(Communicator):
    """A group of one rank, without MPI. Collectives with an `out` copy `buffer` into it.

    Reductions apply their scale. `all_gather` returns a list with `buffer` itself, and `split` returns this object.
    """

    rank = 0
    size = 1
    takes_device_buffers = True

    def all_reduce(
        self,
        buffer: Array,
        reduction: Reduction | str = SUM,
        *,
        out: Array | None = None,
        cause: Exception | None = None,
        follows: bool = False,
    ) -> None:
        target = buffer
        reduction = as_reduction(reduction)
        check_reduction(reduction.op, reduction.scale, buffer)
        if out is not None:
            check_out(buffer, out)
            target = out
            target[...] = buffer
        if reduction.scale is not None:
            target *= reduction.scale

    def all_reduce_by_tree(
        self, sums: Array, tree: ReductionTree, reduction: Reduction = SUM
    ) -> None:
        # imported here, so that `import mpistrat` stays fast
        from mpistrat.communicators.host_views import bytes_of
        from mpistrat.communicators.reduction.tree import tree_sum_of

        memory = bytes_of(sums)
        how = tree_sum_of(sums.dtype, tree)
        values = how.view(memory)
        how.combine([values], values, reduction.scale)

    def reduce(self, buffer: Array, root: int = 0, reduction: Reduction | str = SUM) -> None:
        self.all_reduce(buffer, reduction)

    def reduce_scatter(self, buffer: Array, out: Array, reduction: Reduction | str = SUM) -> None:
        check_parts(buffer, out, 1)
        self.all_reduce(buffer.reshape(out.shape), reduction, out=out)

    def broadcast(self, buffer: Array, root: int = 0, *, label: str = "") -> None:
        pass

    def all_gather(self, buffer: Array, *, label: str = "") -> list[Array]:
        return [buffer]

    def all_gather_into(self, buffer: Array, out: Array, *, label: str = "") -> None:
        check_gathered(buffer, out, 1)
        check_contiguous(buffer, out)
        out[...] = buffer.reshape(out.shape)

    def all_to_all(
        self,
        buffer: Array,
        out: Array,
        sent: Sequence[int],
        received: Sequence[int],
        *,
        label: str = "",
    ) -> None:
        check_exchange(buffer, out, sent, received, 1)
        check_contiguous(buffer, out)
        out[...] = buffer

    def explain(self) -> str:
        return "one rank: nothing moves"

    def broadcast_object(self, value: Any, root: int = 0, *, label: str = "") -> Any:
        return value

    def all_gather_object(self, value: Any, *, label: str = "") -> list[Any]:
        return [value]

    def barrier(self, *, label: str = "") -> None:
        pass

    def split(self, color: int, key: int = 0) -> Communicator:
        return self
