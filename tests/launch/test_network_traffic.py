"""How many bytes of a collective cross the wire between two nodes, by its counters."""

import re
from pathlib import Path

import pytest

from support.clusters import two_nodes
from support.harness.mpi_launcher import MPI_NAMES, Launcher

pytestmark = [pytest.mark.both_mpis("progress"), pytest.mark.alone("times")]

PROGRAM = """
import sys
import numpy as np
from mpi4py import MPI
from mpistrat.communicators import Reduction
from mpistrat.communicators.construction import communicator_for
from mpistrat.pytorch.gradients.wires import Wire
from mpistrat.wire_formats import ShortFloats

world = MPI.COMM_WORLD
communicator = communicator_for(world)
node = world.Split_type(MPI.COMM_TYPE_SHARED)
assert node.size == 2, node.size

def sent():
    with open("/proc/net/dev") as devices:
        return int(next(line for line in devices if "wire:" in line).split()[9])

communicator.all_reduce(np.zeros(1 << 18))  # measures, once
hierarchy = communicator.transports.preferred[0]
hierarchy.smallest = 0
nbytes = 16 << 20
ordinary, out = np.ones((2, nbytes // 4), np.float32)
window = communicator.memory.window_buffer(nbytes).view(np.float32)
wire = Wire(ShortFloats("bfloat16"))
ways = (
    ("ordinary", ordinary, {"out": out}),
    ("window", window, {}),
    ("MPI", window, {}),  # between the nodes
    ("bfloat16", window, {"reduction": Reduction(compressor=wire)}),
)
for name, buffer, how in ways:
    hierarchy.pipelined.smallest = float("inf") if name == "MPI" else 0
    for turn in range(6):
        buffer[:] = 1
        world.Barrier()
        before = sent()
        communicator.all_reduce(buffer, **how)
        world.Barrier()
        result = how.get("out", buffer)
        assert result[0] == result[-1] == 4
        if node.rank == 0 and turn:
            print(f"{name} {(sent() - before) / nbytes:.4f}", flush=True)
for name in ("broadcast", "reduce"):
    for turn in range(6):
        ordinary[:] = world.rank + 1
        world.Barrier()
        before = sent()
        getattr(communicator, name)(ordinary, 1)
        world.Barrier()
        assert ordinary[-1] == {"broadcast": 2, "reduce": 10 if world.rank == 1 else world.rank + 1}[name]
        if node.rank == 0 and turn and (name == "reduce" or world.rank == 0):
            print(f"{name} {(sent() - before) / nbytes:.4f}", flush=True)
"""
# Of N = 2 nodes: 2 (N - 1) / N times the buffer leaves each (of a broadcast the root's), and 5 % for headers and
# acknowledgements. A reduction to one rank is one to all, of which the others take nothing.
MOST = 1.05


@pytest.mark.time_limit(150)
@pytest.mark.parametrize("mpi", MPI_NAMES)
def test_a_node_sends_each_byte_once(tmp_path: Path, mpi: str) -> None:
    """With two ranks on each node, as if it were one; medians, for a wire may send a packet twice."""
    if reason := two_nodes.why_not():
        pytest.skip(reason)
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    with two_nodes.two_nodes(tmp_path) as nodes:
        job = nodes.run_python(Launcher.named(mpi), 2, program, seconds=100)
    assert job.returncode == 0, job.output
    expected = {
        "ordinary": 1.0,
        "window": 1.0,
        "MPI": 1.0,
        "bfloat16": 0.5,
        "broadcast": 1.0,
        "reduce": 1.0,
    }
    for name, part in expected.items():
        sent = sorted(map(float, re.findall(rf"{name} (\d\.\d{{4}})", job.stdout)))
        assert len(sent) == (5 if name == "broadcast" else 10), job.output
        assert 0.95 * part < sent[len(sent) // 2] < MOST * part, (name, sent)
