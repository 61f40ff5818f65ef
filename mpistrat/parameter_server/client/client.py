"""How a rank reads and changes the arrays on servers, and uses optimizers there."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from mpistrat import arrays
from mpistrat.arrays import Array
from mpistrat.communicators.recycled_buffers import RecycledBuffers
from mpistrat.indexed_slices import IndexedSlices
from mpistrat.parameter_server.protocol import messages
from mpistrat.parameter_server.protocol.idempotency import UpdateNumbers, session_of
from mpistrat.parameter_server.protocol.messages import (
    Address,
    GradientMethod,
    NewArray,
    Push,
    SharedTensor,
    Update,
    Updates,
    inline,
    pack,
    unpack,
)
from mpistrat.parameter_server.protocol.routes import FailoverRequest, Routes
from mpistrat.parameter_server.protocol.tables import MappedTable
from mpistrat.parameter_server.rpc.endpoint import RpcEndpoint, outcome_of, without_errors
from mpistrat.parameter_server.rpc.segments import Buffers, Mappings, SharedRegion

if TYPE_CHECKING:
    from mpistrat.parameter_server.server.server_optimizers import OptimizerDefinition, State


class Change(NamedTuple):
    """An update of one array on a server.

    Attributes:
        method: a variable's method such as "assign_add", or an optimizer's step.
        operand: an array or `IndexedSlices` that fits the array; for an optimizer's step, the gradient.
    """

    address: Address
    method: str | GradientMethod
    operand: Any


class Client:
    """Reads and changes arrays on servers. Called by: any thread.

    A client maps the arrays of servers on its node, and reads them in place. Only servers change arrays, one change
    after the other. Each rank of a job with servers has one client. `find` waits, without a time limit, for an array
    that does not exist yet, until another rank has made it or has reported that it cannot.

    Args:
        servers: the servers' ranks, in task order.
        replicated: whether each server is the backup of the previous server.
    Attributes:
        routes: knows the living server for each array.
        numbers: numbers this client's updates.
        used: addresses of the arrays that this rank has used, by key.
        bytes_pulled, bytes_pushed: bytes of arrays read from and sent to servers.
    """

    def __init__(self, rpc: RpcEndpoint, servers: Sequence[int], replicated: bool = False) -> None:
        self.rpc = rpc
        self.routes = Routes(rpc, servers, replicated)
        session = session_of(rpc.rank) if replicated else None
        self.numbers = UpdateNumbers(session)
        self.used: dict[int, Address] = {}
        self.bytes_pulled = self.bytes_pushed = 0
        self.optimizers = OptimizersOnServers(self.routes)
        self._memory = MemoryWithServers(self.routes)
        self._results = RecycledBuffers()
        self._recycling = threading.Lock()
        self._already_written = False

    def names_lost(self) -> list[str]:
        """Return the names of the arrays that this rank has used and that no living server has; [] if there are none.

        Called by: `LossPolicy.describe`, for the error about a dead server.
        """
        lost = self.routes.lost()
        return [address.name for address in list(self.used.values()) if address.server in lost]

    def create(self, address: Address, value: Array) -> None:
        """Have the server make the array with this first value, and wait until it and its backup have it.

        Called by: the rank that makes variables.
        """
        self.used[address.key] = address
        holder = self.routes.holder_of(address.server)
        buffers = self._memory.buffers_for(holder)
        (packed,), region = pack([value], buffers)
        new = NewArray(address.key, address.server, address.name, address.spec, packed)
        self.routes.call(address.server, messages.CREATE, new, holder).wait()
        self._memory.buffers.give_back(region)
        self.bytes_pushed += address.spec.nbytes

    def cannot_create(self, server: int, key: int, error: Exception) -> None:
        """Have the ranks that wait in `find` for this array raise the error, now and later."""
        copies = self.routes.copies_of(server)
        self.rpc.notify_all(copies, messages.CANNOT_CREATE, (key, error))

    def find(self, server: int, key: int) -> Address:
        """Wait, without a limit, until another rank has made the array with number `key` on `server`.

        Returns: the array's address.
        Raises: UnavailableError when the rank that makes arrays has left or died; the error that it has passed to
            `cannot_create`.
        """
        call = self.routes.call(server, messages.FIND, key)
        name, spec, _ = call.wait(limited=False)
        address = Address(server, key, name, spec)
        self.used[key] = address
        return address

    def pull(self, address: Address) -> Array:
        """Return a copy of an array, in host memory; later updates do not change it."""
        with self._recycling:
            out = self._results.empty(address.spec.shape, address.spec.native_dtype)
        self.pull_into([(address, out)])
        return out

    def pull_into(self, wanted: Sequence[tuple[Address, Array]]) -> None:
        """Read arrays from all servers at the same time, note them in `used`, and count their bytes.

        Args: wanted: pairs (address, array to overwrite, of the same shape and dtype, on any device).
        Raises: UnavailableError if no living server has an array; some arrays may be overwritten then.
        """
        calls = []
        for address, out in wanted:
            spec = address.spec
            self.used[address.key] = address
            nbytes = spec.nbytes
            self.bytes_pulled += nbytes
            table = self._memory.table(address)
            if table is not None and table.copy_to(out):
                continue
            # The server copies the array between two updates, if possible into memory of this process.
            holder = self.routes.holder_of(address.server)
            region = None
            target = None
            if table is not None and self._memory.buffers_for(holder):
                region = self._memory.buffers.take(nbytes)
                target = SharedTensor(region.part(0, nbytes).handle, spec)
            body = address.key, target
            call = self.routes.call(address.server, messages.PULL, body, holder)
            calls.append((out, spec, region, call))
        for out, spec, region, call in calls:
            answer = call.wait()
            if answer is not None:
                out[...] = unpack(answer, self._memory.mappings)
            elif region is not None:
                out[...] = spec.array_in(region.memory[: spec.nbytes])
            self._memory.buffers.give_back(region)

    def rows(self, address: Address, indices: Any) -> Array:
        """Return a copy of an array's rows, in host memory and in the order of `indices`.

        Args: indices: int64 of shape [n], each at least 0 and below the number of rows.
        """
        self.used[address.key] = address
        table = self._memory.table(address)
        rows = None if table is None else table.rows(indices)
        if rows is None:
            body = address.key, inline(indices)
            call = self.routes.call(address.server, messages.ROWS, body)
            rows = unpack(call.wait(), self._memory.mappings)
        self.bytes_pulled += arrays.num_elements(rows) * address.spec.itemsize
        return rows

    def change(self, changes: Sequence[Change]) -> list[Array | None]:
        """Have the servers make changes, several servers at the same time, and wait until they have.

        Returns: for each change, the array's value after it; None for an array above 4 KB, for an optimizer's step, and
            inside `already_written`.
        Raises: the first error of a server, after all servers have answered.
        """
        values: list[Array | None] = [None] * len(changes)
        if self._already_written or not changes:
            return values
        positions: dict[int, list[int]] = {}  # by server
        for position, change in enumerate(changes):
            address = change.address
            self.used[address.key] = address
            positions.setdefault(address.server, []).append(position)
        push = self.routes.next_push(positions)
        answers: list[Any] = []
        with self.numbers.push() as settled:
            calls = []
            for server, at in positions.items():
                of_server = [changes[position] for position in at]
                call, region = self._push(server, of_server, push, settled)
                calls.append((call, region))
            for call, region in calls:
                answers.append(outcome_of(call.wait))
                if call.come:  # otherwise the server may still write to the region
                    self._memory.buffers.give_back(region)
        answers = without_errors(answers)
        for at, answer in zip(positions.values(), answers, strict=True):
            for position, value in zip(at, answer, strict=True):
                if value is not None:
                    values[position] = unpack(value, self._memory.mappings)
        return values

    def _push(
        self, server: int, changes: Sequence[Change], push: Push | None, settled: int
    ) -> tuple[FailoverRequest, SharedRegion | None]:
        """Send the changes of one server's arrays.

        Returns: the request, and the memory region to give back once the server has replied, or None.
        """
        holder = self.routes.holder_of(server)
        operands = [_arrays_of(change.operand) for change in changes]
        buffers = self._memory.buffers_for(holder)
        tensors = [array for operand in operands for array in operand]
        packed, region = pack(tensors, buffers)
        self.bytes_pushed += sum(tensor.spec.nbytes for tensor in packed)
        updates = []
        first = 0
        for change, operand in zip(changes, operands, strict=True):
            key = change.address.key
            end = first + len(operand)
            work, number = self.numbers.number(key)
            update = Update(key, change.method, packed[first:end], work, number)
            updates.append(update)
            first = end
        if push is not None:
            push = push._replace(part=server)
        body = Updates(updates, push, settled)
        call = self.routes.call(server, messages.UPDATE, body, holder)
        return call, region

    @contextlib.contextmanager
    def already_written(self) -> Iterator[None]:
        """Inside, `change` does nothing. Returns None for each change.

        Called by: a worker that loads a checkpoint, because the restoring rank has sent its values to the servers.
        """
        self._already_written = True
        try:
            yield
        finally:
            self._already_written = False

    def publish(self, name: Any, value: Any) -> None:
        """Send `value` under a hashable `name` to all ranks that wait in `await_published`, now and later.

        Called by: the rank that makes variables.
        """
        copies = self.routes.copies_of(self.routes.servers[0])
        self.rpc.notify_all(copies, messages.PUBLISH, (name, value))

    def await_published(self, name: Any) -> Any:
        """Wait, without a limit, until the rank that makes variables has published this name, and return the value.

        Raises: UnavailableError if that rank leaves or dies before.
        """
        first = self.routes.servers[0]
        call = self.routes.call(first, messages.PUBLISHED, name)
        return call.wait(limited=False)


class OptimizersOnServers:
    """Makes optimizers on servers, and reads and changes their state. Optimizers have numbers, equal on all workers."""

    def __init__(self, routes: Routes) -> None:
        self._routes = routes

    def make(
        self,
        optimizer: int,
        definition: OptimizerDefinition,
        addresses: Sequence[tuple[Address, bool]],
    ) -> None:
        """Have the servers make an optimizer for arrays, and wait until they have.

        Several workers may ask for the same optimizer; the servers make it once.

        Args:
            optimizer: the optimizer's number.
            definition: the optimizer's class and arguments.
            addresses: the address of each array, and whether the array is one part of a split variable.
        Raises: TypeError if the definition cannot be pickled, or the optimizer cannot step a part.
        """
        import cloudpickle  # imported here, so that `import mpistrat` stays fast

        packed = cloudpickle.dumps(definition)  # also of classes of the main script
        keys: dict[int, list[tuple[int, bool]]] = {}  # by server
        for address, shard in addresses:
            of_server = keys.setdefault(address.server, [])
            of_server.append((address.key, shard))
        calls = []
        for server, of_server in keys.items():
            body = optimizer, packed, of_server
            calls.append(self._routes.call(server, messages.MAKE_OPTIMIZER, body))
        for call in calls:
            call.wait()

    def state(self, optimizer: int, address: Address) -> State:
        """Return a copy of an optimizer's state for an array: NumPy arrays and numbers by name, {} before a step."""
        body = optimizer, address.key
        call = self._routes.call(address.server, messages.OPTIMIZER_STATE, body)
        return call.wait()

    def load_state(self, optimizer: int, address: Address, state: State) -> None:
        body = optimizer, address.key, state
        call = self._routes.call(address.server, messages.LOAD_OPTIMIZER_STATE, body)
        call.wait()


class MemoryWithServers:
    """Memory that a client and the servers of its node share.

    Attributes:
        buffers: this process's memory for large operands and replies.
        mappings: the servers' memory, mapped into this process.
    """

    def __init__(self, routes: Routes) -> None:
        self._routes = routes
        self._channel = routes.rpc.channel
        self.buffers = Buffers()
        self.mappings = Mappings()
        # By server and key; None for an array that this process cannot map.
        self._tables: dict[tuple[int, int], MappedTable | None] = {}
        routes.rpc.on_lost(self._forget)

    def buffers_for(self, server: int) -> Buffers | None:
        """Return this process's buffers; None if the server cannot map them."""
        if self._channel.shares_memory_with(server):
            return self.buffers
        return None

    def table(self, address: Address) -> MappedTable | None:
        """Return a server's array mapped into this process; None if this process cannot map it.

        Raises: UnavailableError if the server has died without a living backup; RuntimeError after `Routes.leave`.
        """
        self._routes.check_use()
        server = self._routes.holder_of(address.server)
        if self._channel.has_died(server):  # a dead server's memory stays mapped
            raise self._routes.rpc.death_error(server)
        which = server, address.key
        if which not in self._tables:
            table = None
            if self._channel.shares_memory_with(server):
                found = self._routes.call(address.server, messages.FIND, address.key)
                _, spec, handle = found.wait()
                with contextlib.suppress(OSError):
                    table = MappedTable(spec, self.mappings.at(handle))
            self._tables[which] = table
        return self._tables[which]

    def _forget(self, rank: int) -> None:
        """Unmap the memory of a rank that has died, because mapped pages are not freed."""
        pid = self._channel.pid_of(rank)
        self.mappings.forget(pid)
        for which in list(self._tables):
            server, _ = which
            if server == rank:
                del self._tables[which]


def _arrays_of(operand: Any) -> list[Any]:
    if isinstance(operand, IndexedSlices):
        return [operand.indices, operand.values]
    return [operand]
