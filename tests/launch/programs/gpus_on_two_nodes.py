"""Four ranks on two nodes, each with a GPU of its own: what is large goes by node.

Arguments: the folder of a stand-in for CuPy on host memory, and what starts processes on another node, as ssh does.
Without arguments the nodes are those that an MPI makes up on one machine, and there is no wire to measure. The GPUs are
those of `support.accelerator`.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from mpi4py import MPI

sys.path.append(str(Path(__file__).parents[2]))
from support import accelerator
from support.chosen_transport import chosen_transport
from support.clusters.two_nodes import WIRE

sim = accelerator.load()

import mpistrat as ms  # noqa: E402
from mpistrat.cluster_resolver import MPIClusterResolver  # noqa: E402
from mpistrat.communicators import Communicator, reducing  # noqa: E402
from mpistrat.communicators.construction import communicator_for  # noqa: E402
from mpistrat.communicators.router import Router, Transports  # noqa: E402
from mpistrat.communicators.transports.accelerator import gpu_transports  # noqa: E402
from mpistrat.communicators.transports.accelerator.device_aware import (  # noqa: E402
    DeviceAwareTransport,
)
from mpistrat.communicators.transports.accelerator.device_memory_proof import (  # noqa: E402
    why_not_proven,
)
from mpistrat.communicators.transports.accelerator.library import TorchLibrary  # noqa: E402
from mpistrat.communicators.transports.mpi import MpiTransport  # noqa: E402
from mpistrat.liveness.records.watch import CommunicatorWatch  # noqa: E402
from mpistrat.machine.addresses import own_addresses  # noqa: E402

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
ON_TWO_MACHINES = len(sys.argv) > 1
NBYTES = 4 << 20
LENGTHS = (40_000, 100_003)  # the latter is padded
DTYPES = (torch.float32, torch.float64, torch.int64, torch.bfloat16, torch.int16)


def say(text: str) -> None:
    if RANK == 0:
        print(text, flush=True)


def prove() -> None:
    """Two processes on each node, and then one on each, send what to MPI is host memory."""
    stand_in, as_ssh = sys.argv[1:]
    os.environ.update(
        PYTHONPATH=stand_in,
        HYDRA_LAUNCHER="ssh",
        HYDRA_LAUNCHER_EXEC=as_ssh,
        PRTE_MCA_plm_ssh_agent=as_ssh,
        PRTE_MCA_prte_if_include=WIRE,
    )
    if "Open MPI" not in MPI.Get_library_version():  # there both nodes have the machine's name
        MPI.Get_processor_name = lambda: own_addresses()[0]
    node = MPIClusterResolver().topology().node
    why_not = why_not_proven(communicator_for(WORLD), node, "cupy", 0)
    assert not why_not, why_not
    say("proven")


def sums_and_broadcasts(communicator: Communicator) -> None:
    """Equal to those on the CPU, bit for bit: all are of small whole numbers."""
    for dtype in DTYPES:
        for length in LENGTHS:
            everyone = [(torch.arange(length) % 7 + rank).to(dtype) for rank in range(SIZE)]
            total, mine = sum(everyone[1:], start=everyone[0]), everyone[RANK]
            buffer = mine.to(accelerator.KIND)
            communicator.all_reduce(buffer)
            assert torch.equal(buffer.cpu(), total), (dtype, length)
            buffer, out = (
                mine.to(accelerator.KIND),
                torch.empty(length, dtype=dtype, device=accelerator.KIND),
            )
            communicator.all_reduce(buffer, "max", out=out)
            assert torch.equal(out.cpu(), everyone[-1])
            assert torch.equal(buffer.cpu(), mine)
            if dtype.is_floating_point:
                communicator.all_reduce(buffer, reducing(scale=0.5))
                assert torch.equal(buffer.cpu(), total * 0.5)
            for root in range(SIZE):
                buffer = mine.to(accelerator.KIND)
                communicator.broadcast(buffer, root)
                assert torch.equal(buffer.cpu(), everyone[root]), (dtype, length, root)
                buffer = mine.to(accelerator.KIND)
                communicator.reduce(buffer, root)
                assert torch.equal(buffer.cpu(), total if root == RANK else mine)
    # Three numbers of 16 bits are rounded once, not on each node.
    short = torch.full((40_000,), 1.0 if RANK == 0 else 2.0**-8 * 0.75).bfloat16()
    exact = 1.0 + (SIZE - 1) * 2.0**-8 * 0.75
    buffer = short.to(accelerator.KIND)
    communicator.all_reduce(buffer)
    assert float(buffer[0]) == float(torch.tensor(exact).bfloat16())
    assert sim.violations() == []


def bytes_sent(name: str, communicator: Communicator) -> None:
    """Print how often the bytes of a buffer leave this node, by the counters of its wire."""
    buffer = torch.ones(NBYTES // 4, device=accelerator.KIND)
    for call in ("all_reduce", "broadcast"):
        for turn in range(4):
            buffer.fill_(1)
            sim.synchronize()
            WORLD.Barrier()
            before = _sent()
            getattr(communicator, call)(buffer)
            sim.synchronize()
            WORLD.Barrier()
            if turn and RANK == 0:
                print(f"{name} {call} {(_sent() - before) / NBYTES:.4f}", flush=True)


def _sent() -> int:
    with open("/proc/net/dev") as devices:
        return int(next(line for line in devices if f"{WIRE}:" in line).split()[9])


def checked_pointer(library: TorchLibrary, buffer: torch.Tensor) -> int:
    """For an MPI that takes device memory: no stream may use it meanwhile."""
    sim.host_access(buffer, True)
    return sim.host_address(buffer.data_ptr())


def phases(communicator: Communicator) -> None:
    """What the GPUs' own library does has ended before MPI uses the GPU."""
    buffer = torch.ones(40_000, device=accelerator.KIND)
    by_node = chosen_transport(communicator, buffer)
    order: list[str] = []

    def spy(name: str, call: Callable[..., None]) -> Callable[..., None]:
        return lambda *args: (order.append(name), call(*args))[1]

    with pytest.MonkeyPatch.context() as patch:
        for name, call in (("within", "wait_until_idle"), ("flat", "wait_until_idle")):
            transport = getattr(by_node, name)
            patch.setattr(transport, call, spy(name, getattr(transport, call)))
        patch.setattr(by_node.between, "all_reduce", spy("MPI", by_node.between.all_reduce))
        patch.setattr(by_node.between, "broadcast", spy("MPI", by_node.between.broadcast))
        communicator.all_reduce(buffer)
        communicator.broadcast(buffer)
    assert order == ["flat", "within", "MPI"] * 2, order


def flat_by_mpi() -> Router:
    """A communicator that hands all device memory to MPI."""
    mpi = MpiTransport(WORLD.Dup())
    host = Router(Transports(mpi))
    aware = DeviceAwareTransport(host, 0, CommunicatorWatch(), "by MPI")
    return Router(Transports(mpi, [aware]))


def asked_for(name: str, comm: MPI.Intracomm) -> Communicator:
    """A strategy's communicator, which moves what is large by node."""
    strategy = ms.MultiWorkerMirroredStrategy(comm=comm)
    say(f"{name}: {strategy.extended.explain()}")
    return strategy.extended.communicator.by(ms.CommunicationImplementation.HIERARCHICAL)


def train(strategy: ms.Strategy) -> str:
    """Sum gradients. Returns: the class of what moved them between ranks."""
    with strategy.scope():
        model = torch.nn.Linear(200, 100)
    examples = torch.full((1, 200), RANK + 1.0, device=accelerator.KIND)
    for _ in range(2):
        model.zero_grad()
        strategy.run(lambda: model(examples).sum().backward())
        assert (model.weight.grad == sum(range(SIZE + 1))).all()
    transport = chosen_transport(strategy.extended.communicator, model.weight.grad)
    return type(transport).__name__


if ON_TWO_MACHINES:
    prove()
gpu_transports.why_not_proven = lambda *args: "not tried"
staged = asked_for("staged", WORLD.Dup())
sums_and_broadcasts(staged)
say("sums and broadcasts are right")
if ON_TWO_MACHINES:
    bytes_sent("staged", staged)

comm = WORLD.Dup()
if not accelerator.left_out(
    "device-aware, bytes on the wire",
    "MPI gets the simulated device's memory as host memory, and no wire joins the nodes",
    says_so=RANK == 0,
):
    gpu_transports.why_not_proven = lambda *args: ""
    TorchLibrary.pointer = checked_pointer
    aware = asked_for("device-aware", comm)
    sums_and_broadcasts(aware)
    if ON_TWO_MACHINES:
        bytes_sent("device-aware", aware)
    phases(aware)
    sums_and_broadcasts(flat_by_mpi())

BY_NODE = "HierarchicalDeviceTransport"
for policy, expected in (
    (ms.NcclAllReduce(), "NativeTransport"),
    (ms.HierarchicalCopyAllReduce(), BY_NODE),
):
    by_policy = ms.MirroredStrategy(comm=comm, cross_device_ops=policy, gradients="sum")
    assert train(by_policy) == expected
for overlap in (False, True):
    options = ms.CommunicationOptions(implementation="hierarchical", overlap=overlap)
    by_option = ms.MultiWorkerMirroredStrategy(
        comm=comm, communication_options=options, gradients="sum"
    )
    assert train(by_option) == BY_NODE
say("trainings are right")
assert sim.violations() == []
say("all is well")
