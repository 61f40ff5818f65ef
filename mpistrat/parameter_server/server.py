"""What a server does: it keeps arrays, and changes them in the order in which the updates come.

Updates that carry a number are applied once, however often they come: who repeats a piece of work, because the rank
that did it has died, repeats their numbers, too.
"""

from __future__ import annotations

import copy
import itertools
import pickle
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from mpistrat.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
)
from mpistrat.indexed_slices import IndexedSlices
from mpistrat.parameter_server.clocks import ENDED, FAILED, Clock
from mpistrat.parameter_server.gate import Gate, Push
from mpistrat.parameter_server.optimizer_steps import OptimizerSteps, Step
from mpistrat.parameter_server.parcels import Carried, Kind, Placed, carried, unpack
from mpistrat.parameter_server.post import Asked, Post
from mpistrat.parameter_server.segments import Mappings, Segments
from mpistrat.parameter_server.tables import Table

# An answer to an update brings the new value along, up to here.
SMALL_VALUE = 1 << 12


class Update(NamedTuple):
    """What one message asks for, once for each array that it is about.

    Attributes:
        key: of the array.
        method: of a variable, such as "assign_add"; or a step of an optimizer.
        operand: an array, or two: the indices and values of rows.
        work: the number of the piece of work that asks; None for what is not repeated.
        number: of this update among those of this piece of work to this array.
    """

    key: int
    method: str | Step
    operand: list[Placed | Carried]
    work: int | None = None
    number: int = 0


class Created(NamedTuple):
    """A new array: its first value is `value`, or zeros."""

    key: int
    name: str
    kind: Kind
    value: Placed | Carried | None


class Tables:
    """The arrays of a server, and which updates they have had.

    Attributes:
        by_key: the arrays.
        optimizers: theirs.
    """

    def __init__(self) -> None:
        self.by_key: dict[int, Table] = {}
        self.optimizers = OptimizerSteps()
        self.mappings = Mappings()
        self._segments = Segments()
        # By piece of work, then array and number: the answers to its updates, or why they could not be made.
        self._applied: dict[int, dict[tuple[int, int], Carried | Exception | None]] = {}
        self._over_before = 0  # pieces of work

    def create(self, new: Created) -> Table:
        table = Table(new.name, new.kind, self._segments)
        if new.value is not None:
            with table.writing(updates=0) as array:
                array[...] = unpack(new.value, self.mappings)
        self.by_key[new.key] = table
        return table

    def table(self, key: int) -> Table:
        try:
            return self.by_key[key]
        except KeyError:
            raise NotFoundError(
                f"this server has no array {key}: it has {len(self.by_key)}"
            ) from None

    def update(self, update: Update, worker: int) -> Carried | None:
        """Apply it, unless that was done; returns the value then, if it is small."""
        table = self.table(update.key)
        if update.work is None:
            return self._apply(table, update, worker)
        if update.work < self._over_before:
            raise FailedPreconditionError(
                f"an update of {table.name!r} came after the work that it belongs to was over"
            )
        applied = self._applied.setdefault(update.work, {})
        which = update.key, update.number
        if which not in applied:
            try:
                applied[which] = self._apply(table, update, worker)
            except OSError:  # who asked has died, with its memory; it will be asked again
                raise
            except Exception as error:
                applied[which] = error
        found = applied[which]
        if isinstance(found, Exception):
            raise found
        return found

    def _apply(self, table: Table, update: Update, worker: int) -> Carried | None:
        operand: Any = [unpack(one, self.mappings) for one in update.operand]
        operand = IndexedSlices(operand[1], operand[0]) if len(operand) == 2 else operand[0]
        if isinstance(update.method, Step):
            self.optimizers.step(update.key, table, update.method, operand, worker)
            return None
        table.update(update.method, operand)
        return carried(table.array).copied() if table.kind.nbytes <= SMALL_VALUE else None

    def map_operands(self, update: Update) -> None:
        """Raises: OSError when the memory is gone."""
        for operand in update.operand:
            if isinstance(operand, Placed):
                self.mappings.at(operand.place)

    def forget(self, over: Sequence[int], over_before: int) -> None:
        """Nobody repeats these pieces of work any more, nor any with a smaller number than `over_before`."""
        for work in over:
            self._applied.pop(work, None)
        if over_before > self._over_before:
            self._over_before = over_before
            # Those that were begun repeatedly are told of by this only.
            for work in [work for work in self._applied if work < over_before]:
                del self._applied[work]


class ParameterServer:
    """Serves the arrays of one rank, in the thread that calls `serve`.

    Args:
        post: to the others.
        clients: the ranks that use the server; it leaves when all of them are done, or lost.
        workers: those whose steps it counts.
        maker: the rank that makes arrays, and tells of checkpoints.
    Attributes:
        clients: those that still use it.
    """

    def __init__(
        self,
        post: Post,
        clients: Sequence[int],
        workers: Sequence[int] = (),
        maker: int | None = None,
    ) -> None:
        self.tables = Tables()
        self._clock = Clock(post, workers, self._end_rounds)
        self._post = post
        self._maker = maker
        self._why_no_more = ""  # comes from the maker: it "has died", or "has left"
        self.clients = set(clients)
        self._waiting: dict[int, list[tuple[int, int]]] = {}  # for arrays that are not there yet
        self._not_made: dict[int, Exception] = {}  # why, by the key that the array would have
        self._published: dict[Any, Any] = {}
        self._awaiting: dict[Any, list[tuple[int, int]]] = {}
        self._gate = Gate(post)
        for kind, respond in (
            ("create", self._create),
            ("pull", self._pull),
            ("rows", self._rows),
            ("count", self._count),
            ("make optimizer", self._make_optimizer),
            ("optimizer state", self._optimizer_state),
            ("load optimizer state", self._load_optimizer_state),
        ):
            self._respond(kind, respond)
        post.handle("update", self._update)
        post.handle("cannot create", self._cannot_create)
        post.handle("find", self._find)
        post.handle("publish", self._publish)
        post.handle("published", self._await)
        post.handle("forget", lambda _, body: self.tables.forget(*body))
        post.handle(ENDED, self._ended)
        post.handle(FAILED, self._failed)
        post.handle("done", lambda source, _: self._leave(source))
        post.on_lost(self._lost)

    def serve(self) -> None:
        """Return when nobody uses the server any more."""
        self._post.attend(lambda: not self.clients)

    def _respond(self, kind: str, respond: Callable[[int, Any], Any]) -> None:
        """Answer requests of `kind` with what `respond` returns."""
        self._post.handle(
            kind,
            lambda source, asked: self._answer(
                source, asked.ticket, lambda: respond(source, asked.body)
            ),
        )

    def _answer(self, source: int, ticket: int, work: Callable[[], Any]) -> None:
        """With what `work` returns; what it raises is the asker's."""
        try:
            answer = work()
        except Exception as error:
            self._post.refuse(source, ticket, _for_others(error))
        else:
            self._post.answer(source, ticket, answer)

    def _create(self, source: int, new: Created) -> Any:
        table = self.tables.create(new)
        for asker, ticket in self._waiting.pop(new.key, []):
            self._post.answer(asker, ticket, self._found(table))
        return self._found(table)

    def _cannot_create(self, source: int, body: tuple[int, Exception]) -> None:
        key, error = body
        self._not_made[key] = error
        for asker, ticket in self._waiting.pop(key, []):
            self._post.refuse(asker, ticket, error)

    def _found(self, table: Table) -> Any:
        return table.name, table.kind, table.place

    def _find(self, source: int, asked: Asked) -> None:
        """The array of a number, once it is there: another rank may not have made it yet."""
        table = self.tables.by_key.get(asked.body)
        if asked.body in self._not_made:
            self._post.refuse(source, asked.ticket, self._not_made[asked.body])
        elif table is not None:
            self._post.answer(source, asked.ticket, self._found(table))
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
        table = self.tables.table(key)
        if place is None:
            return carried(table.array).copied()  # MPI may read it later, when it has changed
        unpack(place, self.tables.mappings)[...] = table.array
        return None

    def _rows(self, source: int, body: tuple[int, Carried]) -> Carried:
        key, indices = body
        table = self.tables.table(key)
        return carried(table.rows(unpack(indices, self.tables.mappings)))

    def _update(self, source: int, asked: Asked) -> None:
        updates, push = asked.body
        try:  # now: if who asked dies meanwhile, it cannot be mapped any more
            for update in updates:
                self.tables.map_operands(update)
        except OSError as error:  # it has died
            self._post.refuse(source, asked.ticket, _for_others(error))
            return

        def work() -> list[Carried | None]:
            return [self.tables.update(update, source) for update in updates]

        self._gate.enter(source, push, lambda: self._answer(source, asked.ticket, work))

    def _make_optimizer(self, source: int, body: tuple[int, Any, list[tuple[int, bool]]]) -> None:
        optimizer, packed, arrays = body
        recipe = pickle.loads(packed)
        tables = [(key, self.tables.table(key), shard) for key, shard in arrays]
        self.tables.optimizers.make(optimizer, recipe, tables)

    def _optimizer_state(self, source: int, body: tuple[int, int]) -> Any:
        state = self.tables.optimizers.state(*body)
        return {name: copy.copy(value) for name, value in state.items()}  # as in `_pull`

    def _load_optimizer_state(self, source: int, body: tuple[int, int, Any]) -> None:
        self.tables.optimizers.load_state(*body)

    def _count(self, source: int, keys: Sequence[int]) -> list[int]:
        return [self.tables.table(key).updates for key in keys]

    def _ended(self, source: int, body: tuple[int, Push | None]) -> None:
        """With the last worker's step, arrays change, where the gradients of all are combined."""
        steps, push = body
        self._gate.enter(source, push, lambda: self._clock.ended(source, steps))

    def _end_rounds(self, before: int) -> Exception | None:
        """Returns: why a round's step of an array could not be made, if one could not."""
        failed = self.tables.optimizers.end_rounds(before, self._clock.who_ended)
        if not failed:
            return None
        name, error = failed[0]
        others = f" (nor those of {len(failed) - 1} more arrays)" if failed[1:] else ""
        told = _for_others(error)
        return type(told)(
            f"the step of {name!r} by all workers' gradients could not be made{others}: {told.args[0]}"
        )

    def _failed(self, source: int, body: tuple[int, Push | None]) -> None:
        steps, push = body
        self._gate.enter(source, push, lambda: self.tables.optimizers.forget(source, steps))

    def _leave(self, rank: int, died: bool = False) -> None:
        def leave() -> None:
            if died:
                self.tables.optimizers.forget(rank, self._clock.steps_of(rank))
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
        self._gate.lost(rank)
        self._leave(rank, died=True)
        # After what it has pushed, which may be held back.
        pid = self._post.mail.pid_of(rank)
        self._gate.enter(rank, None, lambda: self.tables.mappings.forget(pid))


_KNOWN: tuple[type[Exception], ...] = (
    InvalidArgumentError,
    NotFoundError,
    FailedPreconditionError,
    ValueError,
    IndexError,
    TypeError,
)


def _for_others(error: Exception) -> Exception:
    """`error`, as another process can have it."""
    for kind in _KNOWN:  # others may be of classes that only this process has
        if isinstance(error, kind):
            return kind(str(error))
    told = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return RuntimeError(f"the server failed:\n{told}")
