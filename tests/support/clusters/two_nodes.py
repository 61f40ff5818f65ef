"""Two nodes on one machine: network namespaces, joined by a wire.

Both MPIs start their daemons there through what they take for ssh. What crosses the wire can be read from its counters,
and it can be made slow.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from support.harness.mpi_launcher import Job, Launcher, run_job

WIRE = "wire"  # the interface on each node
SECONDS_TO_COME_UP = 5.0

_AS_SSH = """#!/bin/sh
# ssh [options] host command...
while :; do
    case "$1" in
        -*) shift ;;
        *) break ;;
    esac
done
host=$1
shift
case "$host" in
    node*) exec ip netns exec {name}-${{host##*node}} unshare --uts sh -c "hostname $host; $*" ;;
    *) exec ip netns exec {name}-${{host##*.}} sh -c "$*" ;;
esac
"""


def why_not() -> str:
    """What this machine lacks; empty when it can make nodes."""
    if os.geteuid() != 0:
        return "needs root, to make network namespaces"
    if missing := [tool for tool in ("ip", "tc", "unshare") if shutil.which(tool) is None]:
        return f"needs {' and '.join(missing)} (iproute2, util-linux)"
    probe = f"probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    if made.returncode:
        return f"needs network namespaces: {made.stderr.strip()}"
    run("ip", "netns", "del", probe)
    return ""


class Nodes:
    def __init__(self, folder: Path, name: str, number: int = 2) -> None:
        self._folder = folder
        self._numbers = range(1, number + 1)
        self.agent = folder / "as-ssh"
        self.agent.write_text(_AS_SSH.format(name=name))
        self.agent.chmod(0o755)

    def run_python(
        self,
        launcher: Launcher,
        ranks_per_node: int,
        *arguments: str | Path,
        seconds: float = 60.0,
        env: Mapping[str, str] = {},
    ) -> Job:
        """As `Launcher.run_python`; ranks are dealt out node by node."""
        program = [str(word) for word in (sys.executable, *arguments)]
        ranks = len(self._numbers) * ranks_per_node
        if launcher.name == "MPICH":  # waits for ever for names of nodes that nobody can look up
            first = address(1)
            hosts = self._folder / "hosts"
            lines = [f"{address(number)}:{ranks_per_node}\n" for number in self._numbers]
            hosts.write_text("".join(lines))
            options = ["-launcher", "ssh", "-launcher-exec", str(self.agent), "-f", str(hosts)]
            # Else UCX finds shared memory between namespaces.
            settings = {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": f"{WIRE},lo"}
        else:
            first = "node1"
            named = ",".join(f"node{n}:{ranks_per_node}" for n in self._numbers)
            options = ["--host", named]
            options += ["--map-by", f"ppr:{ranks_per_node}:node"]
            options += ["--prtemca", "plm_ssh_agent", str(self.agent)]
            options += ["--prtemca", "prte_if_include", WIRE]
            options += ["--mca", "pml", "ob1", "--mca", "btl", "tcp,sm,self"]
            options += ["--mca", "btl_tcp_if_include", WIRE]
            settings = {}
        mpiexec, *rest = launcher.command(ranks, program)
        command = [str(self.agent), first, "exec", mpiexec, *options, *rest]
        environment = launcher.environment({**settings, **env})
        return run_job(command, environment, seconds)


@contextmanager
def two_nodes(folder: Path, rate: str | None = None) -> Iterator[Nodes]:
    """For the length of the block. `rate`: of the wire, as tc has it ("1gbit"); None does not slow it down."""
    name = f"mpistrat-{os.getpid()}"
    ends = [f"{name}-{node}" for node in (1, 2)]
    try:
        for end in ends:
            run("ip", "netns", "add", end)
        run(
            "ip",
            "link",
            "add",
            "name",
            WIRE,
            "netns",
            ends[0],
            "type",
            "veth",
            "peer",
            "name",
            WIRE,
            "netns",
            ends[1],
        )
        for node, end in enumerate(ends, 1):
            run("ip", "-n", end, "addr", "add", f"{address(node)}/24", "dev", WIRE)
            for device in (WIRE, "lo"):
                run("ip", "-n", end, "link", "set", device, "up")
            if rate is not None:
                shape = ("tbf", "rate", rate, "burst", "256kb", "latency", "50ms")
                run("tc", "-n", end, "qdisc", "add", "dev", WIRE, "root", *shape)
        wait_until_up(ends)
        yield Nodes(folder, name)
    finally:
        for end in ends:
            subprocess.run(["ip", "netns", "del", end], capture_output=True)


def wait_until_up(ends: Sequence[str]) -> None:
    deadline = time.monotonic() + SECONDS_TO_COME_UP
    for end in ends:
        while time.monotonic() < deadline and "state UP" not in run(
            "ip", "-n", end, "link", "show", "dev", WIRE
        ):
            time.sleep(0.01)


def address(node: int) -> str:
    return f"10.77.0.{node}"


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
