"""How a client reaches the servers: a server's backup gets its requests when the server has died."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from mpistrat.errors import UnavailableError
from mpistrat.parameter_server.protocol import messages
from mpistrat.parameter_server.protocol.messages import Push, inlined
from mpistrat.parameter_server.rpc.endpoint import PendingReply, RpcEndpoint
from mpistrat.parameter_server.rpc.segments import Mappings


class Routes:
    """
    Args:
        servers: ranks, in task order.
        replicated: whether the servers have backups.
    Attributes:
        backups: by server, each the next server, in a ring; empty where they have none.
        primaries: by backup, the server that has it.
    """

    def __init__(self, rpc: RpcEndpoint, servers: Sequence[int], replicated: bool = False) -> None:
        self.rpc, self.servers = rpc, tuple(servers)
        following = (*servers[1:], *servers[:1])
        self.backups = dict(zip(servers, following, strict=True)) if replicated else {}
        self.primaries = dict(zip(self.backups.values(), self.backups, strict=True))
        self._pushes = itertools.count()
        self._has_left = False

    def copies_of(self, server: int) -> tuple[int, ...]:
        """The servers that have the arrays made on `server`, itself first."""
        return (server, self.backups[server]) if server in self.backups else (server,)

    def holder_of(self, server: int) -> int:
        """The living server that gets the requests about arrays made on `server`; that itself, if none lives."""
        if server not in self.backups:
            return server
        living = itertools.filterfalse(self.rpc.channel.has_died, self.copies_of(server))
        return next(living, server)

    def is_lost_with(self, rank: int) -> bool:
        """Whether this rank had the last copy of some server's arrays."""
        return not self.lost().isdisjoint((rank, self.primaries.get(rank)))

    def lost(self) -> set[int]:
        """The servers that have died with all copies of their arrays."""
        died = self.rpc.channel.has_died
        return {server for server in self.servers if died(self.holder_of(server))}

    def call(
        self, server: int, method: str, body: Any = None, to: int | None = None
    ) -> FailoverRequest:
        """Send a request about arrays made on `server`.

        Args: to: the holder of these arrays for which the body's tensors were packed; None where there are none.
        Raises: RuntimeError after `leave`.
        """
        self.check_use()
        holder = self.holder_of(server) if to is None else to
        return FailoverRequest(self, server, method, body, holder)

    def next_push(self, servers: Iterable[int]) -> Push | None:
        """For the messages that go to these servers now; None where there is but one."""
        to = tuple(servers)
        return Push(next(self._pushes), to) if len(to) > 1 else None

    def forget(self, over: Sequence[int], over_before: int) -> None:
        """Nobody repeats the pieces of work `over` any more, nor any with a number below `over_before`."""
        self.rpc.notify_all(self.servers, messages.FORGET, (list(over), over_before))

    def leave(self) -> None:
        """This rank does not use the servers any more."""
        self._has_left = True
        self.rpc.notify_all(self.servers, messages.DONE)

    def check_use(self) -> None:
        """Raises: RuntimeError after `leave`."""
        if self._has_left:
            raise RuntimeError(
                "this rank has left the parameter servers (shutdown(), or the program's end): read and change "
                "variables before"
            )


class FailoverRequest:
    """A request that goes to the backup when the server has died. All requests to servers can be repeated."""

    def __init__(self, routes: Routes, server: int, method: str, body: Any, to: int) -> None:
        self._routes, self._server = routes, server
        self._method, self._body = method, body
        self._reply: PendingReply = routes.rpc.call(to, method, body)

    @property
    def come(self) -> bool:
        return self._reply.come

    def wait(self, *, limited: bool = True) -> Any:
        """As `PendingReply.wait`."""
        rpc = self._routes.rpc
        while True:
            try:
                return self._reply.wait(limited=limited)
            except UnavailableError:
                asked, holder = self._reply.to, self._routes.holder_of(self._server)
                if asked not in rpc.channel.lost:
                    raise
                if holder == asked:  # the backup may have died, too, since that error was made
                    raise rpc.death_error(asked) from None
                body = self._body
                if not rpc.channel.shares_memory_with(holder):
                    body = inlined(body, Mappings())
                self._reply = rpc.call(holder, self._method, body)
