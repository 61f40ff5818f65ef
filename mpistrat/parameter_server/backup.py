"""A server's second copy, on another server, which goes on with it when the first has died.

As in primary-backup replication: the server passes on, in the order in which it makes them, all changes of the arrays
that were made on it, and answers for them when the other, their rank, has made them, too. What it had not answered
for is asked again, of the rank. Who reads may see a change that is not answered for yet, and is lost if the server
and who asked for it both die.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mpistrat.arrays import Array
from mpistrat.parameter_server.rpc.endpoint import RpcEndpoint
from mpistrat.parameter_server.rpc.segments import Buffers, Region
from mpistrat.parameter_server.tables import Table
from mpistrat.parameter_server.tensors import InlineTensor, SharedTensor, inline, pack

# Notices, between the two: a change, as number, method, source and body; the number of one that was made, and
# why it could not be, or ""; all that was passed on is to be forgotten.
CHANGE, CHANGED, ABANDON = "change of a replica", "changed replica", "abandon replica"


@dataclass
class Forwarded:
    """A change that was passed on.

    Attributes:
        failed: whether it failed here; to be set before the next message is read.
        region: memory that the message refers to, by `pack`.
    """

    number: int
    region: Region | None
    failed: bool = False
    waiting: list[Callable[[], None]] = field(default_factory=list)


class Backup:
    """A server's copy elsewhere, as the server sees it.

    Args:
        rank: the rank that keeps it; None where there is none.
        unlike: is told why the two have come to differ, after which this one goes on without.
    """

    def __init__(self, rpc: RpcEndpoint, rank: int | None, unlike: Callable[[str], None]) -> None:
        self._rpc, self.rank, self._unlike = rpc, rank, unlike
        self._buffers = Buffers()
        self._passed: deque[Forwarded] = deque()
        self._count = 0
        rpc.handle(CHANGED, lambda source, body: self._changed(*body))

    def forward(
        self, method: str, source: int, body: Any, region: Region | None = None
    ) -> Forwarded:
        """Have the rank make the change that `source` asked for."""
        assert self.rank is not None
        passed = Forwarded(self._count + 1, region)
        self._rpc.notify(self.rank, CHANGE, (passed.number, method, source, body))
        self._count = passed.number  # after what may fail
        self._passed.append(passed)
        return passed

    def then(self, call: Callable[[], None]) -> None:
        """Call it when the rank has made all that was passed on before; now, where there is none."""
        if self._passed:
            self._passed[-1].waiting.append(call)
        else:
            call()

    def pack(
        self, operands: Sequence[Array]
    ) -> tuple[list[SharedTensor | InlineTensor], Region | None]:
        """In memory of this process: that of who has sent them goes with him."""
        return pack(operands, self._buffers if self._shares_memory() else None)

    def array_of(self, table: Table) -> SharedTensor | InlineTensor:
        """Of one that nobody changes before `then`."""
        if self._shares_memory():
            return SharedTensor(table.array_handle, table.spec)
        return inline(table.array)

    def _shares_memory(self) -> bool:
        assert self.rank is not None
        return self._rpc.channel.shares_memory_with(self.rank)

    def lost(self, rank: int) -> None:
        if rank == self.rank:
            self._end()

    def _changed(self, number: int, why_not: str) -> None:
        if self.rank is None:
            return
        passed = self._passed[0]
        assert passed.number == number, (passed.number, number)
        if bool(why_not) != passed.failed:
            self._rpc.notify(self.rank, ABANDON)  # before anything is answered for that it lacks
            self._unlike(why_not or "it could do what failed here")
            self._end()
            return
        self._passed.popleft()
        if passed.region is not None:
            self._buffers.give_back(passed.region)
        for call in passed.waiting:
            call()

    def _end(self) -> None:
        self.rank = None
        passed, self._passed = self._passed, deque()
        for one in passed:
            for call in one.waiting:
                call()
