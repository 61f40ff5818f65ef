"""What a server does: it keeps arrays, and changes them in the order in which the updates come."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from mpistrat.errors import UnavailableError
from mpistrat.machine.notices import tell
from mpistrat.parameter_server import protocol
from mpistrat.parameter_server.backup import Backup, Forwarded
from mpistrat.parameter_server.backup_copies import BackupCopies
from mpistrat.parameter_server.gate import Gate, Push
from mpistrat.parameter_server.protocol import NewArray, Updates
from mpistrat.parameter_server.rpc.endpoint import Request, RpcEndpoint
from mpistrat.parameter_server.rpc.remote_errors import portable_error
from mpistrat.parameter_server.staleness import ENDED, FAILED, ServerClock
from mpistrat.parameter_server.store import Store, outcome_of
from mpistrat.parameter_server.tables import Table
from mpistrat.parameter_server.tensors import InlineTensor, SharedTensor, inline, unpack


class ParameterServer:
    """Serves the arrays of one rank, in the thread that calls `serve`.

    Args:
        rpc: to the others.
        clients: the ranks that use the server; it leaves when all of them are done, or lost.
        workers: those whose steps it counts.
        creator: the rank that makes arrays, and tells of checkpoints.
        backup: the server that keeps a second copy of what is made here; None: nobody does.
    Attributes:
        clients: those that still use it.
        backup_copies: the second copies of another server's arrays.
    """

    def __init__(
        self,
        rpc: RpcEndpoint,
        clients: Sequence[int],
        workers: Sequence[int] = (),
        creator: int | None = None,
        backup: int | None = None,
    ) -> None:
        self.store = Store()
        self._rpc = rpc
        self._backup = Backup(rpc, backup, self._differs)
        self._gate = Gate(rpc, self._backup.then)
        self.backup_copies = BackupCopies(rpc, self.store, self._gate)
        self._single: set[int] = set()  # arrays that came here when another server had died
        self._clock = ServerClock(rpc, workers, self._end_rounds, self._backup.then)
        self._creator = creator
        self._why_no_more = ""  # comes from the creator: it "has died", or "has left"
        self.clients = set(clients)
        self._waiting: dict[int, list[tuple[int, int]]] = {}  # for arrays that are not there yet
        self._not_made: dict[int, Exception] = {}  # why, by the key that the array would have
        self._published: dict[Any, Any] = {}
        self._awaiting: dict[Any, list[tuple[int, int]]] = {}
        self._respond(protocol.PULL, self._pull)
        self._respond(protocol.ROWS, self._rows)
        self._respond(protocol.OPTIMIZER_STATE, self._optimizer_state)
        rpc.handle(protocol.CREATE, self._create)
        rpc.handle(protocol.UPDATE, self._update)
        rpc.handle(protocol.MAKE_OPTIMIZER, self._make_optimizer)
        rpc.handle(protocol.LOAD_OPTIMIZER_STATE, self._load_optimizer_state)
        rpc.handle(protocol.CANNOT_CREATE, self._cannot_create)
        rpc.handle(protocol.FIND, self._find)
        rpc.handle(protocol.PUBLISH, self._publish)
        rpc.handle(protocol.PUBLISHED, self._await)
        rpc.handle(protocol.FORGET, lambda _, body: self.store.idempotency.forget(*body))
        rpc.handle(ENDED, self._ended)
        rpc.handle(FAILED, self._failed)
        rpc.handle(protocol.DONE, lambda source, _: self._leave(source))
        rpc.on_lost(self._lost)

    def serve(self) -> None:
        """Return when nobody uses the server any more."""
        self._rpc.run_until(lambda: not self.clients)

    def _claim(self, *keys: int) -> None:
        """A client asks for these arrays: if they are second copies, the server that has the first has died.

        Raises: UnavailableError where they have been given up.
        """
        claimed = [key for key in keys if self.backup_copies.has(key)]
        if claimed:
            self._take_over()

    def _take_over(self) -> None:
        """What that one had told of counts, and of the rest what this one knows of the workers' steps."""
        self._single.update(self.backup_copies.names)
        self.backup_copies.become_own()
        for rank in self._rpc.channel.lost:
            self.store.optimizers.forget(rank, self._clock.steps_of(rank))
        self._clock.look()

    def _respond(self, method: str, respond: Callable[[int, Any], Any]) -> None:
        """Answer requests of `method` with what `respond` returns."""

        def handle(source: int, request: Request) -> None:
            self._answer(source, request.ticket, outcome_of(lambda: respond(source, request.body)))

        self._rpc.handle(method, handle)

    def _answer(self, source: int, ticket: int, outcome: Any) -> None:
        """With a result; with an error, which the asker raises."""
        if isinstance(outcome, Exception):
            self._rpc.reply_error(source, ticket, portable_error(outcome))
        else:
            self._rpc.reply(source, ticket, outcome)

    def _answer_when_safe(self, source: int, ticket: int, outcome: Any) -> None:
        """When what it is about outlives this server, if there is a replica."""
        self._backup.then(lambda: self._answer(source, ticket, outcome))

    def _create(self, source: int, request: Request) -> None:
        new: NewArray = request.body
        try:
            self._claim(new.key)
            table = self.store.create(new)
        except Exception as error:
            self._answer(source, request.ticket, error)
            return
        if new.server != self._rpc.rank:
            self._single.add(new.key)
        elif self._backup.rank is not None:
            value = None if new.value is None else self._backup.array_of(table)
            self._backup.forward(protocol.CREATE, source, new._replace(value=value))
        waiting = [(source, request.ticket), *self._waiting.pop(new.key, [])]
        for asker, ticket in waiting:
            self._answer_when_safe(asker, ticket, _found(table))

    def _cannot_create(self, source: int, body: tuple[int, Exception]) -> None:
        key, error = body
        self._not_made[key] = error
        for asker, ticket in self._waiting.pop(key, []):
            self._rpc.reply_error(asker, ticket, error)

    def _find(self, source: int, request: Request) -> None:
        """The array of a number, once it is there: another rank may not have made it yet."""
        try:
            self._claim(request.body)
        except UnavailableError as error:
            self._answer(source, request.ticket, error)
            return
        table = self.store.by_key.get(request.body)
        if request.body in self._not_made:
            self._rpc.reply_error(source, request.ticket, self._not_made[request.body])
        elif table is not None:
            self._answer_when_safe(source, request.ticket, _found(table))
        elif self._why_no_more:
            self._refuse_to_wait(source, request.ticket)
        else:
            self._waiting.setdefault(request.body, []).append((source, request.ticket))

    def _refuse_to_wait(self, source: int, ticket: int) -> None:
        assert self._creator is not None
        creator = self._rpc.name_of(self._creator)
        error = UnavailableError(
            f"{creator} {self._why_no_more} before it made a variable, or told of a checkpoint, that others wait for"
        )
        self._rpc.reply_error(source, ticket, error)

    def _publish(self, source: int, body: tuple[Any, Any]) -> None:
        name, value = body
        self._published[name] = value
        for asker, ticket in self._awaiting.pop(name, []):
            self._rpc.reply(asker, ticket, value)

    def _await(self, source: int, request: Request) -> None:
        if request.body in self._published:
            self._rpc.reply(source, request.ticket, self._published[request.body])
        elif self._why_no_more:
            self._refuse_to_wait(source, request.ticket)
        else:
            self._awaiting.setdefault(request.body, []).append((source, request.ticket))

    def _pull(self, source: int, body: tuple[int, SharedTensor | None]) -> InlineTensor | None:
        """The array: in memory of the asker's, or in the answer."""
        key, target = body
        self._claim(key)
        table = self.store.table(key)
        if target is None:
            return inline(table.array).copied()  # MPI may read it later, when it has changed
        unpack(target, self.store.mappings)[...] = table.array
        return None

    def _rows(self, source: int, body: tuple[int, InlineTensor]) -> InlineTensor:
        key, indices = body
        self._claim(key)
        table = self.store.table(key)
        return inline(table.rows(unpack(indices, self.store.mappings)))

    def _update(self, source: int, request: Request) -> None:
        asks: Updates = request.body
        try:
            self._claim(*(update.key for update in asks.updates))
            # Now: if who asked dies meanwhile, it cannot be mapped any more.
            self.store.map_operands(asks)
        except (OSError, UnavailableError) as error:
            self._answer(source, request.ticket, error)
            return

        def work() -> None:
            # Before they are made here: the other makes them meanwhile.
            passed = outcome_of(lambda: self._forward(source, asks))
            if isinstance(passed, Exception):  # no memory for it
                self._answer(source, request.ticket, passed)
                return
            outcomes = self.store.update(source, asks)
            failed = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
            if passed is not None:
                passed.failed = bool(failed)
            self._answer_when_safe(source, request.ticket, failed[0] if failed else outcomes)

        self._gate.enter(source, asks.push, work)

    def _forward(self, source: int, asks: Updates) -> Forwarded | None:
        """All updates of a message are of arrays that were made on one server."""
        if not self._has_backup(update.key for update in asks.updates):
            return None
        operands = [
            unpack(one, self.store.mappings) for update in asks.updates for one in update.operand
        ]
        packed, region = self._backup.pack(operands)
        parts = iter(packed)
        again = [
            update._replace(operand=list(itertools.islice(parts, len(update.operand))))
            for update in asks.updates
        ]
        return self._backup.forward(protocol.UPDATE, source, asks._replace(updates=again), region)

    def _has_backup(self, keys: Iterable[int]) -> bool:
        return self._backup.rank is not None and self._single.isdisjoint(keys)

    def _make_optimizer(self, source: int, request: Request) -> None:
        _, _, arrays = request.body
        self._change_optimizer(
            protocol.MAKE_OPTIMIZER,
            source,
            request,
            [key for key, _ in arrays],
            lambda: self.store.make_optimizer(*request.body),
        )

    def _load_optimizer_state(self, source: int, request: Request) -> None:
        _, key, _ = request.body
        self._change_optimizer(
            protocol.LOAD_OPTIMIZER_STATE,
            source,
            request,
            [key],
            lambda: self.store.optimizers.load_state(*request.body),
        )

    def _change_optimizer(
        self,
        method: str,
        source: int,
        request: Request,
        keys: Sequence[int],
        work: Callable[[], None],
    ) -> None:
        def claimed() -> None:
            self._claim(*keys)
            work()

        outcome = outcome_of(claimed)
        if self._has_backup(keys):
            passed = self._backup.forward(method, source, request.body)
            passed.failed = isinstance(outcome, Exception)
        self._answer_when_safe(source, request.ticket, outcome)

    def _differs(self, why: str) -> None:
        """The other could not do what was done here: it has less memory, say."""
        own = [table.name for key, table in self.store.by_key.items() if key not in self._single]
        tell(
            f"{self._rpc.name_of(self._rpc.rank)} has no replica any more of {', '.join(map(repr, own))}, for that "
            f"came to differ: {why}"
        )

    def _optimizer_state(self, source: int, body: tuple[int, int]) -> Any:
        self._claim(body[1])
        state = self.store.optimizers.state(*body)
        return {name: copy.copy(value) for name, value in state.items()}  # as in `_pull`

    def _ended(self, source: int, body: tuple[int, Push | None]) -> None:
        """With the last worker's step, arrays change, where the gradients of all are combined."""
        steps, push = body
        self._gate.enter(source, push, lambda: self._clock.ended(source, steps))

    def _end_rounds(self, before: int) -> Exception | None:
        """Returns: why a round's step of an array could not be made, if one could not."""
        rounds = self.store.optimizers.pending_rounds(before)
        who_ended = {number: self._clock.who_ended(number) for number in rounds}
        failed = self.store.optimizers.end_rounds(before, who_ended.__getitem__)
        if rounds and self._backup.rank is not None:
            body = before, who_ended
            passed = self._backup.forward(protocol.END_ROUNDS, self._rpc.rank, body)
            passed.failed = bool(failed)
        if not failed:
            return None
        name, error = failed[0]
        others = f" (nor those of {len(failed) - 1} more arrays)" if failed[1:] else ""
        told = portable_error(error)
        return type(told)(
            f"the step of {name!r} by all workers' gradients could not be made{others}: {told.args[0]}"
        )

    def _failed(self, source: int, body: tuple[int, Push | None]) -> None:
        steps, push = body
        self._gate.enter(source, push, lambda: self._drop_gradients(source, steps))

    def _drop_gradients(self, worker: int, steps: int) -> None:
        self.store.optimizers.forget(worker, steps)
        if self._backup.rank is not None:
            self._backup.forward(protocol.DROP_GRADIENTS, worker, steps)

    def _leave(self, rank: int, died: bool = False) -> None:
        def leave() -> None:
            if died:
                self._drop_gradients(rank, self._clock.steps_of(rank))
            self._clock.leave(rank)

        self.clients.discard(rank)
        self._gate.enter(rank, None, leave)
        if rank == self._creator and not self._why_no_more:
            self._why_no_more = "has died" if died else "has left"
            for source, ticket in itertools.chain(
                *self._waiting.values(), *self._awaiting.values()
            ):
                self._refuse_to_wait(source, ticket)
            self._waiting.clear()
            self._awaiting.clear()

    def _lost(self, rank: int) -> None:
        """What of its work has come whole is done; nobody waits for the rest."""
        self._backup.lost(rank)
        if rank == self.backup_copies.primary:
            self._take_over()
        self._gate.lost(rank)
        self._leave(rank, died=True)
        # After what it has pushed, which may be held back.
        pid = self._rpc.channel.pid_of(rank)
        self._gate.enter(rank, None, lambda: self.store.mappings.forget(pid))


def _found(table: Table) -> Any:
    return table.name, table.spec, table.handle
