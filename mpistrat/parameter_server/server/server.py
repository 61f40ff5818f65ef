"""A server: it keeps arrays, and changes them in the order in which the updates arrive.

A round is a step of all workers: the server combines their gradients when all workers have ended the step.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from mpistrat.errors import UnavailableError
from mpistrat.parameter_server.protocol import messages
from mpistrat.parameter_server.protocol.messages import NewArray, Updates, unpack
from mpistrat.parameter_server.protocol.snapshot import ChangeLock
from mpistrat.parameter_server.protocol.staleness import ServerClock
from mpistrat.parameter_server.protocol.tables import Table
from mpistrat.parameter_server.rpc.endpoint import Request, RpcEndpoint, outcome_of, portable_error
from mpistrat.parameter_server.server.replication import Backup, BackupCopies
from mpistrat.parameter_server.server.store import ServerOptimizers, Store


class Rounds:
    """Ends rounds (steps of all workers). When all workers have ended a step, it applies their combined gradients.

    It does so on this server and on its backup.

    Args: workers: the workers' ranks.
    """

    def __init__(
        self,
        rpc: RpcEndpoint,
        workers: Sequence[int],
        optimizers: ServerOptimizers,
        lock: ChangeLock,
        backup: Backup,
    ) -> None:
        self._rpc = rpc
        self._optimizers = optimizers
        self._lock = lock
        self._backup = backup
        self._clock = ServerClock(rpc, workers, self._end, backup.when_safe)
        rpc.handle(messages.ENDED, self._in_lock(self._clock.ended))
        rpc.handle(messages.FAILED, self._in_lock(self._drop_gradients))

    def leave(self, rank: int, died: bool) -> None:
        """Stop waiting for the steps of a rank that has left. If it `died`, drop its unfinished step's gradients."""
        if died:
            self._drop_gradients(rank, self._clock.steps_of(rank))
        self._clock.leave(rank)

    def take_over(self) -> None:
        """Drop dead workers' gradients of unfinished steps, then end the rounds that all living workers have ended.

        Called by: `BackupCopies`, when this server has taken over the arrays of a dead server.
        """
        for rank in self._rpc.channel.lost:
            self._optimizers.forget(rank, self._clock.steps_of(rank))
        self._clock.look()

    def _in_lock(self, work: Callable[[int, int], None]) -> Callable[[int, Any], None]:
        """Return a handler of notices about steps: it calls `work(worker, steps)` once the lock lets it pass."""

        def handle(source: int, body: tuple[int, messages.Push | None]) -> None:
            steps, push = body
            self._lock.enter(source, push, work, source, steps)

        return handle

    def _drop_gradients(self, worker: int, steps: int) -> None:
        self._optimizers.forget(worker, steps)
        self._backup.forward(messages.DROP_GRADIENTS, worker, steps)

    def _end(self, before: int) -> Exception | None:
        """End the rounds with numbers below `before`, on this server and on its backup.

        Called by: the clock, with the number of steps that the slowest worker has ended.
        Returns: the first error of an array's step, for each worker's next request to begin; None if all succeeded.
        """
        rounds = self._optimizers.pending_rounds(before)
        if not rounds:
            return None
        who_ended = {number: self._clock.who_ended(number) for number in rounds}
        failed = self._optimizers.end_rounds(before, who_ended.__getitem__)
        forwarded = self._backup.forward(messages.END_ROUNDS, self._rpc.rank, (before, who_ended))
        forwarded.failed = bool(failed)
        if not failed:
            return None
        name, error = failed[0]
        more = len(failed) - 1
        others = f" (nor those of {more} more arrays)" if more else ""
        portable = portable_error(error)
        return type(portable)(
            f"the step of {name!r} by all workers' gradients could not be made{others}: {portable.args[0]}"
        )


class Announcements:
    """Answers the ranks that wait for a name: for the array with a key to be made, or for a value to be published.

    Args:
        creator: the rank that announces names; once it has left, waiting ranks get an UnavailableError.
        when_safe: calls a function with its arguments once the backup has made all changes so far.
    """

    def __init__(self, rpc: RpcEndpoint, creator: int | None, when_safe: messages.WhenSafe) -> None:
        self._rpc = rpc
        self._creator = creator
        self._when_safe = when_safe
        self._announced: dict[Hashable, Any] = {}
        self._waiting: dict[Hashable, list[Request]] = {}
        self._no_more: UnavailableError | None = None
        for method in (messages.PUBLISH, messages.CANNOT_CREATE):
            rpc.handle(method, lambda source, body: self.announce(*body))
        rpc.handle(messages.PUBLISHED, self.answer)

    def announce(self, name: Hashable, outcome: Any) -> None:
        """Announce a name, unless it was announced before, and answer the ranks that wait for it.

        Args:
            name: an array's key, or a published name.
            outcome: the value that the waiting ranks get, or an exception that they raise.
        """
        self._announced.setdefault(name, outcome)
        for request in self._waiting.pop(name, []):
            self.answer(request)

    def answer(self, request: Request) -> None:
        """Reply to a request with the outcome of its name: now, or once it is announced or the creator has left."""
        name = request.body
        if name not in self._announced and self._no_more is None:
            self._waiting.setdefault(name, []).append(request)
            return
        outcome = self._announced.get(name, self._no_more)
        self._when_safe(request.reply, outcome)

    def leave(self, rank: int, died: bool) -> None:
        """If the rank is the creator, answer requests for names that it has not announced with UnavailableError.

        Requests that wait get the error now, later requests get it at once. Does nothing for any other rank.
        """
        if rank != self._creator or self._no_more is not None:
            return
        gone = "died" if died else "left"
        self._no_more = UnavailableError(
            f"{self._rpc.name_of(rank)} has {gone} before it made a variable, or told of a "
            "checkpoint, that other ranks wait for"
        )
        waiting = self._waiting
        self._waiting = {}
        for requests in waiting.values():
            for request in requests:
                request.reply(self._no_more)


class ParameterServer:
    """A parameter server: handles the requests of clients, in the thread that calls `serve`.

    Args:
        clients: the ranks that use the server. `serve` returns when all of them have left or died.
        workers: the clients that count steps.
        creator: the rank that makes arrays and announces checkpoints; None if there is none.
        backup: the rank of the server's backup; None for a server without a backup.
    Attributes:
        clients: the ranks that still use the server.
        backup_copies: the copies of another server's arrays, if this server is its backup.
    """

    def __init__(
        self,
        rpc: RpcEndpoint,
        clients: Sequence[int],
        workers: Sequence[int] = (),
        creator: int | None = None,
        backup: int | None = None,
    ) -> None:
        store = Store(lambda key: self.backup_copies.claim(key))
        self.store = store
        self.clients = set(clients)
        self._rpc = rpc
        self._backup = Backup(rpc, backup)
        when_safe = self._backup.when_safe
        self._lock = ChangeLock(rpc, when_safe)
        self._rounds = Rounds(rpc, workers, store.optimizers, self._lock, self._backup)
        self.backup_copies = BackupCopies(rpc, store, self._lock, self._rounds.take_over)
        self._announcements = Announcements(rpc, creator, when_safe)
        requests: dict[str, Callable[[Request], None]] = {
            messages.PULL: _replying(store.pull),
            messages.ROWS: _replying(store.rows),
            messages.OPTIMIZER_STATE: _replying(store.optimizer_state),
            messages.CREATE: self._create,
            messages.FIND: self._find,
            messages.UPDATE: self._update,
            messages.MAKE_OPTIMIZER: self._make_optimizer,
            messages.LOAD_OPTIMIZER_STATE: self._load_optimizer_state,
        }
        for method, handler in requests.items():
            rpc.handle(method, _refusing(handler))
        rpc.handle(messages.FORGET, lambda _, body: store.idempotency.forget(*body))
        rpc.handle(messages.DONE, lambda source, _: self._leave(source))
        rpc.on_lost(self._lost)

    def serve(self) -> None:
        """Handle requests, and return when no client uses the server any more. Called by: the server's rank."""
        self._rpc.run_until(lambda: not self.clients)

    def _create(self, request: Request) -> None:
        new: NewArray = request.body
        table = self.store.create(new)
        if new.server == self._rpc.rank:
            self._backup.forward_new(request.source, new, table)
        description = _description(table)
        self._announcements.announce(new.key, description)
        self._reply_when_safe(request, description)

    def _find(self, request: Request) -> None:
        """Reply with an array's name, spec and handle, once the creator has made the array."""
        key = request.body
        if self.store.has(key):
            self._announcements.announce(key, _description(self.store.table(key)))
        self._announcements.answer(request)

    def _update(self, request: Request) -> None:
        # The operands are mapped now, because a dead client's memory cannot be mapped later.
        updates: Updates = request.body
        self.store.map_operands(updates)
        work = _refusing(self._make_updates)
        self._lock.enter(request.source, updates.push, work, request)

    def _make_updates(self, request: Request) -> None:
        updates: Updates = request.body
        forwarded = None
        if self._backup.covers(update.key for update in updates.updates):
            # Forwarded first, so that the backup works at the same time, and so that neither server makes the updates
            # if there is no memory for the operands' copies.
            mappings = self.store.mappings
            operands = []
            for update in updates.updates:
                operands += [unpack(packed, mappings) for packed in update.operand]
            forwarded = self._backup.forward_updates(request.source, updates, operands)
        outcome = outcome_of(self.store.update, request.source, updates)
        if forwarded is not None:
            forwarded.failed = isinstance(outcome, Exception)
        self._reply_when_safe(request, outcome)

    def _make_optimizer(self, request: Request) -> None:
        _, _, arrays = request.body
        keys = [key for key, _ in arrays]
        self._change_optimizer(messages.MAKE_OPTIMIZER, request, keys, self.store.make_optimizer)

    def _load_optimizer_state(self, request: Request) -> None:
        _, key, _ = request.body
        load = self.store.load_optimizer_state
        self._change_optimizer(messages.LOAD_OPTIMIZER_STATE, request, [key], load)

    def _change_optimizer(
        self, method: str, request: Request, keys: Sequence[int], change: Callable[..., None]
    ) -> None:
        body = request.body
        outcome = outcome_of(change, *body)
        if self._backup.covers(keys):
            forwarded = self._backup.forward(method, request.source, body)
            forwarded.failed = isinstance(outcome, Exception)
        self._reply_when_safe(request, outcome)

    def _reply_when_safe(self, request: Request, outcome: Any) -> None:
        """Reply with a value or an error, once the backup has made all changes so far; at once without a backup."""
        if isinstance(outcome, Exception):
            outcome = portable_error(outcome)
        self._backup.when_safe(request.reply, outcome)

    def _leave(self, rank: int, died: bool = False) -> None:
        self.clients.discard(rank)
        self._lock.enter(rank, None, self._rounds.leave, rank, died)
        self._announcements.leave(rank, died)

    def _lost(self, rank: int) -> None:
        """Finish the requests that a dead rank has sent whole, and stop waiting for the rank."""
        self._backup.lost(rank)
        self.backup_copies.lost(rank)
        self._lock.lost(rank)
        self._leave(rank, died=True)
        # After the rank's pushes, which may wait for the lock and use its memory.
        pid = self._rpc.channel.pid_of(rank)
        self._lock.enter(rank, None, self.store.mappings.forget, pid)


def _description(table: Table) -> Any:
    return table.name, table.spec, table.handle


def _replying(read: Callable[[Any, Any], Any]) -> Callable[[Request], None]:
    """Return a handler that replies with the result of `read`. The request's body has the two arguments of `read`."""

    def handle(request: Request) -> None:
        place, wanted = request.body
        request.reply(read(place, wanted))

    return handle


def _refusing(handler: Callable[[Request], None]) -> Callable[[Request], None]:
    """Return a handler that calls `handler`, and replies with the error if `handler` raises an Exception."""

    def handle(request: Request) -> None:
        try:
            handler(request)
        except Exception as error:
            request.reply(portable_error(error))

    return handle
