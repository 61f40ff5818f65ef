"""How a rank reads and changes the arrays on servers."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

from mpistrat import arrays
from mpistrat.arrays import Array
from mpistrat.communicators.recycled_buffers import RecycledBuffers
from mpistrat.indexed_slices import IndexedSlices
from mpistrat.parameter_server.client.optimizers_on_servers import OptimizersOnServers
from mpistrat.parameter_server.protocol import messages
from mpistrat.parameter_server.protocol.idempotency import UpdateNumbers, session_of
from mpistrat.parameter_server.protocol.messages import Address, GradientMethod, Push
from mpistrat.parameter_server.protocol.routes import FailoverRequest, Routes
from mpistrat.parameter_server.protocol.tables import MappedTable
from mpistrat.parameter_server.rpc.endpoint import RpcEndpoint, outcome_of, without_errors
from mpistrat.parameter_server.rpc.segments import Buffers, Mappings, SharedRegion


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
        self.numbers = UpdateNumbers(session_of(rpc.rank) if replicated else None)
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
        (packed,), region = messages.pack([value], buffers)
        new = messages.NewArray(address.key, address.server, address.name, address.spec, packed)
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
        name, spec, _ = self.routes.call(server, messages.FIND, key).wait(limited=False)
        self.used[key] = Address(server, key, name, spec)
        return self.used[key]

    def pull(self, address: Address) -> Array:
        """Return a copy of an array, in host memory; later updates do not change it."""
        with self._recycling:
            out = self._results.empty(address.spec.shape, address.spec.native_dtype)
        self.pull_into([(address, out)])
        return out

    def pull_into(self, wanted: Sequence[tuple[Address, Array]]) -> None:
        """Read arrays from all servers at the same time.

        Args: wanted: pairs (address, array to overwrite, of the same shape and dtype, on any device).
        Raises: UnavailableError if no living server has an array.
        """
        calls: list[tuple[Array, messages.TensorSpec, SharedRegion | None, FailoverRequest]] = []
        for address, out in wanted:
            spec = address.spec
            self.used[address.key] = address
            self.bytes_pulled += spec.nbytes
            table = self._memory.table(address)
            if table is not None and table.copy_to(out):
                continue
            # The server copies the array between two updates, if possible into memory of this process.
            holder = self.routes.holder_of(address.server)
            region = None
            target = None
            if table is not None and self._memory.buffers_for(holder):
                region = self._memory.buffers.take(spec.nbytes)
                target = messages.SharedTensor(region.part(0, spec.nbytes).handle, spec)
            call = self.routes.call(address.server, messages.PULL, (address.key, target), holder)
            calls.append((out, spec, region, call))
        for out, spec, region, call in calls:
            answer = call.wait()
            if answer is not None:
                out[...] = messages.unpack(answer, self._memory.mappings)
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
            body = address.key, messages.inline(indices)
            call = self.routes.call(address.server, messages.ROWS, body)
            rows = messages.unpack(call.wait(), self._memory.mappings)
        self.bytes_pulled += arrays.num_elements(rows) * address.spec.itemsize
        return rows

    def change(self, changes: Sequence[Change]) -> list[Array | None]:
        """Have the servers make changes, several servers at the same time, and wait until they have.

        Returns: for each change, the array's value after it; None for an array above 4 KB, for an optimizer's step, and
            inside `already_written`.
        Raises: the first error of a server, after all servers have answered.
        """
        if self._already_written or not changes:
            return [None] * len(changes)
        positions: dict[int, list[int]] = {}  # by server
        for position, change in enumerate(changes):
            self.used[change.address.key] = change.address
            positions.setdefault(change.address.server, []).append(position)
        push = self.routes.next_push(positions)
        answers: list[Any] = []
        with self.numbers.push() as settled:
            calls = [
                self._push(server, [changes[position] for position in at], push, settled)
                for server, at in positions.items()
            ]
            for call, region in calls:
                answers.append(outcome_of(call.wait))
                if call.come:  # otherwise the server may still write to the region
                    self._memory.buffers.give_back(region)
        values: list[Array | None] = [None] * len(changes)
        for at, answer in zip(positions.values(), without_errors(answers), strict=True):
            for position, value in zip(at, answer, strict=True):
                values[position] = value and messages.unpack(value, self._memory.mappings)
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
        packed, region = messages.pack([*chain(*operands)], buffers)
        self.bytes_pushed += sum(tensor.spec.nbytes for tensor in packed)
        parts = iter(packed)
        updates = [
            messages.Update(
                change.address.key,
                change.method,
                list(islice(parts, len(operand))),
                *self.numbers.number(change.address.key),
            )
            for change, operand in zip(changes, operands, strict=True)
        ]
        body = messages.Updates(updates, push and push._replace(part=server), settled)
        return self.routes.call(server, messages.UPDATE, body, holder), region

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
        return self.routes.call(self.routes.servers[0], messages.PUBLISHED, name).wait(
            limited=False
        )


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
        return self.buffers if self._channel.shares_memory_with(server) else None

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
        self.mappings.forget(self._channel.pid_of(rank))
        for which in [which for which in list(self._tables) if which[0] == rank]:
            del self._tables[which]


def _arrays_of(operand: Any) -> list[Any]:
    if isinstance(operand, IndexedSlices):
        return [operand.indices, operand.values]
    return [operand]
