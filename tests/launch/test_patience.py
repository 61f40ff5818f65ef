"""Ranks that share no node: large sums go in pieces, and their thread sleeps while the network works."""

from pathlib import Path

import pytest

from support.clusters import two_nodes
from support.harness.mpi_launcher import MPI_NAMES, Launcher

pytestmark = [pytest.mark.both_mpis("progress"), pytest.mark.alone("times")]

SLOW = """
import time
import numpy as np
from mpi4py import MPI
from mpistrat.communicators.construction import communicator_for
from mpistrat.communicators.transports.pipelined import PipelinedTransport

world = MPI.COMM_WORLD
communicator = communicator_for(world)
(in_pieces,) = (one for one in communicator.transports.preferred if isinstance(one, PipelinedTransport))
buffer = np.ones(1 << 18, np.float32)
communicator.all_reduce(buffer)  # measures, once

def cpu_share(smallest):
    in_pieces.smallest = smallest
    world.Barrier()
    began, ran = time.perf_counter(), time.thread_time()
    communicator.all_reduce(buffer)
    return (time.thread_time() - ran) / (time.perf_counter() - began)

pieces, alone = (min(cpu_share(smallest) for _ in range(3)) for smallest in (0, float("inf")))
print(f"{world.rank}: {pieces:.3f} {alone:.3f}", flush=True)
"""

WAYS = """
import numpy as np, torch
from mpi4py import MPI
import mpistrat as ms
from mpistrat.communicators import Reduction, reducing
from mpistrat.communicators.transports import pipelined
from mpistrat.communicators.transports.pipelined import PipelinedTransport
from mpistrat.pytorch.gradients.wires import Wire
from mpistrat.wire_formats import ShortFloats, TopK

strategy = ms.MultiWorkerMirroredStrategy(gradients="mean")
communicator = strategy.extended.communicator
rank, size = communicator.rank, communicator.size
*_, in_pieces = communicator.transports.preferred
mpi = communicator.mpi
assert isinstance(in_pieces, PipelinedTransport)
assert "once something large has been combined" in strategy.extended.explain()
communicator.all_reduce(np.zeros(1 << 18))
assert set(in_pieces.costs.routes) == {"in pieces, asleep meanwhile", "MPI"}
assert "sums in pieces, asleep meanwhile, " in strategy.extended.explain()
in_pieces.smallest = 0

waits = []
wait_until = pipelined.wait_until
pipelined.wait_until = lambda *args, **how: (waits.append(1), wait_until(*args, **how))

def waits_of(nbytes):
    pieces = -(-nbytes // (pipelined.TO_EACH * size))
    return 2 * pieces  # until one has come, and until it has gone

everyone = [torch.randn(1_000_003, generator=torch.Generator().manual_seed(r)) for r in range(size)]
buffer = everyone[rank].clone()
communicator.all_reduce(buffer, reducing(scale=0.5))
torch.testing.assert_close(buffer, 0.5 * sum(everyone))
assert len(waits) == waits_of(4 * 1_000_003)
for wire_format, most in ((ShortFloats("bfloat16"), 2.0**-7 * 7 * size), (TopK(1.0), 1e-4)):
    wire = Wire(wire_format)
    buffer = everyone[rank].clone()
    communicator.all_reduce(buffer, Reduction(compressor=wire))
    assert (buffer - sum(everyone)).abs().max() < most
    assert len(set(MPI.COMM_WORLD.allgather(buffer.numpy().tobytes()))) == 1
    assert wire.size == 1_000_003
assert len(waits) == waits_of(4 * 1_000_003) + waits_of(2 * 1_000_003)  # the short ones, too

wire = Wire(ShortFloats("bfloat16"))
for dtype, length in ((torch.float64, 100_000), (torch.float32, 1000)):  # a wire is for neither
    buffer = torch.full((length,), 1.001, dtype=dtype)
    communicator.all_reduce(buffer, Reduction(compressor=wire))
    assert torch.equal(buffer, sum(torch.full((length,), 1.001, dtype=dtype) for _ in range(size)))
assert len(waits) == waits_of(4 * 1_000_003) + waits_of(2 * 1_000_003) + waits_of(8 * 100_000)
assert wire.size == 0
if rank == 0:
    print("all is well", flush=True)
"""


@pytest.mark.time_limit(120)
@pytest.mark.parametrize("mpi", MPI_NAMES)
def test_the_core_is_left_to_the_program(tmp_path: Path, mpi: str) -> None:
    """1 MB over 100 Mbit/s takes 80 ms at least. MPI alone spins: if it did not, there would be nothing to show."""
    if reason := two_nodes.why_not():
        pytest.skip(reason)
    program = tmp_path / "program.py"
    program.write_text(SLOW)
    with two_nodes.two_nodes(tmp_path, "100mbit") as nodes:
        job = nodes.run_python(Launcher.named(mpi), 1, program, seconds=60)
    assert job.returncode == 0, job.output
    shares = [line.split(": ")[1].split() for line in job.stdout.splitlines() if ": " in line]
    assert len(shares) == 2, job.output
    for pieces, alone in shares:
        assert float(pieces) < 0.3, job.output
        assert float(alone) > 2 * float(pieces), job.output


@pytest.mark.time_limit(120)
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_alone_on_their_nodes(tmp_path: Path, ranks: int) -> None:
    program = tmp_path / "program.py"
    program.write_text(WAYS)
    environment = {"MPIR_CVAR_NUM_CLIQUES": str(ranks), "OMP_NUM_THREADS": "1"}
    job = Launcher.named("MPICH").run_python(ranks, program, env=environment, seconds=90)
    assert job.returncode == 0, job.output
    assert "all is well" in job.output
