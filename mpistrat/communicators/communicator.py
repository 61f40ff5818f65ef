"""What every communicator can do."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from mpistrat.arrays import Array
from mpistrat.communicators.reduction import SUM, Reduction
from mpistrat.errors import CollectiveMismatchError, RankLostError, StallError
from mpistrat.options import CommunicationImplementation

if TYPE_CHECKING:
    from mpistrat.communicators.node.common_memory import CommonMemory, Part, View
    from mpistrat.communicators.reduction_tree import ReductionTree
    from mpistrat.liveness.watch import CommunicatorWatch
    from mpistrat.trace.timeline import Timeline


class Communicator(abc.ABC):
    """One group of ranks. Every method is collective: all ranks call it, in the same order.

    Buffers are C-contiguous NumPy arrays or CPU tensors. `label`, as that of a `Reduction`, says in words what is
    exchanged (a structure, parameter names); it is part of what the ranks must agree on. Where a `Reduction` is taken,
    the name of an operation, "sum", "max" or "min", stands for the plain one.

    Attributes:
        rank: this process's number in the group, 0 <= rank < size.
        size: number of ranks in the group.
        window_capacity: up to so many bytes `window_buffer` is not collective: all ranks have the window.
        on_one_node: all ranks share a node's memory, as far as is known.
        thread_multiple: threads may be in collectives of different communicators at the same time.
        timeline: where its calls are shown; None where they are not.
        watch: where its calls are recorded; None where they are not.
        takes_device_buffers: buffers may be CuPy arrays and CUDA or XLA tensors, too, on all ranks alike.
    """

    rank: int
    size: int
    window_capacity = 0
    on_one_node = True
    thread_multiple = False
    timeline: Timeline | None = None
    watch: CommunicatorWatch | None = None
    takes_device_buffers = False

    @abc.abstractmethod
    def all_reduce(
        self,
        buffer: Array,
        reduction: Reduction | str = SUM,
        *,
        out: Array | None = None,
        cause: Exception | None = None,
    ) -> None:
        """Combine `buffer` of all ranks element by element, into `out` or in place.

        Args:
            buffer: same shape and dtype on every rank; 16-bit floats are summed in float32.
            out: a second buffer of the same shape and dtype; None overwrites `buffer`.
            cause: what has kept this rank from what it was doing: told to the others if they do not come here.
        """

    @abc.abstractmethod
    def all_reduce_by_tree(
        self, sums: Array, tree: ReductionTree, reduction: Reduction = SUM
    ) -> None:
        """Add up what the ranks hold of `tree`, into `sums[0]`: equal however replicas are spread over ranks.

        Args:
            sums: [as many as this rank holds, ...], floating point, of the same shape and dtype on every rank but for
                their number; undefined afterwards but for the first. 16-bit floats are added up in float32, and rounded
                at the end: they are replicas' own values, never sums, which would have been rounded before.
            tree: over what the ranks of this communicator hold; equal on all of them.
            reduction: a sum.
        """

    def window_buffer(self, nbytes: int) -> np.ndarray | None:
        """Memory in which `all_reduce` need not copy, `nbytes` uninitialized bytes; None where there is none.

        Equal `nbytes` on all ranks, some of which may get one and others None. It is used again once nothing refers
        to it.
        """
        return None

    def common_memory(
        self, nbytes: int, *, summed: bool = False
    ) -> tuple[CommonMemory | None, str]:
        """Memory of which each node keeps one copy, or None on all ranks, and why.

        Args:
            nbytes: whole pages (`common_memory.PAGE`), equally many on all ranks.
            summed: with memory for contributions, that `sum_into` sums.
        """
        return None, "bytes move by messages alone, as explain() says"

    def sum_into(
        self,
        memory: CommonMemory,
        parts: Sequence[Part],
        view: View,
        reduction: Reduction = SUM,
    ) -> None:
        """Sum the contributions of all ranks, times the scale, into `memory`: what `common_memory(summed=True)` gave.

        Each rank sums what is in its slice. `view` does not show it before it is renewed in the pages that were
        written there.
        """
        raise NotImplementedError(f"{type(self).__name__} has no common memory")

    @abc.abstractmethod
    def reduce(self, buffer: Array, root: int = 0, reduction: Reduction | str = SUM) -> None:
        """Combine `buffer` of all ranks into rank `root`'s; the others' stays as it is.

        As `all_reduce`; but 16-bit floats are rounded before they are scaled, and once more afterwards.
        """

    @abc.abstractmethod
    def reduce_scatter(self, buffer: Array, out: Array, reduction: Reduction | str = SUM) -> None:
        """Combine `buffer` of all ranks; rank r's `out` gets the r-th of equal parts along the first dimension."""

    @abc.abstractmethod
    def broadcast(self, buffer: Array, root: int = 0, *, label: str = "") -> None:
        """Overwrite `buffer` with rank `root`'s; same shape and dtype on every rank."""

    @abc.abstractmethod
    def all_gather(self, buffer: Array, *, label: str = "") -> list[Array]:
        """The buffers of all ranks, in rank order. Same dtype and rank (ndim); shapes may differ."""

    @abc.abstractmethod
    def broadcast_object(self, value: Any, root: int = 0, *, label: str = "") -> Any:
        """Rank `root`'s `value`, any picklable object."""

    @abc.abstractmethod
    def all_gather_object(self, value: Any, *, label: str = "") -> list[Any]:
        """The picklable `value` of every rank, in rank order."""

    @abc.abstractmethod
    def barrier(self, *, label: str = "") -> None:
        """Return once every rank has called it."""

    @abc.abstractmethod
    def split(self, color: int, key: int = 0) -> Communicator:
        """The communicator of the ranks that gave the same `color`, ordered by `key`, then rank."""

    @abc.abstractmethod
    def abort(self, code: int) -> NoReturn:
        """End the whole job with exit code `code`. Not collective."""

    def by(self, implementation: CommunicationImplementation) -> Communicator:
        """What moves the bytes of the same ranks by `implementation`: itself for AUTO, or where there is no choice.

        Not collective, but ranks must use the same. NCCL moves memory of GPUs: for all else it is AUTO.
        """
        return self

    @abc.abstractmethod
    def explain(self) -> str:
        """By which ways bytes move, a line for each. Not collective."""

    def has_lost_a_rank(self) -> bool:
        """Whether this rank was told that one has failed, and that the others go on without it. Not collective."""
        return False

    def seconds_waited(self, last: int = 60) -> float:
        """How long this rank waited for others to enter collectives, of any communicator. Not collective.

        Args:
            last: of how many seconds until now, at most 63.
        """
        return 0.0

    def raise_together(self, error: Exception) -> NoReturn:
        """Raise `error` in place of a collective whose operands this rank found to be wrong.

        The other ranks, which wait in that collective, learn of it where calls are checked.
        """
        raise error

    def raise_any(self, error: Exception | None, what: str) -> None:
        """Raise on all ranks if any of them comes with an error: its own there, a RuntimeError that tells it elsewhere.

        Collective. `what` is what the rank did not manage: "could not read its part".
        """
        mine = None if error is None else f"{type(error).__name__}: {error}"
        told = self.all_gather_object(mine, label="errors")
        if error is not None:
            mark_raised_by_all(error)
            raise error
        for rank, text in enumerate(told):
            if text is not None:
                raise RuntimeError(f"rank {rank} {what}: {text}")

    def raising_together(self) -> contextlib.AbstractContextManager[None]:
        """Around the checks of this rank's operands: `raise_together` for what they raise."""
        return _RaisingTogether(self)


class _RaisingTogether(contextlib.AbstractContextManager[None]):
    __slots__ = ("_communicator",)

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and not is_raised_by_all(error):
            self._communicator.raise_together(error)


def is_raised_by_all(error: Exception) -> bool:
    """Whether the other ranks know of it already: a collective has raised it on all of them."""
    told = (CollectiveMismatchError, StallError, RankLostError)
    return isinstance(error, told) or getattr(error, "_mpistrat_told_all", False)


def mark_raised_by_all(error: Exception) -> None:
    with contextlib.suppress(AttributeError):  # a class with slots
        error._mpistrat_told_all = True  # type: ignore[attr-defined]
