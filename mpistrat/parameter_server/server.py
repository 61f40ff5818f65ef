"""What a server does: it keeps arrays, and changes them in the order in which the updates come."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from mpistrat.parameter_server import protocol
from mpistrat.parameter_server.announcements import Announcements
from mpistrat.parameter_server.protocol import NewArray, Updates
from mpistrat.parameter_server.replication import Backup, BackupCopies
from mpistrat.parameter_server.rounds import Rounds
from mpistrat.parameter_server.rpc.endpoint import Request, RpcEndpoint
from mpistrat.parameter_server.rpc.remote_errors import portable_error
from mpistrat.parameter_server.snapshot import Gate
from mpistrat.parameter_server.store import Store, outcome_of
from mpistrat.parameter_server.tables import Table
from mpistrat.parameter_server.tensors import unpack


class ParameterServer:
    """Serves the arrays of one rank, in the thread that calls `serve`.

    Args:
        rpc: to the other ranks.
        clients: the ranks that use the server. It leaves when all of them are done, or have died.
        workers: the clients whose steps it counts.
        creator: the rank that creates arrays, and announces checkpoints.
        backup: the server that goes on with the arrays made here when this one has died; None where none does.
    Attributes:
        clients: those that still use it.
        store: its arrays.
        backup_copies: of the arrays of the server whose backup this one is.
    """

    def __init__(
        self,
        rpc: RpcEndpoint,
        clients: Sequence[int],
        workers: Sequence[int] = (),
        creator: int | None = None,
        backup: int | None = None,
    ) -> None:
        self.store = Store(lambda key: self.backup_copies.claim(key))
        self.clients = set(clients)
        self._rpc = rpc
        self._backup = Backup(rpc, backup)
        self._gate = Gate(rpc, self._backup.when_safe)
        self._rounds = Rounds(rpc, workers, self.store.optimizers, self._gate, self._backup)
        self.backup_copies = BackupCopies(rpc, self.store, self._gate, self._rounds.take_over)
        self._announcements = Announcements(rpc, creator, self._backup.when_safe)
        rpc.handle(protocol.PULL, partial(self._read, self.store.pull))
        rpc.handle(protocol.ROWS, partial(self._read, self.store.rows))
        rpc.handle(protocol.OPTIMIZER_STATE, partial(self._read, self.store.optimizer_state))
        rpc.handle(protocol.CREATE, self._create)
        rpc.handle(protocol.FIND, self._find)
        rpc.handle(protocol.UPDATE, self._update)
        rpc.handle(protocol.MAKE_OPTIMIZER, self._make_optimizer)
        rpc.handle(protocol.LOAD_OPTIMIZER_STATE, self._load_optimizer_state)
        rpc.handle(protocol.FORGET, lambda _, body: self.store.idempotency.forget(*body))
        rpc.handle(protocol.DONE, lambda source, _: self._leave(source))
        rpc.on_lost(self._lost)

    def serve(self) -> None:
        """Return when nobody uses the server any more."""
        self._rpc.run_until(lambda: not self.clients)

    def _reply_when_safe(self, request: Request, outcome: Any) -> None:
        """When the change that the reply is about outlives this server, if there is a backup."""
        self._backup.when_safe(partial(_reply, request, outcome))

    def _read(self, read: Callable[[Any, Any], Any], request: Request) -> None:
        def work() -> Any:
            which, what = request.body
            return read(which, what)

        _reply(request, outcome_of(work))

    def _create(self, request: Request) -> None:
        new: NewArray = request.body
        table = outcome_of(lambda: self.store.create(new))
        if isinstance(table, Exception):
            _reply(request, table)
            return
        if new.server == self._rpc.rank:
            self._backup.forward_new(request.source, new, table)
        self._announcements.announce(new.key, _description(table))
        self._reply_when_safe(request, _description(table))

    def _find(self, request: Request) -> None:
        """Reply once the array is there: another rank may not have made it yet."""
        key = request.body
        found = outcome_of(lambda: self.store.has(key))
        if isinstance(found, Exception):
            _reply(request, found)
            return
        if found:
            self._announcements.announce(key, _description(self.store.by_key[key]))
        self._announcements.answer(request, key)

    def _update(self, request: Request) -> None:
        try:
            # Now: when the client dies, its memory cannot be mapped any more.
            self.store.map_operands(request.body)
        except OSError as error:
            _reply(request, error)
            return
        self._gate.enter(request.source, request.body.push, lambda: self._make_updates(request))

    def _make_updates(self, request: Request) -> None:
        updates: Updates = request.body
        forwarded = None
        if self._backup.covers(update.key for update in updates.updates):
            # First, so that the backup makes the updates meanwhile.
            forwarded = outcome_of(lambda: self._forward(request.source, updates))
            if isinstance(forwarded, Exception):  # no memory for it
                _reply(request, forwarded)
                return
        outcome = outcome_of(lambda: self.store.update(request.source, updates))
        if forwarded is not None:
            forwarded.failed = isinstance(outcome, Exception)
        self._reply_when_safe(request, outcome)

    def _forward(self, source: int, updates: Updates) -> Any:
        packed = itertools.chain(*(update.operand for update in updates.updates))
        operands = [unpack(operand, self.store.mappings) for operand in packed]
        return self._backup.forward_updates(source, updates, operands)

    def _make_optimizer(self, request: Request) -> None:
        keys = [key for key, _ in request.body[2]]
        make = self.store.make_optimizer
        self._change_optimizer(protocol.MAKE_OPTIMIZER, request, keys, make)

    def _load_optimizer_state(self, request: Request) -> None:
        _, key, _ = request.body
        load = self.store.load_optimizer_state
        self._change_optimizer(protocol.LOAD_OPTIMIZER_STATE, request, [key], load)

    def _change_optimizer(
        self, method: str, request: Request, keys: Sequence[int], change: Callable[..., None]
    ) -> None:
        outcome = outcome_of(lambda: change(*request.body))
        if self._backup.covers(keys):
            forwarded = self._backup.forward(method, request.source, request.body)
            forwarded.failed = isinstance(outcome, Exception)
        self._reply_when_safe(request, outcome)

    def _leave(self, rank: int, died: bool = False) -> None:
        self.clients.discard(rank)
        self._gate.enter(rank, None, lambda: self._rounds.leave(rank, died))
        self._announcements.leave(rank, died)

    def _lost(self, rank: int) -> None:
        """Finish the work that has come whole from a dead rank; wait for nothing else of it."""
        self._backup.lost(rank)
        self.backup_copies.lost(rank)
        self._gate.lost(rank)
        self._leave(rank, died=True)
        # After its pushes, which may wait at the gate.
        pid = self._rpc.channel.pid_of(rank)
        self._gate.enter(rank, None, lambda: self.store.mappings.forget(pid))


def _description(table: Table) -> Any:
    return table.name, table.spec, table.handle


def _reply(request: Request, outcome: Any) -> None:
    """With a result, or with an error that the client raises."""
    request.reply(portable_error(outcome) if isinstance(outcome, Exception) else outcome)
