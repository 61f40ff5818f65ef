"""The addresses of this node, and a check whether other nodes reach them."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import secrets
import socket
import struct
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

SECONDS_TO_ANSWER = 4.0  # TCP repeats a lost first packet after 1 and 3 s

_SIOCGIFADDR = 0x8915  # <linux/sockios.h>
_IFREQ = struct.Struct("16s4x4s16x")  # name; family and port (skipped); four bytes of the address


def own_addresses(if_inet6: str = "/proc/net/if_inet6") -> tuple[str, ...]:
    """Return the addresses of this node's interfaces, IPv4 first: ("10.0.0.5", "192.168.1.5", "fd00::5").

    Loopback and link-local addresses are left out, because other nodes cannot reach them. So the tuple may be empty.
    """
    found: Iterable[ipaddress.IPv4Address | ipaddress.IPv6Address]
    found = dict.fromkeys((*_ipv4(), *_ipv6(if_inet6)))
    return tuple(str(a) for a in found if not (a.is_loopback or a.is_link_local))


def _ipv4() -> Iterator[ipaddress.IPv4Address]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # the interface has no IPv4 address
                answer = fcntl.ioctl(asked, _SIOCGIFADDR, _IFREQ.pack(name.encode(), b""))
                yield ipaddress.IPv4Address(_IFREQ.unpack(answer)[1])


def _ipv6(if_inet6: str) -> Iterator[ipaddress.IPv6Address]:
    # The file is missing on a node without IPv6.
    with contextlib.suppress(OSError), open(if_inet6, encoding="ascii") as lines:
        for line in lines:  # "fd000000000000000000000000000002 04 40 00 82     eth0"
            yield ipaddress.IPv6Address(bytes.fromhex(line.split()[0]))


def listen(address: str) -> socket.socket:
    """Return a TCP socket that listens at `address`, IPv4 or IPv6, on a port that the system picks.

    Raises: OSError if the address is not this node's.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family)


class Answering:
    """A context. Inside, a thread sends `token`, 16 random bytes, to everybody who connects to `port` of this node.
    It answers at all addresses of this node. By the token another node knows that it has reached this node and no
    other, because an address such as 172.17.0.1 may exist on every node.

    Rank 0 enters it in `communicators.torch_store`, while other ranks call `reached`.
    """

    def __enter__(self) -> Answering:
        self.token = secrets.token_bytes(16)
        both = socket.has_dualstack_ipv6()  # one socket for IPv4 and IPv6
        family = socket.AF_INET6 if both else socket.AF_INET
        self._socket = socket.create_server(("", 0), family=family, dualstack_ipv6=both)
        self.port: int = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._answer, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)  # ends accept
        self._thread.join()
        self._socket.close()

    def _answer(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._socket.accept()
                with connection, contextlib.suppress(OSError):
                    connection.sendall(self.token)


def reached(addresses: Sequence[str], port: int, token: bytes) -> list[bool]:
    """Return for each address whether the node behind it answers with `token` on `port`. Raises no error.

    All addresses are tried at the same time, for 4 s each. An empty list for no addresses.
    Args: token: the `Answering.token` of the node to reach.
    """

    def answers(address: str) -> bool:
        with (
            contextlib.suppress(OSError),
            socket.create_connection((address, port), SECONDS_TO_ANSWER) as connection,
        ):
            return connection.recv(len(token), socket.MSG_WAITALL) == token
        return False

    with ThreadPoolExecutor(max(1, len(addresses))) as threads:
        return list(threads.map(answers, addresses))
