"""How a rank reads and changes the arrays that servers keep."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from mpistrat import arrays
from mpistrat.arrays import Array
from mpistrat.indexed_slices import IndexedSlices
from mpistrat.parameter_server.gate import ADMIT, HOLD, RELEASE, Push, not_yet_everywhere
from mpistrat.parameter_server.optimizer_steps import Step
from mpistrat.parameter_server.parcels import Kind, Placed, carried, pack, unpack
from mpistrat.parameter_server.post import Post, Reply
from mpistrat.parameter_server.segments import Buffers, Mappings, Region
from mpistrat.parameter_server.server import Created, Update
from mpistrat.parameter_server.tables import MappedTable
from mpistrat.recycled_buffers import RecycledBuffers

if TYPE_CHECKING:
    from mpistrat.parameter_server.server_optimizers import OptimizerRecipe, State


class Address(NamedTuple):
    """Of an array on a server; equal on all ranks.

    Attributes:
        server: the server's rank.
        key: the array's number.
    """

    server: int
    key: int
    name: str
    kind: Kind


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
        post: to the servers.
        servers: their ranks, in task order.
    Attributes:
        bytes_pulled, bytes_pushed: so far.
    """

    def __init__(self, post: Post, servers: Sequence[int]) -> None:
        self.post, self.servers = post, tuple(servers)
        self.bytes_pulled = self.bytes_pushed = 0
        self._buffers = Buffers()
        self._results = RecycledBuffers()
        self._recycling = threading.Lock()
        self._mappings = Mappings()
        self._tables: dict[int, MappedTable | None] = {}  # by key; None where nothing can be mapped
        self._used: dict[int, Address] = {}  # by key
        self._is_done = False
        self._work = _Work()
        self._pushes = itertools.count()

    def used_of(self, server: int) -> list[str]:
        """Names of the arrays there that were used from here."""
        return [one.name for one in list(self._used.values()) if one.server == server]

    def create(self, address: Address, value: Array) -> None:
        """Have the server make the array, with this value."""
        server = address.server
        self._used[address.key] = address
        packed, region = pack([value], self._shared_with(server))
        new = Created(address.key, address.name, address.kind, packed[0])
        self.ask(server, "create", new).wait()
        self._give_back(region)
        self.bytes_pushed += address.kind.nbytes

    def cannot_create(self, server: int, key: int, error: Exception) -> None:
        """Let those who look for this array raise the error, now and later."""
        self.post.tell(server, "cannot create", (key, error))

    def find(self, server: int, key: int) -> Address:
        """An array that another rank makes; waits until it has, as long as that uses the servers.

        Raises: UnavailableError when it does not any more; what it told by `cannot_create`.
        """
        name, kind, _ = self.ask(server, "find", key).wait(limited=False)
        self._used[key] = Address(server, key, name, kind)
        return self._used[key]

    def pull(self, address: Address, out: Array | None = None) -> Array:
        """The value, on the host; in `out` where one is given."""
        if out is None:
            with self._recycling:
                out = self._results.like(address.kind.empty())
        self.pull_into([(address, out)])
        return out

    def pull_into(self, wanted: Sequence[tuple[Address, Array]]) -> None:
        """Several values at the same time, each into an array of its kind, on any device."""
        asked: list[tuple[Array, Kind, Region | None, Reply]] = []
        for address, out in wanted:
            kind = address.kind
            self.bytes_pulled += kind.nbytes
            table = self._mapped(address)
            if table is not None and table.copy_to(out):
                continue
            # The server answers between two updates.
            region, place = None, None
            if table is not None:
                region = self._buffers.take(kind.nbytes)
                place = Placed(region.place._replace(nbytes=kind.nbytes), kind)
            reply = self.ask(address.server, "pull", (address.key, place))
            asked.append((out, kind, region, reply))
        for out, kind, region, reply in asked:
            answer = reply.wait()
            if region is None:
                out[...] = unpack(answer, self._mappings)
            else:
                out[...] = kind.array_in(region.memory[: kind.nbytes])
                self._give_back(region)

    def rows(self, address: Address, indices: Any) -> Array:
        """A copy of some rows, in the order of `indices`: int64, of shape [n], none out of bounds."""
        table = self._mapped(address)
        rows = None if table is None else table.rows(indices)
        if rows is None:
            body = address.key, carried(indices)
            rows = unpack(self.ask(address.server, "rows", body).wait(), self._mappings)
        self.bytes_pulled += arrays.num_elements(rows) * address.kind.itemsize
        return rows

    def change(self, changes: Sequence[Change]) -> list[Array | None]:
        """Have the servers make changes, at the same time if there are several servers; waits until they are made.

        Returns: by change, the value that came of it, where it is small; else None.
        """
        pushed = self.push(changes)
        return pushed()

    def push(self, changes: Sequence[Change]) -> Callable[[], list[Array | None]]:
        """Begin to make changes. Returns: what waits until they are made, which must be called; as `change`."""
        by_server: dict[int, list[tuple[int, Change]]] = {}
        for position, change in enumerate(changes):
            self._used[change.address.key] = change.address
            by_server.setdefault(change.address.server, []).append((position, change))
        push = self.next_push(by_server)
        asked: list[tuple[Reply, Region | None, list[int]]] = []
        for server, given in by_server.items():
            operands = [_arrays_of(change.operand) for _, change in given]
            packed, region = pack(list(itertools.chain(*operands)), self._shared_with(server))
            parts = iter(packed)
            updates = [
                Update(
                    change.address.key,
                    change.method,
                    list(itertools.islice(parts, len(operand))),
                    *self._work.number(change.address.key),
                )
                for (_, change), operand in zip(given, operands, strict=True)
            ]
            reply = self.ask(server, "update", (updates, push))
            asked.append((reply, region, [position for position, _ in given]))
            self.bytes_pushed += sum(
                arrays.num_elements(one) * arrays.itemsize(one)
                for one in itertools.chain(*operands)
            )

        def wait() -> list[Array | None]:
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

        return wait

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
                replies.append(self.ask(server, "make optimizer", body))
        for reply in replies:
            reply.wait()

    def optimizer_state(self, optimizer: int, address: Address) -> State:
        """What the optimizer keeps for an array: NumPy arrays and numbers, by name."""
        state: State = self.ask(address.server, "optimizer state", (optimizer, address.key)).wait()
        return state

    def load_optimizer_state(self, optimizer: int, address: Address, state: State) -> None:
        body = optimizer, address.key, state
        self.ask(address.server, "load optimizer state", body).wait()

    def next_push(self, servers: Iterable[int]) -> Push | None:
        """What goes to these servers now."""
        to = tuple(servers)
        return Push(next(self._pushes), to) if len(to) > 1 else None

    @contextlib.contextmanager
    def within(self, work: int) -> Iterator[None]:
        """Inside, all threads' changes are those of a piece of work, and are made once, however often it is begun.

        Args: work: its number, which grows.
        """
        self._work.begin(work)
        try:
            yield
        finally:
            self._work.end()

    def forget(self, over: Sequence[int], over_before: int) -> None:
        """Tell the servers which pieces of work nobody begins again: these, and all with smaller numbers."""
        for server in self.servers:
            self.post.tell(server, "forget", (list(over), over_before))

    def updates(self, addresses: Sequence[Address]) -> list[int]:
        """How many updates each array has had."""
        asked = [self.ask(one.server, "count", [one.key]) for one in addresses]
        return [reply.wait()[0] for reply in asked]

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Inside, nobody else changes anything: what is read then was so at one time."""
        held: dict[int, Any] = {}
        asked: list[int] = []
        try:
            for server in self.servers:  # in this order by everybody: no two hold some of them each
                asked.append(server)
                held[server] = self.ask(server, HOLD).wait()
            missing = not_yet_everywhere(held)
            for reply in [self.ask(one, ADMIT, missing[one]) for one in self.servers]:
                reply.wait()
            yield
        finally:
            for server in asked:  # also one that has not answered in time
                self.post.tell(server, RELEASE)

    def publish(self, name: Any, value: Any) -> None:
        """Let all know that `name` is `value`."""
        self.post.tell(self.servers[0], "publish", (name, value))

    def await_published(self, name: Any) -> Any:
        """What the rank that makes arrays publishes under this name; waits for it as long as that uses the servers."""
        return self.ask(self.servers[0], "published", name).wait(limited=False)

    def done(self) -> None:
        """This rank needs the servers no more."""
        self._is_done = True
        for server in self.servers:
            self.post.tell(server, "done")

    def ask(self, server: int, kind: str, body: Any = None) -> Reply:
        """A request. Raises: RuntimeError after `done`."""
        self._check_not_done()
        return self.post.ask(server, kind, body)

    def _check_not_done(self) -> None:
        if self._is_done:
            raise RuntimeError(
                "this rank has left the parameter servers (shutdown(), or the program's end): read and change "
                "variables before"
            )

    def _mapped(self, address: Address) -> MappedTable | None:
        self._check_not_done()
        if self.post.mail.has_died(address.server):  # its memory would still be there
            raise self.post.gone(address.server)
        if address.key not in self._tables:
            self._used[address.key] = address
            table = None
            if self.post.mail.shares_memory_with(address.server):
                _, kind, place = self.ask(address.server, "find", address.key).wait()
                with contextlib.suppress(OSError):
                    table = MappedTable(kind, self._mappings.at(place))
            self._tables[address.key] = table
        return self._tables[address.key]

    def _shared_with(self, server: int) -> Buffers | None:
        return self._buffers if self.post.mail.shares_memory_with(server) else None

    def _give_back(self, region: Region | None) -> None:
        """What a server does not answer for, it may still write to: that is not used again."""
        if region is not None:
            self._buffers.give_back(region)


class _Work:
    """The piece of work of this process, and how many changes of each array it has made."""

    def __init__(self) -> None:
        self._lock = (
            threading.Lock()
        )  # backward passes on GPUs, and programs, have threads of their own
        self._work: int | None = None
        self._made: Counter[int] = Counter()

    def begin(self, work: int) -> None:
        with self._lock:
            self._work = work
            self._made.clear()

    def end(self) -> None:
        self._work = None

    def number(self, key: int) -> tuple[int | None, int]:
        with self._lock:
            if self._work is None:
                return None, 0
            self._made[key] += 1
            return self._work, self._made[key] - 1


def _arrays_of(operand: Any) -> list[Any]:
    if isinstance(operand, IndexedSlices):
        return [operand.indices, operand.values]
    return [operand]
