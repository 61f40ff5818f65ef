"""The interface of a communicator: the collectives that a program can call."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from mpistrat.arrays import Array
from mpistrat.communicators.contract.joint_errors import RaisingTogether, mark_raised_by_all
from mpistrat.communicators.contract.unchecked import UNCHECKED, Unchecked
from mpistrat.communicators.node.memory import NO_MEMORY, NodeMemory
from mpistrat.communicators.reduction import SUM, Reduction
from mpistrat.liveness.call_site import message_of, raised_at
from mpistrat.options import CommunicationImplementation

if TYPE_CHECKING:
    from mpistrat.communicators.reduction.tree import ReductionTree


class Communicator(abc.ABC):
    """A group of ranks and its collectives. All ranks of the group call each method, in the same order.

    Buffers are C-contiguous NumPy arrays or CPU tensors. `label` says in words what the ranks exchange (a structure,
    parameter names), and the ranks must agree on it, as on the label of a `Reduction`. In place of a `Reduction`,
    methods take the name of its operation, one of `reduction.OPS`.

    If the ranks make different calls, all of them raise CollectiveMismatchError. A rank with wrong operands raises
    ValueError or TypeError, and the other ranks CollectiveMismatchError. With `check="never"` they may hang instead.

    Attributes:
        rank: this process's number in the group, 0 <= rank < size.
        size: number of ranks in the group.
        contract: checks before bytes move that all ranks make the same call, and records the calls.
        memory: the memory that the ranks of a node share; `NO_MEMORY` if they share none.
        on_one_node: whether all ranks are known to be on one node and to see each other's records in its memory.
        thread_multiple: whether threads may be in collectives of different communicators at the same time.
        takes_device_buffers: whether buffers may also be CuPy arrays and tensors on accelerators or XLA devices, on
            all ranks alike.
        ordered_by_streams: whether collectives on tensors of an accelerator return when they are queued: they run
            after the work of the caller's current stream, and that stream waits for them. If False, the host waits.
        use_devices_in: a collective function that takes another communicator of this communicator's ranks, and gives it
            transports of its own for buffers on accelerators; None where this communicator takes no such buffers.

    Example:
        >>> communicator = ms.OneDeviceStrategy("cpu").extended.communicator
        >>> values = np.array([1.0, 2.0])
        >>> communicator.all_reduce(values, "max")
        >>> communicator.broadcast(values, root=0)
        >>> communicator.all_gather(values), communicator.all_gather_object("name")
        ([array([1., 2.])], ['name'])

    Example:
        >>> communicator, values = ms.OneDeviceStrategy("cpu").extended.communicator, np.array([1.0, 2.0])
        >>> communicator.barrier(label="before the first step")
        >>> communicator.reduce(values, root=0)  # on rank 0, `values` becomes the sum over all ranks
        >>> values, communicator.broadcast_object({"seed": 7}, root=0)
        (array([1., 2.]), {'seed': 7})
    """

    rank: int
    size: int
    contract: Unchecked = UNCHECKED
    memory: NodeMemory = NO_MEMORY
    on_one_node = True
    thread_multiple = False
    takes_device_buffers = False
    ordered_by_streams = False
    use_devices_in: Callable[[Communicator], None] | None = None

    @abc.abstractmethod
    def all_reduce(
        self,
        buffer: Array,
        reduction: Reduction | str = SUM,
        *,
        out: Array | None = None,
        cause: Exception | None = None,
        follows: bool = False,
    ) -> None:
        """Combine the `buffer` of all ranks element by element, into `out` or in place.

        Args:
            buffer: same shape and dtype on every rank; 16-bit floats are summed in float32.
            out: a second buffer of the same shape and dtype for the result; `buffer` then keeps its values.
                None overwrites `buffer`.
            cause: the error that made this rank come to this call. If the other ranks make another call,
                the CollectiveMismatchError shows the error's text. None: no error.
            follows: True inside `following` says that an earlier call has settled this call on all ranks. The ranks
                then compare it only if the buffer is small or on a device, because they meet there anyway.
        """

    @abc.abstractmethod
    def all_reduce_by_tree(
        self, sums: Array, tree: ReductionTree, reduction: Reduction = SUM
    ) -> None:
        """Add up the `sums` of all ranks in the fixed order of `tree`, into `sums[0]` of each rank.

        So the result has the same bits for every distribution of replicas over ranks. Called by: `OrderedAllReduce`.

        Args:
            sums: floating point, of shape [sums that this rank holds, ...]; only the first dimension may differ
                between ranks. Afterwards `sums[1:]` is undefined. 16-bit floats are added up in float32 and rounded
                once at the end, so each must be one replica's value: a sum of several would have been rounded before.
            tree: a tree over the ranks of this communicator; equal on all of them.
            reduction: its operation must be "sum"; its scale multiplies the result.

        Example:
            >>> from mpistrat.communicators.reduction.tree import tree_of_replicas
            >>> communicator = ms.OneDeviceStrategy("cpu").extended.communicator
            >>> sums, tree = np.array([[1.0, 2.0]]), tree_of_replicas(1, 0, 1)
            >>> communicator.all_reduce_by_tree(sums, tree)
            >>> sums[0]
            array([1., 2.])
        """

    @abc.abstractmethod
    def reduce(self, buffer: Array, root: int = 0, reduction: Reduction | str = SUM) -> None:
        """Combine the `buffer` of all ranks into rank `root`'s `buffer`; the other ranks' buffers stay as they are.

        Unlike `all_reduce`, it rounds sums of 16-bit floats twice: before it scales them and afterwards.
        """

    @abc.abstractmethod
    def reduce_scatter(self, buffer: Array, out: Array, reduction: Reduction | str = SUM) -> None:
        """Combine the `buffer` of all ranks, cut the result into equal parts, and put part r into rank r's `out`.

        Parts are cut along the first dimension. An `out` without dimensions gets one element.

        Raises: ValueError unless `buffer` has `size` times as many rows as `out`, and the same dtype.

        Example:
            >>> communicator, part = ms.OneDeviceStrategy("cpu").extended.communicator, np.empty(2)
            >>> communicator.reduce_scatter(np.array([1.0, 2.0]), part)
            >>> part
            array([1., 2.])
        """

    @abc.abstractmethod
    def broadcast(self, buffer: Array, root: int = 0, *, label: str = "") -> None:
        """Overwrite every rank's `buffer` with rank `root`'s `buffer`. Shape and dtype must be equal on all ranks."""

    @abc.abstractmethod
    def all_gather(self, buffer: Array, *, label: str = "") -> list[Array]:
        """Return copies of all ranks' buffers, in rank order. Dtypes and `ndim` must be equal; shapes may differ.

        With one rank, the list has `buffer` itself.
        """

    @abc.abstractmethod
    def all_gather_into(self, buffer: Array, out: Array, *, label: str = "") -> None:
        """Put the buffers of all ranks into `out`, in rank order.

        Args:
            buffer: same shape and dtype on every rank, any dtype. It may be this rank's part of `out` itself.
            out: array for the result, of the dtype of `buffer`, and of any shape with `size` times as many elements.

        Example:
            >>> communicator, all_parts = ms.OneDeviceStrategy("cpu").extended.communicator, np.empty((1, 2))
            >>> communicator.all_gather_into(np.array([1.0, 2.0]), all_parts)
            >>> all_parts
            array([[1., 2.]])
        """

    @abc.abstractmethod
    def all_to_all(
        self,
        buffer: Array,
        out: Array,
        sent: Sequence[int],
        received: Sequence[int],
        *,
        label: str = "",
    ) -> None:
        """Send each rank some rows of `buffer`; put the rows that arrive from each rank into `out`, in rank order.

        Args:
            buffer, out: arrays of rows (the first dimension). Rows have the same shape and dtype on every rank. `out`
                must not share memory with `buffer`.
            sent: how many rows of `buffer` go to each rank, in rank order.
            received: how many rows come from each rank, in rank order.

        Raises: ValueError if `sent` or `received` does not add up to the rows, or if another rank sent this rank
            another number of rows than `received` says.

        Example:
            >>> communicator, rows = ms.OneDeviceStrategy("cpu").extended.communicator, np.empty((2, 1))
            >>> communicator.all_to_all(np.array([[1.0], [2.0]]), rows, sent=[2], received=[2])
            >>> rows.tolist()
            [[1.0], [2.0]]
        """

    @abc.abstractmethod
    def broadcast_object(self, value: Any, root: int = 0, *, label: str = "") -> Any:
        """Return rank `root`'s `value`, any picklable object."""

    @abc.abstractmethod
    def all_gather_object(self, value: Any, *, label: str = "") -> list[Any]:
        """Return the picklable `value` of every rank, in rank order."""

    @abc.abstractmethod
    def barrier(self, *, label: str = "") -> None:
        """Wait until every rank has called `barrier`."""

    @abc.abstractmethod
    def split(self, color: int, key: int = 0) -> Communicator:
        """Return a new communicator of the ranks with the same `color`, ordered by `key`, then by rank. Collective.

        Example:
            >>> communicator = ms.OneDeviceStrategy("cpu").extended.communicator
            >>> half = communicator.split(color=communicator.rank % 2)  # even ranks, odd ranks
            >>> half.rank, half.size
            (0, 1)
        """

    def by(self, implementation: CommunicationImplementation) -> Communicator:
        """Return a communicator of the same ranks that moves their bytes by `implementation`; `self` for AUTO.

        Both count and record their calls together. Not collective, but all ranks must pass the same `implementation`.
        NCCL moves only memory of GPUs; other buffers move as with AUTO.

        Example:
            >>> communicator = ms.OneDeviceStrategy("cpu").extended.communicator
            >>> communicator.by(ms.CommunicationImplementation.AUTO) is communicator
            True
        """
        return self

    @abc.abstractmethod
    def explain(self) -> str:
        """Return a text for people: the transports of this group, one on each line. Not collective.

        Example:
            >>> print(ms.OneDeviceStrategy("cpu").extended.communicator.explain())
            one rank: nothing moves
        """

    def following(self) -> contextlib.AbstractContextManager[None]:
        """Return a context around all-reduces with `follows=True`: the ranks need not agree on each of them.

        Called by: every rank, when an earlier collective has settled these calls. The reducer of gradients does so.

        If one rank raises an error in the block, it tells the other ranks. Ranks that wait for it in the next call
        raise StallError; if they wait inside MPI, the job ends.

        Example:
            >>> communicator, values = ms.OneDeviceStrategy("cpu").extended.communicator, np.ones(2)
            >>> communicator.barrier(label="all ranks are about to add up `values`")
            >>> with communicator.following():
            ...     communicator.all_reduce(values, follows=True)
            >>> values
            array([1., 1.])
        """
        return self.contract.following()

    def raise_together(self, error: Exception) -> NoReturn:
        """Raise `error`, in place of a collective that this rank cannot make because its operands are wrong.

        The other ranks wait in that collective. They raise CollectiveMismatchError; with `check="never"` they may hang.

        Example:
            >>> communicator = ms.OneDeviceStrategy("cpu").extended.communicator
            >>> communicator.raise_together(ValueError("expected 3 rows, got 2"))
            Traceback (most recent call last):
            ValueError: expected 3 rows, got 2
        """
        try:
            self.contract.raise_together(error)
        finally:
            del error

    def raising_together(self) -> contextlib.AbstractContextManager[None]:
        """Return a context around checks of this rank's operands: it passes errors of its block to `raise_together`.

        Example:
            >>> communicator, rows = ms.OneDeviceStrategy("cpu").extended.communicator, np.ones(3)
            >>> with communicator.raising_together():
            ...     if rows.ndim != 2:
            ...         raise ValueError(f"expected 2 dimensions, got {rows.ndim}")
            Traceback (most recent call last):
            ValueError: expected 2 dimensions, got 1
        """
        return RaisingTogether(self.raise_together)

    def raise_any(self, error: Exception | None, what: str) -> None:
        """Raise on all ranks if any of them has an `error`; return if all ranks pass None. Collective.

        Args:
            error: this rank's own error, or None.
            what: words for the failure, as they follow "rank 3" in the message: "could not read its part".

        Raises: on a rank with an error, `error` itself; on every other rank, a RuntimeError with the text of the error
            of the lowest rank that has one.

        Example:
            >>> communicator = ms.OneDeviceStrategy("cpu").extended.communicator
            >>> communicator.raise_any(OSError("no such file"), "could not read its part")
            Traceback (most recent call last):
            OSError: no such file
        """
        described = error and (raised_at(error), type(error).__name__, message_of(error))
        errors = self.all_gather_object(described, label="errors")
        if error is not None:
            mark_raised_by_all(error)
            raise error
        for rank, described in enumerate(errors):
            if described is not None:
                place, kind, text = described
                failed: Any = RuntimeError(f"rank {rank} {what}: {kind}: {text}")
                failed.raised_by_rank = f"{place} (rank {rank}): {text or kind}"
                mark_raised_by_all(failed)
                raise failed


class RaisingOnAll(contextlib.AbstractContextManager[None]):
    """A context that raises an error of its block on all ranks, as `Communicator.raise_any` does.

    Called by: every rank, because leaving the block is collective. The block itself may differ between ranks, and may
    hold no collective. Errors that are no `Exception` (KeyboardInterrupt, SystemExit) pass without it.

    Args: what: words for the failure, as in `raise_any`.
    """

    def __init__(self, communicator: Communicator, what: str) -> None:
        self._communicator = communicator
        self._what = what

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None or isinstance(error, Exception):
            self._communicator.raise_any(error, self._what)
