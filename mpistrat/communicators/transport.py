"""A transport: one way of moving bytes between the ranks of a group."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any, ClassVar, TypeAlias

from mpistrat.arrays import Array
from mpistrat.communicators.collectives.all_gather_into import AllGatherInto
from mpistrat.communicators.collectives.all_reduce import AllReduce
from mpistrat.communicators.collectives.collective import Collective
from mpistrat.communicators.collectives.reduce import Reduce
from mpistrat.communicators.collectives.reduce_scatter import ReduceScatter

# A transport's method that moves the bytes of one collective, and returns the result.
Move: TypeAlias = Callable[[Any], Any]
# From each collective that a transport moves to the method, as a function of the transport and the collective.
Moves: TypeAlias = Mapping[type[Collective], Callable[[Any, Any], Any]]


class Transport(abc.ABC):
    """One way to move buffers between ranks: by MPI, by a node's shared memory, by NCCL.

    A router asks its transports in turn, by `choose`; the first that takes a call moves its bytes. The methods that
    move bytes are called by all ranks of the group, in the same order, when they have agreed on the call.

    Attributes:
        moves: from each collective that the transport moves itself to its method. These are functions of the class: a
            subclass that overrides a method lists it anew.
        rank: this process's number in the group.
        takes_device_buffers: whether buffers may be in the memory of an accelerator.
        ordered_by_streams: whether collectives on an accelerator return when they are queued on its stream, not ended.
    """

    moves: ClassVar[Moves] = {}
    rank: int
    takes_device_buffers = False
    ordered_by_streams = False

    def choose(self, collective: Collective) -> Move | None:
        """Return the method that moves the bytes of `collective`. Collective; all ranks choose alike.

        Returns: a method of this transport, or of another for its ranks; None leaves the call to the next transport.
        """
        move = self.moves.get(collective.__class__)
        if move is None or not self.takes(collective):
            return None
        return MethodType(move, self)

    def takes(self, collective: Any) -> bool:
        """Whether this transport takes `collective`, one of `moves`. Collective."""
        return True

    def move(self, collective: Collective) -> Any:
        """Move the bytes of `collective`, whatever `takes` says. Raises: TypeError unless it is one of `moves`."""
        move = self.moves.get(collective.__class__)
        if move is None:
            raise TypeError(
                f"{type(self).__name__} does not take {collective.name}: add it to `moves`, or ask choose() first"
            )
        return move(self, collective)

    def add_up(self, buffer: Array) -> None:
        """Sum `buffer` over all ranks, in place."""
        self.move(AllReduce(buffer))

    def wait_until_idle(self) -> None:  # noqa: B027 - most transports have nothing to wait for
        """Wait until this rank's collectives have ended on its accelerator, where they return when they are queued.

        Here it does nothing, because collectives have ended when they return.
        """

    @abc.abstractmethod
    def explain(self, rest: str) -> str:
        """Return a text for people: a line on this transport, then `rest`, the text of the transports after it."""


def by_others(transport: Transport, collective: AllGatherInto | Reduce | ReduceScatter) -> None:
    """Make `collective` by other collectives of `transport`: for the `moves` of a transport that has no faster way."""
    collective.by_others(transport)
