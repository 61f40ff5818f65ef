"""Sockets between the ranks of a simulated group: whoever waits in them is let go by `close()`, as gloo's are not."""

from __future__ import annotations

import contextlib
import socket

from torch._C import _distributed_c10d as c10d


class Links:
    """A socket for every two ranks. Blocks until all ranks have come.

    Args: store: of this group alone.
    Raises: ConnectionError from every call, when another rank is gone or `close()` was called.
    """

    def __init__(self, store: c10d.Store, rank: int, size: int) -> None:
        self._rank = rank
        self._sockets: dict[int, socket.socket] = {}
        address = _own_address(store)
        with socket.create_server((address, 0)) as server:
            store.set(f"address/{rank}", f"{address} {server.getsockname()[1]}")
            for other in range(rank):
                host, port = store.get(f"address/{other}").decode().split()
                link = socket.create_connection((host, int(port)))
                link.sendall(rank.to_bytes(8, "big"))
                self._sockets[other] = link
            while len(self._sockets) < size - 1:
                link, _ = server.accept()
                self._sockets[int.from_bytes(_exactly(link, 8), "big")] = link
        for link in self._sockets.values():
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def exchange(self, mine: bytes) -> list[bytes]:
        """What every rank has given, in the order of ranks. Rank 0 collects, and sends it to all."""
        if self._rank:
            self.send(mine, 0)
            return [self.receive(0) for _ in range(len(self._sockets) + 1)]
        others = [self.receive(other) for other in sorted(self._sockets)]
        everyone = [mine, *others]
        for other in self._sockets:
            for data in everyone:
                self.send(data, other)
        return everyone

    def send(self, data: bytes, to: int) -> None:
        size = len(data).to_bytes(8, "big")
        self._sockets[to].sendall(size + data)

    def receive(self, source: int) -> bytes:
        link = self._sockets[source]
        return _exactly(link, int.from_bytes(_exactly(link, 8), "big"))

    def close(self) -> None:
        for link in self._sockets.values():
            with contextlib.suppress(OSError):  # the other rank was first
                link.shutdown(socket.SHUT_RDWR)
            link.close()


def _exactly(link: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        received = link.recv_into(view)
        if not received:
            raise ConnectionError("another rank of the simulated group is gone")
        view = view[received:]
    return bytes(data)


def _own_address(store: c10d.Store) -> str:
    """By which the host of `store` is reached."""
    while isinstance(store, c10d.PrefixStore):
        store = store.underlying_store
    host = getattr(store, "host", None) or "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return str(probe.getsockname()[0])
