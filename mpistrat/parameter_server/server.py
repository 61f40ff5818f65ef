"""What a server does: it keeps arrays, and changes them in the order in which the updates come."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from mpistrat.errors import UnavailableError
from mpistrat.machine.notices import tell
from mpistrat.parameter_server.gate import Gate, Push
from mpistrat.parameter_server.kept_copies import KeptCopies
from mpistrat.parameter_server.replica import Passed, Replica
from mpistrat.parameter_server.rpc import requests
from mpistrat.parameter_server.rpc.remote_errors import as_refusal
from mpistrat.parameter_server.rpc.requests import Created, Updates
from mpistrat.parameter_server.rpc.rpc import Asked, Post
from mpistrat.parameter_server.staleness import ENDED, FAILED, Clock
from mpistrat.parameter_server.store import Store, outcome_of
from mpistrat.parameter_server.tables import Table
from mpistrat.parameter_server.tensors import Carried, Placed, carried, unpack


class ParameterServer:
    """Serves the arrays of one rank, in the thread that calls `serve`.

    Args:
        post: to the others.
        clients: the ranks that use the server; it leaves when all of them are done, or lost.
        workers: those whose steps it counts.
        maker: the rank that makes arrays, and tells of checkpoints.
        keeper: the server that keeps a second copy of what is made here; None: nobody does.
    Attributes:
        clients: those that still use it.
        kept: the second copies of another server's arrays.
    """

    def __init__(
        self,
        post: Post,
        clients: Sequence[int],
        workers: Sequence[int] = (),
        maker: int | None = None,
        keeper: int | None = None,
    ) -> None:
        self.store = Store()
        self._post = post
        self._replica = Replica(post, keeper, self._differs)
        self._gate = Gate(post, self._replica.then)
        self.kept = KeptCopies(post, self.store, self._gate)
        self._single: set[int] = set()  # arrays that came here when another server had died
        self._clock = Clock(post, workers, self._end_rounds, self._replica.then)
        self._maker = maker
        self._why_no_more = ""  # comes from the maker: it "has died", or "has left"
        self.clients = set(clients)
        self._waiting: dict[int, list[tuple[int, int]]] = {}  # for arrays that are not there yet
        self._not_made: dict[int, Exception] = {}  # why, by the key that the array would have
        self._published: dict[Any, Any] = {}
        self._awaiting: dict[Any, list[tuple[int, int]]] = {}
        self._respond(requests.PULL, self._pull)
        self._respond(requests.ROWS, self._rows)
        self._respond(requests.OPTIMIZER_STATE, self._optimizer_state)
        post.handle(requests.CREATE, self._create)
        post.handle(requests.UPDATE, self._update)
        post.handle(requests.MAKE_OPTIMIZER, self._make_optimizer)
        post.handle(requests.LOAD_OPTIMIZER_STATE, self._load_optimizer_state)
        post.handle(requests.CANNOT_CREATE, self._cannot_create)
        post.handle(requests.FIND, self._find)
        post.handle(requests.PUBLISH, self._publish)
        post.handle(requests.PUBLISHED, self._await)
        post.handle(requests.FORGET, lambda _, body: self.store.applied.forget(*body))
        post.handle(ENDED, self._ended)
        post.handle(FAILED, self._failed)
        post.handle(requests.DONE, lambda source, _: self._leave(source))
        post.on_lost(self._lost)

    def serve(self) -> None:
        """Return when nobody uses the server any more."""
        self._post.attend(lambda: not self.clients)

    def _claim(self, *keys: int) -> None:
        """A client asks for these arrays: if they are second copies, the server that has the first has died.

        Raises: UnavailableError where they have been given up.
        """
        claimed = [key for key in keys if self.kept.has(key)]
        if claimed:
            self._take_over()

    def _take_over(self) -> None:
        """What that one had told of counts, and of the rest what this one knows of the workers' steps."""
        self._single.update(self.kept.names)
        self.kept.become_own()
        for rank in self._post.mail.lost:
            self.store.optimizers.forget(rank, self._clock.steps_of(rank))
        self._clock.look()

    def _respond(self, kind: str, respond: Callable[[int, Any], Any]) -> None:
        """Answer requests of `kind` with what `respond` returns."""

        def handle(source: int, asked: Asked) -> None:
            self._answer(source, asked.ticket, outcome_of(lambda: respond(source, asked.body)))

        self._post.handle(kind, handle)

    def _answer(self, source: int, ticket: int, outcome: Any) -> None:
        """With a result; with an error, which the asker raises."""
        if isinstance(outcome, Exception):
            self._post.refuse(source, ticket, as_refusal(outcome))
        else:
            self._post.answer(source, ticket, outcome)

    def _answer_when_safe(self, source: int, ticket: int, outcome: Any) -> None:
        """When what it is about outlives this server, if there is a replica."""
        self._replica.then(lambda: self._answer(source, ticket, outcome))

    def _create(self, source: int, asked: Asked) -> None:
        new: Created = asked.body
        try:
            self._claim(new.key)
            table = self.store.create(new)
        except Exception as error:
            self._answer(source, asked.ticket, error)
            return
        if new.server != self._post.rank:
            self._single.add(new.key)
        elif self._replica.keeper is not None:
            value = None if new.value is None else self._replica.array_of(table)
            self._replica.pass_on(requests.CREATE, source, new._replace(value=value))
        waiting = [(source, asked.ticket), *self._waiting.pop(new.key, [])]
        for asker, ticket in waiting:
            self._answer_when_safe(asker, ticket, _found(table))

    def _cannot_create(self, source: int, body: tuple[int, Exception]) -> None:
        key, error = body
        self._not_made[key] = error
        for asker, ticket in self._waiting.pop(key, []):
            self._post.refuse(asker, ticket, error)

    def _find(self, source: int, asked: Asked) -> None:
        """The array of a number, once it is there: another rank may not have made it yet."""
        try:
            self._claim(asked.body)
        except UnavailableError as error:
            self._answer(source, asked.ticket, error)
            return
        table = self.store.by_key.get(asked.body)
        if asked.body in self._not_made:
            self._post.refuse(source, asked.ticket, self._not_made[asked.body])
        elif table is not None:
            self._answer_when_safe(source, asked.ticket, _found(table))
        elif self._why_no_more:
            self._refuse_to_wait(source, asked.ticket)
        else:
            self._waiting.setdefault(asked.body, []).append((source, asked.ticket))

    def _refuse_to_wait(self, source: int, ticket: int) -> None:
        assert self._maker is not None
        maker = self._post.name_of(self._maker)
        error = UnavailableError(
            f"{maker} {self._why_no_more} before it made a variable, or told of a checkpoint, that others wait for"
        )
        self._post.refuse(source, ticket, error)

    def _publish(self, source: int, body: tuple[Any, Any]) -> None:
        name, value = body
        self._published[name] = value
        for asker, ticket in self._awaiting.pop(name, []):
            self._post.answer(asker, ticket, value)

    def _await(self, source: int, asked: Asked) -> None:
        if asked.body in self._published:
            self._post.answer(source, asked.ticket, self._published[asked.body])
        elif self._why_no_more:
            self._refuse_to_wait(source, asked.ticket)
        else:
            self._awaiting.setdefault(asked.body, []).append((source, asked.ticket))

    def _pull(self, source: int, body: tuple[int, Placed | None]) -> Carried | None:
        """The array: in memory of the asker's, or in the answer."""
        key, place = body
        self._claim(key)
        table = self.store.table(key)
        if place is None:
            return carried(table.array).copied()  # MPI may read it later, when it has changed
        unpack(place, self.store.mappings)[...] = table.array
        return None

    def _rows(self, source: int, body: tuple[int, Carried]) -> Carried:
        key, indices = body
        self._claim(key)
        table = self.store.table(key)
        return carried(table.rows(unpack(indices, self.store.mappings)))

    def _update(self, source: int, asked: Asked) -> None:
        asks: Updates = asked.body
        try:
            self._claim(*(update.key for update in asks.updates))
            # Now: if who asked dies meanwhile, it cannot be mapped any more.
            self.store.map_operands(asks)
        except (OSError, UnavailableError) as error:
            self._answer(source, asked.ticket, error)
            return

        def work() -> None:
            # Before they are made here: the other makes them meanwhile.
            passed = outcome_of(lambda: self._pass_on(source, asks))
            if isinstance(passed, Exception):  # no memory for it
                self._answer(source, asked.ticket, passed)
                return
            outcomes = self.store.update(source, asks)
            failed = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
            if passed is not None:
                passed.failed = bool(failed)
            self._answer_when_safe(source, asked.ticket, failed[0] if failed else outcomes)

        self._gate.enter(source, asks.push, work)

    def _pass_on(self, source: int, asks: Updates) -> Passed | None:
        """All updates of a message are of arrays that were made on one server."""
        if not self._has_replica(update.key for update in asks.updates):
            return None
        operands = [
            unpack(one, self.store.mappings) for update in asks.updates for one in update.operand
        ]
        packed, region = self._replica.pack(operands)
        parts = iter(packed)
        again = [
            update._replace(operand=list(itertools.islice(parts, len(update.operand))))
            for update in asks.updates
        ]
        return self._replica.pass_on(requests.UPDATE, source, asks._replace(updates=again), region)

    def _has_replica(self, keys: Iterable[int]) -> bool:
        return self._replica.keeper is not None and self._single.isdisjoint(keys)

    def _make_optimizer(self, source: int, asked: Asked) -> None:
        _, _, arrays = asked.body
        self._change_optimizer(
            requests.MAKE_OPTIMIZER,
            source,
            asked,
            [key for key, _ in arrays],
            lambda: self.store.make_optimizer(*asked.body),
        )

    def _load_optimizer_state(self, source: int, asked: Asked) -> None:
        _, key, _ = asked.body
        self._change_optimizer(
            requests.LOAD_OPTIMIZER_STATE,
            source,
            asked,
            [key],
            lambda: self.store.optimizers.load_state(*asked.body),
        )

    def _change_optimizer(
        self, kind: str, source: int, asked: Asked, keys: Sequence[int], work: Callable[[], None]
    ) -> None:
        def claimed() -> None:
            self._claim(*keys)
            work()

        outcome = outcome_of(claimed)
        if self._has_replica(keys):
            passed = self._replica.pass_on(kind, source, asked.body)
            passed.failed = isinstance(outcome, Exception)
        self._answer_when_safe(source, asked.ticket, outcome)

    def _differs(self, why: str) -> None:
        """The other could not do what was done here: it has less memory, say."""
        own = [table.name for key, table in self.store.by_key.items() if key not in self._single]
        tell(
            f"{self._post.name_of(self._post.rank)} has no replica any more of {', '.join(map(repr, own))}, for that "
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
        if rounds and self._replica.keeper is not None:
            body = before, who_ended
            passed = self._replica.pass_on(requests.END_ROUNDS, self._post.rank, body)
            passed.failed = bool(failed)
        if not failed:
            return None
        name, error = failed[0]
        others = f" (nor those of {len(failed) - 1} more arrays)" if failed[1:] else ""
        told = as_refusal(error)
        return type(told)(
            f"the step of {name!r} by all workers' gradients could not be made{others}: {told.args[0]}"
        )

    def _failed(self, source: int, body: tuple[int, Push | None]) -> None:
        steps, push = body
        self._gate.enter(source, push, lambda: self._drop_gradients(source, steps))

    def _drop_gradients(self, worker: int, steps: int) -> None:
        self.store.optimizers.forget(worker, steps)
        if self._replica.keeper is not None:
            self._replica.pass_on(requests.DROP_GRADIENTS, worker, steps)

    def _leave(self, rank: int, died: bool = False) -> None:
        def leave() -> None:
            if died:
                self._drop_gradients(rank, self._clock.steps_of(rank))
            self._clock.leave(rank)

        self.clients.discard(rank)
        self._gate.enter(rank, None, leave)
        if rank == self._maker and not self._why_no_more:
            self._why_no_more = "has died" if died else "has left"
            for source, ticket in itertools.chain(
                *self._waiting.values(), *self._awaiting.values()
            ):
                self._refuse_to_wait(source, ticket)
            self._waiting.clear()
            self._awaiting.clear()

    def _lost(self, rank: int) -> None:
        """What of its work has come whole is done; nobody waits for the rest."""
        self._replica.lost(rank)
        if rank == self.kept.primary:
            self._take_over()
        self._gate.lost(rank)
        self._leave(rank, died=True)
        # After what it has pushed, which may be held back.
        pid = self._post.mail.pid_of(rank)
        self._gate.enter(rank, None, lambda: self.store.mappings.forget(pid))


def _found(table: Table) -> Any:
    return table.name, table.kind, table.place
