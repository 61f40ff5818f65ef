"""The addresses of this node, and who is found at them."""

import socket
from pathlib import Path

from mpistrat.machine.addresses import Answering, listen, own_addresses, reached


def test_own_addresses(tmp_path: Path) -> None:
    """IPv4 first; without those of the loopback interface, and link-local ones."""
    table = tmp_path / "if_inet6"
    table.write_text(
        "fe8000000000000000fc00fffe000001 04 40 20 80     eth0\n"
        "00000000000000000000000000000001 01 80 10 80       lo\n"
        "fd000000000000000000000000000002 04 40 00 82     eth0\n"
    )
    *ipv4, last = own_addresses(str(table))
    assert last == "fd00::2"
    assert not any(address.startswith(("127.", "169.254.")) for address in ipv4)
    assert list(own_addresses(str(tmp_path / "none"))) == ipv4
    for address in ipv4:
        socket.inet_aton(address)


def test_only_who_knows_the_token_is_reached() -> None:
    """At 127.0.0.2 this node answers, too; nobody listens at the port of `silent`."""
    with Answering() as answering:
        assert reached(["127.0.0.1", "127.0.0.2"], answering.port, answering.token) == [True, True]
        assert reached(["127.0.0.1"], answering.port, b"another token ..") == [False]
        assert reached([], answering.port, answering.token) == []
    assert reached(["127.0.0.1"], answering.port, answering.token) == [False]


def test_a_port_that_the_system_picks() -> None:
    with listen("127.0.0.1") as first, listen("127.0.0.1") as second:
        assert first.getsockname()[0] == "127.0.0.1"
        assert first.getsockname()[1] != second.getsockname()[1]
