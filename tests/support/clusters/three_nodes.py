"""Three nodes on one machine, at a switch; between the first two there is a slow cable that their bytes go by."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.clusters.two_nodes import WIRE, Nodes, address, run, wait_until_up

CABLE = "cable"
NUMBERS = (1, 2, 3)


@contextmanager
def three_nodes(folder: Path, rate: str) -> Iterator[Nodes]:
    """For the length of the block. `rate`: of the cable between nodes 1 and 2, as tc has it ("100mbit")."""
    name = f"mpistrat-{os.getpid()}"
    ends = [f"{name}-{number}" for number in NUMBERS]
    switch = f"{name}-switch"
    try:
        for space in (*ends, switch):
            run("ip", "netns", "add", space)
        run("ip", "-n", switch, "link", "add", "switch", "type", "bridge")
        run("ip", "-n", switch, "link", "set", "switch", "up")
        for number, end in zip(NUMBERS, ends, strict=True):
            port = f"port{number}"
            _join(end, WIRE, switch, port)
            run("ip", "-n", switch, "link", "set", port, "master", "switch", "up")
            run("ip", "-n", end, "addr", "add", f"{address(number)}/24", "dev", WIRE)
            for device in (WIRE, "lo"):
                run("ip", "-n", end, "link", "set", device, "up")
        _join(ends[0], CABLE, ends[1], CABLE)
        for number, other in ((1, 2), (2, 1)):
            end = ends[number - 1]
            run("ip", "-n", end, "link", "set", CABLE, "up")
            to = (f"{address(other)}/32", "dev", CABLE, "src", address(number))
            run("ip", "-n", end, "route", "add", *to)
            shape = ("tbf", "rate", rate, "burst", "64kb", "latency", "50ms")
            run("tc", "-n", end, "qdisc", "add", "dev", CABLE, "root", *shape)
        wait_until_up(ends)
        yield Nodes(folder, name, len(NUMBERS))
    finally:
        for space in (*ends, switch):
            subprocess.run(["ip", "netns", "del", space], capture_output=True)


def _join(end: str, device: str, other: str, others: str) -> None:
    peer = ("type", "veth", "peer", "name", others, "netns", other)
    run("ip", "link", "add", "name", device, "netns", end, *peer)
