"""How a client reaches the servers: when a server has died, its backup gets the requests."""

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
    """Sends requests about an array to the server that made it, or to that server's backup after its death.

    Args:
        servers: the servers' ranks, in task order.
        replicated: whether each server's backup is the next server, in a ring.
    Attributes:
        backups: each server's backup, by the server's rank; {} if the servers have no backups.
        primaries: each backup's server, by the backup's rank.
    """

    def __init__(self, rpc: RpcEndpoint, servers: Sequence[int], replicated: bool = False) -> None:
        self.rpc = rpc
        self.servers = tuple(servers)
        following = (*servers[1:], *servers[:1])
        self.backups = dict(zip(servers, following, strict=True)) if replicated else {}
        self.primaries = {backup: server for server, backup in self.backups.items()}
        self._pushes = itertools.count()
        self._has_left = False

    def copies_of(self, server: int) -> tuple[int, ...]:
        """Return the ranks that keep the arrays made on `server`, dead or alive: `server`, and its backup if any."""
        if server not in self.backups:
            return (server,)
        return server, self.backups[server]

    def holder_of(self, server: int) -> int:
        """Return the rank of the living server that has the arrays made on `server`; `server` itself if none lives."""
        if server not in self.backups:
            return server
        has_died = self.rpc.channel.has_died
        for copy in self.copies_of(server):
            if not has_died(copy):
                return copy
        return server

    def is_lost_with(self, rank: int) -> bool:
        """Whether the dead `rank` had the last copy of arrays: its own, or copies as another server's backup.

        False for a rank that is no server.
        """
        lost = self.lost()
        return rank in lost or self.primaries.get(rank) in lost

    def lost(self) -> set[int]:
        """Return the ranks of the servers that have died with all copies of their arrays; an empty set if none has."""
        died = self.rpc.channel.has_died
        return {server for server in self.servers if died(self.holder_of(server))}

    def call(
        self, server: int, method: str, body: Any = None, to: int | None = None
    ) -> FailoverRequest:
        """Send a request about arrays made on `server` to the living server that has them. Does not wait.

        Args: to: the server that the body's tensors were packed for; None if the body has no tensors.
        Returns: the request; its `wait` returns the reply.
        Raises: RuntimeError after `leave`.
        """
        self.check_use()
        holder = self.holder_of(server) if to is None else to
        return FailoverRequest(self, server, method, body, holder)

    def next_push(self, servers: Iterable[int]) -> Push | None:
        """Return a new `Push`, the mark of one change's messages to several servers; None for a single server."""
        to = tuple(servers)
        return Push(next(self._pushes), to) if len(to) > 1 else None

    def forget(self, over: Sequence[int], over_before: int) -> None:
        """Tell all servers that no worker repeats the closures with ids in `over`, or below `over_before`."""
        self.rpc.notify_all(self.servers, messages.FORGET, (list(over), over_before))

    def leave(self) -> None:
        """Tell all servers that this rank has left; later calls raise RuntimeError."""
        self._has_left = True
        self.rpc.notify_all(self.servers, messages.DONE)

    def check_use(self) -> None:
        """Check that this rank may use the servers. Raises: RuntimeError if this rank has called `leave`."""
        if self._has_left:
            raise RuntimeError(
                "this rank has left the parameter servers (shutdown(), or the program's end): read and change "
                "variables before"
            )


class FailoverRequest:
    """A request that goes to the backup when the server has died.

    Every request may arrive twice, because a server makes an array, an optimizer or a numbered update only once.
    """

    def __init__(self, routes: Routes, server: int, method: str, body: Any, to: int) -> None:
        self._routes = routes
        self._server = server
        self._method = method
        self._body = body
        self._reply: PendingReply = routes.rpc.call(to, method, body)

    @property
    def come(self) -> bool:
        return self._reply.come

    def wait(self, *, limited: bool = True) -> Any:
        """Wait for the reply, and return its value. If the server dies, send the request to its backup, and wait.

        Args: limited: False waits without a limit, and only warns after MPISTRAT_STALL_SECONDS.
        Raises: the server's error; UnavailableError if neither server nor backup lives; with `limited`, StallError
            after MPISTRAT_STALL_SECONDS.
        """
        rpc = self._routes.rpc
        while True:
            try:
                return self._reply.wait(limited=limited)
            except UnavailableError:
                asked = self._reply.to
                holder = self._routes.holder_of(self._server)
                if asked not in rpc.channel.lost:
                    raise
                if holder == asked:  # the backup may have died, too, since the error was made
                    raise rpc.death_error(asked) from None
                body = self._body
                if not rpc.channel.shares_memory_with(holder):
                    body = inlined(body, Mappings())
                self._reply = rpc.call(holder, self._method, body)
