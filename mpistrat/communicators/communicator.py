"""What a program can ask of a communicator."""

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
    """One group of ranks. Every method is collective: all ranks call it, in the same order.

    Buffers are C-contiguous NumPy arrays or CPU tensors. `label`, as that of a `Reduction`, says in words what is
    exchanged (a structure, parameter names); the ranks must agree on it. In place of a `Reduction`, methods take the
    name of its operation, one of `reduction.OPS`.

    Attributes:
        rank: this process's number in the group, 0 <= rank < size.
        size: number of ranks in the group.
        contract: what the ranks agree on before bytes move, and where calls are recorded.
        memory: what the ranks of a node have in common.
        on_one_node: all ranks share a node's memory, as far as is known.
        thread_multiple: threads may be in collectives of different communicators at the same time.
        takes_device_buffers: buffers may be CuPy arrays and tensors on accelerators or XLA devices, too, on all ranks
            alike.
        ordered_by_streams: collectives on tensors of an accelerator return when they are submitted, after what the
            caller's current stream holds, and that stream waits for them; otherwise the host waits.
        use_devices_in: lets another communicator of the same ranks take buffers on accelerators, as this one does, by
            transports of its own. Collective.
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
        """Combine `buffer` of all ranks element by element, into `out` or in place.

        Args:
            buffer: same shape and dtype on every rank; 16-bit floats are summed in float32.
            out: a second buffer of the same shape and dtype; None overwrites `buffer`.
            cause: the error that has brought this rank here; the others hear of it if they do not come.
            follows: in a block of `following`: the ranks have agreed on this call by an earlier one. They compare it
                only where they must meet anyway: in a small call, and for a buffer of a device.
        """

    @abc.abstractmethod
    def all_reduce_by_tree(
        self, sums: Array, tree: ReductionTree, reduction: Reduction = SUM
    ) -> None:
        """Add up the sums that ranks hold of `tree`, into `sums[0]`. It does not matter which rank holds which.

        Args:
            sums: floating point, of shape [sums that this rank holds, ...]; equal on every rank but for their number.
                Afterwards all but the first are undefined. 16-bit floats are added up in float32 and rounded at the
                end: they must be replicas' own values, for sums of them would have been rounded before.
            tree: of the ranks of this communicator; equal on all of them.
            reduction: a sum.
        """

    @abc.abstractmethod
    def reduce(self, buffer: Array, root: int = 0, reduction: Reduction | str = SUM) -> None:
        """Combine `buffer` of all ranks into rank `root`'s; the others' stays as it is.

        As `all_reduce`, but 16-bit floats are rounded before they are scaled and once more afterwards.
        """

    @abc.abstractmethod
    def reduce_scatter(self, buffer: Array, out: Array, reduction: Reduction | str = SUM) -> None:
        """Combine `buffer` of all ranks; rank r's `out` gets the r-th of equal parts along the first dimension.

        An `out` without dimensions gets the r-th element.
        """

    @abc.abstractmethod
    def broadcast(self, buffer: Array, root: int = 0, *, label: str = "") -> None:
        """Overwrite `buffer` with rank `root`'s; same shape and dtype on every rank."""

    @abc.abstractmethod
    def all_gather(self, buffer: Array, *, label: str = "") -> list[Array]:
        """The buffers of all ranks, in rank order. Same dtype and rank (ndim); shapes may differ."""

    @abc.abstractmethod
    def all_gather_into(self, buffer: Array, out: Array, *, label: str = "") -> None:
        """Put the buffers of all ranks into `out`, in rank order.

        Args:
            buffer: same shape and dtype on every rank, any dtype. It may be this rank's part of `out` itself.
            out: of the same dtype, and of any shape with `size` times as many elements.
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
        """Send each rank some rows of `buffer`, and put those that it sends to this rank into `out`, in rank order.

        Args:
            buffer, out: of rows (the first dimension) of the same shape and dtype on every rank; different memory.
            sent: how many rows of `buffer` go to each rank, in rank order.
            received: how many rows come from each rank: as many as it sends here.
        """

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

    def by(self, implementation: CommunicationImplementation) -> Communicator:
        """The communicator that moves the bytes of the same ranks by `implementation`; this one for AUTO.

        Not collective, but all ranks must use the same. NCCL moves memory of GPUs: for all else it is AUTO.
        """
        return self

    @abc.abstractmethod
    def explain(self) -> str:
        """For people: the transports by which bytes move, a line for each. Not collective."""

    def following(self) -> contextlib.AbstractContextManager[None]:
        """Around calls with `follows`, from the end of the call that decides on them to the end of the last of them.

        An error of this rank alone in the block leaves the next call. Ranks that wait in that call raise StallError;
        where they wait inside MPI, the job ends.
        """
        return self.contract.following()

    def raise_together(self, error: Exception) -> NoReturn:
        """Raise `error` in place of a collective whose operands this rank found to be wrong.

        The other ranks, which wait in that collective, learn of it where calls are checked.
        """
        try:
            self.contract.raise_together(error)
        finally:
            del error

    def raising_together(self) -> contextlib.AbstractContextManager[None]:
        """Around the checks of this rank's operands: their errors go to `raise_together`."""
        return RaisingTogether(self.raise_together)

    def raise_any(self, error: Exception | None, what: str) -> None:
        """Raise on all ranks if any of them comes with an error: its own there, elsewhere a RuntimeError with its text.

        Collective. `what` is what the rank did not manage: "could not read its part".
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
    """What the body raises on any rank is raised on all of them: see `Communicator.raise_any`.

    Collective at its end; the body need not be.
    """

    def __init__(self, communicator: Communicator, what: str) -> None:
        self._communicator, self._what = communicator, what

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None or isinstance(error, Exception):
            self._communicator.raise_any(error, self._what)
