"""Primary-backup replication: a server's backup, another server, takes over its arrays after its death.

The primary forwards all changes of its arrays to the backup, in the order in which it makes them, and answers a client
when the backup has made the change, too. When the primary dies, clients send its unanswered requests again, to the
backup. A reader may see a change that the primary has not answered yet. That change is lost if the primary and the
client both die.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mpistrat.arrays import Array
from mpistrat.errors import UnavailableError
from mpistrat.machine.notices import tell
from mpistrat.parameter_server.protocol import messages
from mpistrat.parameter_server.protocol.messages import (
    NewArray,
    Updates,
    inline,
    pack,
)
from mpistrat.parameter_server.protocol.snapshot import ChangeLock
from mpistrat.parameter_server.protocol.tables import Table
from mpistrat.parameter_server.rpc.endpoint import RpcEndpoint, outcome_of
from mpistrat.parameter_server.rpc.segments import Buffers, SharedRegion
from mpistrat.parameter_server.server.store import Store

# Notices between primary and backup. CHANGE: the number, method, source and body of a change. CHANGED: the number of a
# change that the backup has tried, and the reason of its failure or "". ABANDON: the backup must forget all copies.
CHANGE = "change of a backup"
CHANGED = "changed backup"
ABANDON = "abandon backup"

_Call = tuple[Callable[..., None], tuple[Any, ...]]  # a function and its arguments


@dataclass
class Forwarded:
    """A change that the primary has forwarded to its backup; kept on the primary until the backup has answered.

    Attributes:
        number: the change's number, from 1.
        failed: whether the change failed on the primary itself. The primary sets it before it reads the backup's
            answer, and then compares it with the backup's outcome.
        region: the memory with the arrays of the message to the backup; None if the message contains the arrays.
        waiting: the calls to make when the backup has made the change.
    """

    number: int
    region: SharedRegion | None = None
    failed: bool = False
    waiting: list[_Call] = field(default_factory=list)

    def make_calls(self) -> None:
        for call, args in self.waiting:
            call(*args)


class Backup:
    """The primary's side of replication: forwards the changes of this server's arrays to its backup.

    Args: rank: the backup's rank; None for a server without a backup.
    """

    def __init__(self, rpc: RpcEndpoint, rank: int | None) -> None:
        self._rpc = rpc
        self._rank = rank
        self._shares_memory = rank is not None and rpc.channel.shares_memory_with(rank)
        self._buffers = Buffers()
        self._names: dict[int, str] = {}  # names of the arrays that the backup has, by key
        self._forwarded: deque[Forwarded] = deque()
        self._count = 0
        rpc.handle(CHANGED, self._changed)

    def covers(self, keys: Iterable[int]) -> bool:
        """Whether the backup lives and has copies of all these arrays."""
        if self._rank is None:
            return False
        return self._names.keys() >= {*keys}

    def forward(
        self, method: str, source: int, body: Any, region: SharedRegion | None = None
    ) -> Forwarded:
        """Send a change that the rank `source` asked for to the backup; without a backup, send nothing.

        Returns: the forwarded change. The caller sets its `failed` if the change fails on this server.
        """
        forwarded = Forwarded(self._count + 1, region)
        if self._rank is not None:
            change = forwarded.number, method, source, body
            self._rpc.notify(self._rank, CHANGE, change)
            self._count = forwarded.number  # after `notify`, which may fail
            self._forwarded.append(forwarded)
        return forwarded

    def forward_new(self, source: int, new: NewArray, table: Table) -> None:
        """Have the backup make a copy of a new array; without a backup, do nothing.

        The backup may read the value in the primary's memory, because no client changes the array before the primary
        has answered, and it answers after the backup.
        """
        if self._rank is None:
            return
        value = table.shared if self._shares_memory else inline(table.array)
        self.forward(messages.CREATE, source, new._replace(value=value))
        self._names[new.key] = new.name

    def forward_updates(
        self, source: int, updates: Updates, operands: Sequence[Array]
    ) -> Forwarded:
        """Forward a client's updates to the backup.

        The operands are copied to this process's memory, because the client's memory is gone when the client dies.

        Args: operands: the arrays of all updates, in order.
        """
        buffers = self._buffers if self._shares_memory else None
        packed, region = pack(operands, buffers)
        again = []
        first = 0
        for update in updates.updates:
            end = first + len(update.operand)
            again.append(update._replace(operand=packed[first:end]))
            first = end
        updates = updates._replace(updates=again)
        return self.forward(messages.UPDATE, source, updates, region)

    def when_safe(self, call: Callable[..., None], *args: Any) -> None:
        """Call `call(*args)` when the backup has made all changes forwarded so far; call it now if it has.

        Without a backup, call it now. Also call it when the backup dies or is abandoned.
        """
        if self._forwarded:
            self._forwarded[-1].waiting.append((call, args))
        else:
            call(*args)

    def lost(self, rank: int) -> None:
        if rank == self._rank:
            self._end()

    def _changed(self, source: int, body: tuple[int, str]) -> None:
        number, why_not = body
        if self._rank is None:
            return
        forwarded = self._forwarded[0]
        assert forwarded.number == number, (forwarded.number, number)
        if bool(why_not) != forwarded.failed:
            self._rpc.notify(self._rank, ABANDON)  # before clients get answers
            names = ", ".join(repr(name) for name in self._names.values())
            reason = why_not or "the replica made a change that failed here"
            tell(
                f"{self._rpc.name_of(self._rpc.rank)} has no replica any more of {names}, because "
                f"the two came to differ: {reason}"
            )
            self._end()
            return
        self._forwarded.popleft()
        self._buffers.give_back(forwarded.region)
        forwarded.make_calls()

    def _end(self) -> None:
        self._rank = None
        forwarded = self._forwarded
        self._forwarded = deque()
        for change in forwarded:
            change.make_calls()


class BackupCopies:
    """The backup's side of replication: the copies of the primary's arrays.

    Until the primary has died, the copies change only by the changes that it forwards, in its order.

    Args:
        store: this server's own arrays; it gets the copies when the primary has died.
        lock: remembers the pushes that the primary has made, so that this server knows them after the primary's death.
        taken_over: a function to call when `store` has got the copies.
    Attributes:
        copies: a separate store with the copies.
        primary: the primary's rank; None before its first change.
        names: the names of the copied arrays, by key.
        given_up: the names, by key, of the arrays that the primary has told this server to abandon.
    """

    def __init__(
        self, rpc: RpcEndpoint, store: Store, lock: ChangeLock, taken_over: Callable[[], None]
    ) -> None:
        self._rpc = rpc
        self._store = store
        self._lock = lock
        self._taken_over = taken_over
        self.copies = store.sibling()
        self._is_over = False  # whether this server has taken over
        self.primary: int | None = None
        self.names: dict[int, str] = {}
        self.given_up: dict[int, str] = {}
        self._changes: dict[str, Callable[[int, Any], None]] = {
            messages.CREATE: self._create,
            messages.UPDATE: self._update,
            messages.MAKE_OPTIMIZER: self._in_copies(Store.make_optimizer),
            messages.LOAD_OPTIMIZER_STATE: self._in_copies(Store.load_optimizer_state),
            messages.DROP_GRADIENTS: self._drop_gradients,
            messages.END_ROUNDS: self._end_rounds,
        }
        rpc.handle(CHANGE, self._change)
        rpc.handle(ABANDON, self._give_up)

    def claim(self, key: int) -> None:
        """Take over from the primary if the array `key` is among the copies; otherwise do nothing.

        A client asks this server for such an array only if it knows of the primary's death.

        Called by: this server's store, for an array that it lacks.
        Raises: UnavailableError if the array's copy was given up.
        """
        if key in self.given_up:
            raise UnavailableError(
                f"{self.given_up[key]!r} is lost: the server that kept it has died, and its replica had been given up "
                "before; the job must be started again, from its last checkpoint"
            )
        if key in self.copies.by_key:
            self._take_over()

    def lost(self, rank: int) -> None:
        if rank == self.primary:
            self._take_over()

    def _take_over(self) -> None:
        """Move the copies to this server's own store.

        Later changes of the primary are refused, because the clients send their unanswered requests again, to this
        server.
        """
        self._is_over = True
        self._store.adopt(self.copies)
        self._taken_over()

    def _change(self, primary: int, body: tuple[int, str, int, Any]) -> None:
        number, method, source, change = body
        self.primary = primary
        outcome = outcome_of(self._make, method, source, change)
        why_not = ""
        if isinstance(outcome, Exception):
            why_not = f"{type(outcome).__name__}: {outcome}"
        self._rpc.notify(primary, CHANGED, (number, why_not))

    def _make(self, method: str, source: int, change: Any) -> None:
        if self._is_over:  # only a primary that was wrongly taken for dead gets this error
            raise RuntimeError("another server has taken over")
        if method not in self._changes:
            raise ValueError(f"a backup knows no change {method!r}")
        self._changes[method](source, change)

    def _create(self, source: int, new: NewArray) -> None:
        table = self.copies.create(new)
        self.names[new.key] = table.name

    def _update(self, source: int, updates: Updates) -> None:
        self._lock.passed(source, updates.push)
        self.copies.update(source, updates)

    def _in_copies(self, method: Callable[..., None]) -> Callable[[int, Any], None]:
        def change(source: int, body: tuple[Any, ...]) -> None:
            method(self.copies, *body)

        return change

    def _drop_gradients(self, worker: int, steps: int) -> None:
        self.copies.optimizers.forget(worker, steps)

    def _end_rounds(self, source: int, body: tuple[int, dict[int, int]]) -> None:
        before, who_ended = body
        failed = self.copies.optimizers.end_rounds(before, who_ended.__getitem__)
        for name, error in failed:
            raise RuntimeError(f"the step of {name!r}") from error

    def _give_up(self, source: int, body: None) -> None:
        self.given_up = self.names
        self.names = {}
        self.copies = self._store.sibling()  # an empty store, without arrays and optimizer state
