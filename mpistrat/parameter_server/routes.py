"""Which server has what: the one that has made it, or the one that keeps its second copy, when the first has died."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mpistrat.errors import UnavailableError
from mpistrat.parameter_server.rpc.endpoint import PendingReply, RpcEndpoint


def backups_of(servers: Sequence[int]) -> dict[int, int]:
    """By server, the one that keeps the second copies of what it makes: the next one, in a ring."""
    return dict(zip(servers, (*servers[1:], servers[0]), strict=True))


class Routes:
    """
    Args:
        servers: ranks, in task order.
        replicated: whether there are second copies.
    """

    def __init__(self, rpc: RpcEndpoint, servers: Sequence[int], replicated: bool = False) -> None:
        self._rpc = rpc
        self._backups = backups_of(servers) if replicated else {}
        self._servers = tuple(servers)

    def copies_of(self, server: int) -> tuple[int, ...]:
        """The servers that have what is made on `server`, itself first."""
        return (server, self._backups[server]) if server in self._backups else (server,)

    def holder_of(self, server: int) -> int:
        """The one that lives, and is asked for what is made on `server`; that itself, if none does."""
        if server not in self._backups:
            return server
        living = (one for one in self.copies_of(server) if not self._rpc.channel.has_died(one))
        return next(living, server)

    def primary_of(self, rank: int) -> int | None:
        """The server whose second copies are on this one."""
        return next((one for one, backup in self._backups.items() if backup == rank), None)

    def is_lost_with(self, rank: int) -> bool:
        """Whether this rank had the last copy of what some server has made."""
        copies = (one for one in map(self.copies_of, self._servers) if rank in one)
        return any(all(map(self._rpc.channel.has_died, one)) for one in copies)

    def call(
        self, server: int, method: str, body: Any, by_value: Callable[[], Any] | None = None
    ) -> RoutedRequest:
        """As `Client.ask`."""
        return RoutedRequest(self._rpc, self, server, method, body, by_value)


class RoutedRequest:
    """A request that goes to the server's backup when the server has died. What is asked of servers can be repeated.

    Args: those of `Client.ask`.
    """

    def __init__(
        self,
        rpc: RpcEndpoint,
        routes: Routes,
        server: int,
        method: str,
        body: Any,
        by_value: Callable[[], Any] | None,
    ) -> None:
        self._rpc, self._routes = rpc, routes
        self._server, self._method, self._body, self._by_value = server, method, body, by_value
        self._reply = self._ask(routes.holder_of(server))

    def _ask(self, to: int) -> PendingReply:
        body = self._body
        if self._by_value is not None and not self._rpc.channel.shares_memory_with(to):
            body = self._by_value()
        return self._rpc.call(to, self._method, body)

    @property
    def come(self) -> bool:
        return self._reply.come

    def wait(self, *, limited: bool = True) -> Any:
        """As that of `PendingReply`."""
        while True:
            try:
                return self._reply.wait(limited=limited)
            except UnavailableError:
                asked, holder = self._reply.to, self._routes.holder_of(self._server)
                if asked not in self._rpc.channel.lost:
                    raise
                if (
                    holder == asked
                ):  # since that error was made, the other copy's server may have died, too
                    raise self._rpc.death_error(asked) from None
                self._reply = self._ask(holder)
