"""How a rank reads and changes the arrays that servers keep."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from mpistrat import arrays
from mpistrat.arrays import Array
from mpistrat.communicators.recycled_buffers import RecycledBuffers
from mpistrat.errors import UnavailableError
from mpistrat.indexed_slices import IndexedSlices
from mpistrat.parameter_server import protocol
from mpistrat.parameter_server.gate import ADMIT, HOLD, RELEASE, Push, not_yet_everywhere
from mpistrat.parameter_server.optimizer_steps import Step
from mpistrat.parameter_server.protocol import NewArray, Update, Updates
from mpistrat.parameter_server.routes import RoutedRequest, Routes
from mpistrat.parameter_server.rpc.endpoint import RpcEndpoint
from mpistrat.parameter_server.rpc.segments import Buffers, Mappings, Region
from mpistrat.parameter_server.tables import MappedTable
from mpistrat.parameter_server.tensors import (
    InlineTensor,
    SharedTensor,
    TensorSpec,
    inline,
    pack,
    unpack,
)
from mpistrat.parameter_server.update_numbers import UpdateNumbers, session_of

if TYPE_CHECKING:
    from mpistrat.parameter_server.server_optimizers import OptimizerRecipe, State


class Address(NamedTuple):
    """Of an array on a server; equal on all ranks.

    Attributes:
        server: the rank of the one that makes it.
        key: the array's number.
    """

    server: int
    key: int
    name: str
    spec: TensorSpec


class Change(NamedTuple):
    """An update that is to be made: a method of a variable, or an optimizer's step with a gradient.

    `operand` fits, and is an array or `IndexedSlices`.
    """

    address: Address
    method: str | Step
    operand: Any


class Client:
    """Reads and changes arrays on servers. Called by: any thread.

    What is on the same node is read where it lies; all changes are made by the servers, one after the other.

    Args:
        rpc: to the servers.
        servers: their ranks, in task order.
        replicated: whether each keeps the second copies of what the one before it makes.
    Attributes:
        routes: to who has what now.
        used: addresses of the arrays that were used from here, by key.
        bytes_pulled, bytes_pushed: so far.
    """

    def __init__(self, rpc: RpcEndpoint, servers: Sequence[int], replicated: bool = False) -> None:
        self.rpc, self.servers = rpc, tuple(servers)
        self.routes = Routes(rpc, servers, replicated)
        self.bytes_pulled = self.bytes_pushed = 0
        self._buffers = Buffers()
        self._results = RecycledBuffers()
        self._recycling = threading.Lock()
        self._mappings = Mappings()
        # By server and key; None where nothing can be mapped.
        self._tables: dict[tuple[int, int], MappedTable | None] = {}
        self.used: dict[int, Address] = {}
        self._is_done = False
        self._numbers = UpdateNumbers(session_of(rpc.rank) if replicated else None)
        self._pushes = itertools.count()
        self._already_written = False
        rpc.on_lost(self._forget_memory)

    def _forget_memory(self, rank: int) -> None:
        """Of a process that has died: its pages are there as long as they are mapped."""
        self._mappings.forget(self.rpc.channel.pid_of(rank))
        for which in [which for which in list(self._tables) if which[0] == rank]:
            del self._tables[which]

    def names_lost(self) -> list[str]:
        """Of the arrays that were used from here, and of which no copy is left."""
        is_lost = self.rpc.channel.has_died
        used = list(self.used.values())
        return [one.name for one in used if all(map(is_lost, self.routes.copies_of(one.server)))]

    def create(self, address: Address, value: Array) -> None:
        """Have the server make the array, with this value."""
        self.used[address.key] = address
        packed, region = pack([value], self._shared_with(self.routes.holder_of(address.server)))
        new = NewArray(address.key, address.server, address.name, address.spec, packed[0])
        self.call(
            address.server,
            protocol.CREATE,
            new,
            lambda: new._replace(value=self._by_value(packed[0])),
        ).wait()
        self._give_back(region)
        self.bytes_pushed += address.spec.nbytes

    def cannot_create(self, server: int, key: int, error: Exception) -> None:
        """Let those who look for this array raise the error, now and later."""
        for one in self.routes.copies_of(server):
            self.rpc.notify(one, protocol.CANNOT_CREATE, (key, error))

    def find(self, server: int, key: int) -> Address:
        """An array that another rank makes; waits until it has, as long as that uses the servers.

        Raises: UnavailableError when it does not any more; what it told by `cannot_create`.
        """
        name, spec, _ = self.call(server, protocol.FIND, key).wait(limited=False)
        self.used[key] = Address(server, key, name, spec)
        return self.used[key]

    def pull(self, address: Address, out: Array | None = None) -> Array:
        """The value, on the host; in `out` where one is given."""
        if out is None:
            with self._recycling:
                out = self._results.like(address.spec.empty())
        self.pull_into([(address, out)])
        return out

    def pull_into(self, wanted: Sequence[tuple[Address, Array]]) -> None:
        """Several values at the same time, each into an array of its spec, on any device."""
        asked: list[tuple[Array, TensorSpec, Region | None, RoutedRequest]] = []
        for address, out in wanted:
            spec = address.spec
            self.bytes_pulled += spec.nbytes
            table = self._mapped(address)
            if table is not None and table.copy_to(out):
                continue
            # The server answers between two updates.
            region, target = None, None
            if table is not None:
                region = self._buffers.take(spec.nbytes)
                target = SharedTensor(region.handle._replace(nbytes=spec.nbytes), spec)
            by_value = partial(tuple, (address.key, None))
            reply = self.call(address.server, protocol.PULL, (address.key, target), by_value)
            asked.append((out, spec, region, reply))
        for out, spec, region, reply in asked:
            answer = reply.wait()
            if answer is not None:
                out[...] = unpack(answer, self._mappings)
            elif region is not None:
                out[...] = spec.array_in(region.memory[: spec.nbytes])
            self._give_back(region)

    def rows(self, address: Address, indices: Any) -> Array:
        """A copy of some rows, in the order of `indices`: int64, of shape [n], none out of bounds."""
        table = self._mapped(address)
        rows = None if table is None else table.rows(indices)
        if rows is None:
            body = address.key, inline(indices)
            rows = unpack(self.call(address.server, protocol.ROWS, body).wait(), self._mappings)
        self.bytes_pulled += arrays.num_elements(rows) * address.spec.itemsize
        return rows

    def change(self, changes: Sequence[Change]) -> list[Array | None]:
        """Have the servers make changes, at the same time if there are several servers; waits until they are made.

        Returns: by change, the value that came of it, where it is small; else None.
        """
        if self._already_written:
            return [None] * len(changes)
        opened, settled = self._numbers.open()
        try:
            return self._change(changes, settled)
        finally:
            self._numbers.close(opened)

    def _change(self, changes: Sequence[Change], settled: int) -> list[Array | None]:
        by_server: dict[int, list[tuple[int, Change]]] = {}
        for position, change in enumerate(changes):
            self.used[change.address.key] = change.address
            by_server.setdefault(change.address.server, []).append((position, change))
        push = self.next_push(by_server)
        asked: list[tuple[RoutedRequest, Region | None, list[int]]] = []
        for server, given in by_server.items():
            operands = [_arrays_of(change.operand) for _, change in given]
            buffers = self._shared_with(self.routes.holder_of(server))
            packed, region = pack(list(itertools.chain(*operands)), buffers)
            parts = iter(packed)
            updates = [
                Update(
                    change.address.key,
                    change.method,
                    list(itertools.islice(parts, len(operand))),
                    *self._numbers.number(change.address.key),
                )
                for (_, change), operand in zip(given, operands, strict=True)
            ]
            asks = Updates(updates, push and push._replace(part=server), settled)
            by_value = partial(self._updates_by_value, asks)
            reply = self.call(server, protocol.UPDATE, asks, by_value)
            asked.append((reply, region, [position for position, _ in given]))
            self.bytes_pushed += sum(
                arrays.num_elements(one) * arrays.itemsize(one)
                for one in itertools.chain(*operands)
            )
        values: list[Array | None] = [None] * len(changes)
        error: Exception | None = None
        for reply, region, positions in asked:
            try:
                for position, value in zip(positions, reply.wait(), strict=True):
                    values[position] = value and unpack(value, self._mappings)
            except Exception as failed:
                error = error or failed
            if reply.come:
                self._give_back(region)
        if error is not None:
            raise error
        return values

    def make_optimizer(
        self, optimizer: int, recipe: OptimizerRecipe, arrays: Sequence[tuple[Address, bool]]
    ) -> None:
        """Have the servers keep an optimizer's state for arrays, each with whether it is a part of a variable.

        Args: optimizer: its number, equal on all workers; of several that make it, one does.
        Raises: TypeError: the recipe cannot be pickled, or does not work for a part.
        """
        import cloudpickle  # here, because it makes importing mpistrat slower

        packed = cloudpickle.dumps(recipe)  # also of classes of the main script
        replies = []
        for server in self.servers:
            mine = [(one.key, shard) for one, shard in arrays if one.server == server]
            if mine:
                body = optimizer, packed, mine
                replies.append(self.call(server, protocol.MAKE_OPTIMIZER, body))
        for reply in replies:
            reply.wait()

    def optimizer_state(self, optimizer: int, address: Address) -> State:
        """What the optimizer keeps for an array: NumPy arrays and numbers, by name."""
        body = optimizer, address.key
        state: State = self.call(address.server, protocol.OPTIMIZER_STATE, body).wait()
        return state

    def load_optimizer_state(self, optimizer: int, address: Address, state: State) -> None:
        body = optimizer, address.key, state
        self.call(address.server, protocol.LOAD_OPTIMIZER_STATE, body).wait()

    def next_push(self, servers: Iterable[int]) -> Push | None:
        """What goes to these servers now."""
        to = tuple(servers)
        return Push(next(self._pushes), to) if len(to) > 1 else None

    @contextlib.contextmanager
    def within(self, work: int) -> Iterator[None]:
        """Inside, all threads' changes are those of a piece of work, and are made once, however often it is begun.

        Args: work: its number, which grows.
        """
        self._numbers.begin(work)
        try:
            yield
        finally:
            self._numbers.end()

    @contextlib.contextmanager
    def already_written(self) -> Iterator[None]:
        """Inside, no changes are made: another rank has made them."""
        self._already_written = True
        try:
            yield
        finally:
            self._already_written = False

    def forget(self, over: Sequence[int], over_before: int) -> None:
        """Tell the servers which pieces of work nobody begins again: these, and all with smaller numbers."""
        for server in self.servers:
            self.rpc.notify(server, protocol.FORGET, (list(over), over_before))

    @contextlib.contextmanager
    def consistent_snapshot(self) -> Iterator[None]:
        """Inside, nobody else changes anything: what is read then was so at one time."""
        holding: list[int] = []
        try:
            while not self._hold(holding):  # a server has died meanwhile: others go on in its place
                self._release(holding)
            yield
        finally:
            self._release(holding)

    def _hold(self, holding: list[int]) -> bool:
        """
        Args: holding: is given the servers that were asked, those that have not answered in time, too.
        Returns: False where it is to be done again. Raises: UnavailableError, StallError.
        """
        living = list(dict.fromkeys(map(self.routes.holder_of, self.servers)))
        held: dict[int, Any] = {}
        try:
            for server in living:  # in this order by everybody: no two hold some of them each
                holding.append(server)
                held[server] = self.rpc.call(server, HOLD).wait()
            missing = not_yet_everywhere(held, self.routes.holder_of)
            for reply in [self.rpc.call(one, ADMIT, missing[one]) for one in living]:
                reply.wait()
        except UnavailableError:
            if any(map(self.routes.is_lost_with, self.servers)):
                raise
            return False
        return True

    def _release(self, holding: list[int]) -> None:
        while holding:
            self.rpc.notify(holding.pop(), RELEASE)

    def publish(self, name: Any, value: Any) -> None:
        """Let all know that `name` is `value`."""
        for server in self.routes.copies_of(self.servers[0]):
            self.rpc.notify(server, protocol.PUBLISH, (name, value))

    def await_published(self, name: Any) -> Any:
        """What the rank that makes arrays publishes under this name; waits for it as long as that uses the servers."""
        return self.call(self.servers[0], protocol.PUBLISHED, name).wait(limited=False)

    def done(self) -> None:
        """This rank needs the servers no more."""
        self._is_done = True
        for server in self.servers:
            self.rpc.notify(server, protocol.DONE)

    def call(
        self,
        server: int,
        method: str,
        body: Any = None,
        by_value: Callable[[], Any] | None = None,
    ) -> RoutedRequest:
        """Ask who has what is made on `server`.

        Args: by_value: gives the body for a server that cannot map this process's memory, where `body` refers to that.
        Raises: RuntimeError after `done`.
        """
        self._check_not_done()
        return self.routes.call(server, method, body, by_value)

    def _check_not_done(self) -> None:
        if self._is_done:
            raise RuntimeError(
                "this rank has left the parameter servers (shutdown(), or the program's end): read and change "
                "variables before"
            )

    def _mapped(self, address: Address) -> MappedTable | None:
        self._check_not_done()
        server = self.routes.holder_of(address.server)
        if self.rpc.channel.has_died(server):  # its memory would still be there
            raise self.rpc.death_error(server)
        which = server, address.key
        if which not in self._tables:
            self.used[address.key] = address
            table = None
            if self.rpc.channel.shares_memory_with(server):
                _, spec, handle = self.call(address.server, protocol.FIND, address.key).wait()
                with contextlib.suppress(OSError):
                    table = MappedTable(spec, self._mappings.at(handle))
            self._tables[which] = table
        return self._tables[which]

    def _shared_with(self, server: int) -> Buffers | None:
        return self._buffers if self.rpc.channel.shares_memory_with(server) else None

    def _by_value(self, packed: SharedTensor | InlineTensor) -> InlineTensor:
        return inline(unpack(packed, self._mappings))

    def _updates_by_value(self, asks: Updates) -> Updates:
        updates = [
            update._replace(operand=[self._by_value(one) for one in update.operand])
            for update in asks.updates
        ]
        return asks._replace(updates=updates)

    def _give_back(self, region: Region | None) -> None:
        """What a server does not answer for, it may still write to: that is not used again."""
        if region is not None:
            self._buffers.give_back(region)


def _arrays_of(operand: Any) -> list[Any]:
    if isinstance(operand, IndexedSlices):
        return [operand.indices, operand.values]
    return [operand]
