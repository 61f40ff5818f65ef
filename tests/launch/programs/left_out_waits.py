"""Leaves out one wait of the package after the other, on two ranks, and looks whether what goes wrong is seen.

For each wait it runs what comes to it: on the simulated accelerator, and on a stand-in for CuPy whose queues run as
late as they may. Seen is an access that nothing orders, a wrong number, or an error. Rank 0 prints a line for each.
"""

import contextlib
import gc
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from mpi4py import MPI

import mpistrat as ms
from mpistrat.communicators.collectives.all_reduce import AllReduce
from mpistrat.communicators.collectives.broadcast import Broadcast
from mpistrat.communicators.collectives.collective import Collective
from mpistrat.communicators.construction import communicator_for
from mpistrat.communicators.reduction.tree import tree_of_ranks
from mpistrat.communicators.router import Router
from mpistrat.communicators.transports.accelerator import (
    gpu_transports,
    hierarchical,
    pending_calls,
    staging,
)
from mpistrat.communicators.transports.accelerator.device_aware import DeviceAwareTransport
from mpistrat.communicators.transports.accelerator.hierarchical import HierarchicalDeviceTransport
from mpistrat.communicators.transports.accelerator.library import CupyLibrary, TorchLibrary
from mpistrat.communicators.transports.accelerator.library_dispatcher import LibraryDispatcher
from mpistrat.communicators.transports.accelerator.nccl import NcclTransport
from mpistrat.input.device_copies import DeviceCopies
from mpistrat.liveness import deadlines
from mpistrat.liveness.ending.abort_channel import AbortChannel
from mpistrat.liveness.records.watch import CommunicatorWatch
from mpistrat.pytorch.watch.samples import Samples
from mpistrat.tools.bench.device import Device
from mpistrat.tools.bench.peers import raw_mpi

sys.path.insert(0, str(Path(__file__).parents[2]))

from support import stand_in_cupy
from support.left_out import Site, sites, without
from support.simulated_accelerator import torch_sim

SIM = torch_sim.load(1)
WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
LENGTH = 3000
staging.CHUNK = 1 << 10
deadlines.RANK_SLEEPS_WATCHING_KERNELS = 60.0  # `until_idle` looks itself


def values() -> np.ndarray:
    return np.arange(LENGTH, dtype=np.float32) + RANK


TOTAL = SIZE * np.arange(LENGTH, dtype=np.float32) + sum(range(SIZE))


def expect(found: Any, expected: Any = TOTAL) -> None:
    np.testing.assert_array_equal(np.asarray(found), expected)


def new_communicator(move_by: Callable[[Router, Router], Any] | None = None) -> Any:
    """Args: move_by: makes a transport of the communicator and of one for the host."""
    communicator: Any = communicator_for(WORLD.Dup())
    if move_by is not None:
        communicator.move_by(move_by(communicator, Router(communicator.transports)))
    return communicator


def summed(communicator: Any) -> torch.Tensor:
    """What the program's stream sees of a sum; the buffer is made on that stream, too."""
    buffer = torch.as_tensor(values()).to("sim") * 1
    communicator.all_reduce(buffer)
    return (buffer * 1).cpu()


# torch


def staged() -> None:
    expect(summed(new_communicator(staged_by)))


def staged_by(communicator: Any, host: Router) -> staging.StagedTransport:
    return staging.StagedTransport(host, 0, CommunicatorWatch())


class OnTheHost(DeviceAwareTransport):
    """As an MPI that takes device memory, which the simulated device has on the host, at another address."""

    def _memory(self, buffer: Any, count: int, datatype: MPI.Datatype) -> Any:
        SIM.host_access(buffer, True)
        return [at_its_host_address(buffer.data_ptr(), buffer.nbytes), count, datatype]


def device_aware() -> None:
    def move_by(communicator: Any, host: Router) -> OnTheHost:
        return OnTheHost(host, 0, CommunicatorWatch(), "")

    communicator = new_communicator(move_by)
    communicator.broadcast(torch.as_tensor(values()).to("sim") * 1)
    expect(summed(communicator))


def native() -> Any:
    communicator = new_communicator()
    gpu_transports.use_gpus(
        communicator, [gpu_transports.Gpu(0, str(rank)) for rank in range(SIZE)], 0
    )
    assert communicator.ordered_by_streams, communicator.explain()
    return communicator


def native_sums() -> None:
    expect(summed(native()))


class NotedCalls(pending_calls.PendingCalls):
    """Attributes: newest: of all."""

    newest: ClassVar[Any] = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        NotedCalls.newest = self


gpu_transports.PendingCalls = NotedCalls  # type: ignore[misc]


def until_idle() -> None:
    """The host may use what the last collective of several wrote."""
    communicator = native()
    buffer = torch.as_tensor(values()).to("sim")
    for _ in range(5):
        communicator.broadcast(buffer)
    NotedCalls.newest.look()
    communicator.transports.preferred[0].of(torch=True).wait_until_idle()
    SIM.host_access(buffer, False)


def asks_first(call: Callable[[], Any]) -> bool:
    """Whether the host asks for what the device has done, and so notices a stall, before a copy blocks it."""
    SIM.host_waits()
    call()
    waits = SIM.host_waits()
    return "query" in waits[: waits.index("copy")]


def native_through_the_host() -> None:
    communicator, buffer = native(), torch.ones(3, dtype=torch.int16, device="sim")
    assert asks_first(lambda: communicator.all_reduce(buffer))
    expect(buffer.cpu(), [SIZE] * 3)


def through_the_host() -> None:
    communicator, ones = new_communicator(staged_by), torch.ones(SIZE, device="sim")
    tree = tree_of_ranks((1,) * SIZE)
    calls = [
        lambda: communicator.broadcast(ones),
        lambda: communicator.all_gather(ones),
        lambda: communicator.all_to_all(ones, ones * 1, [1] * SIZE, [1] * SIZE),
        lambda: communicator.all_reduce_by_tree(ones[None], tree),
    ]
    asked = [asks_first(call) for call in calls]
    assert all(asked), asked


def native_transport() -> Any:
    return native().transports.preferred[0].of(torch=True)


def by_node() -> None:
    """Before MPI uses the GPU between nodes, no kernel of a native group is under way, on any stream."""
    within, flat = native_transport(), native_transport()
    buffer, other = (torch.as_tensor(values()).to("sim") for _ in range(2))

    def expect_idle(collective: Collective) -> None:
        SIM.host_access(collective.buffer, True)
        SIM.host_access(other, True)

    def costs_of(ways: Any, *_: Any, memory: Any, **__: Any) -> Any:
        for way in ways.values():
            zeros = memory.zeros(1 << 12)
            way(zeros)
            SIM.host_access(zeros, True)
        return SimpleNamespace(cheaper_from=lambda *_: 0.0, explain_from=lambda *_: "")

    between: Any = SimpleNamespace(all_reduce=expect_idle, broadcast=expect_idle, why="")
    host = within.host
    transport = HierarchicalDeviceTransport(
        host, 0, CommunicatorWatch(), [0] * SIZE, within, between, flat
    )
    for call, collective in (
        (transport.all_reduce, AllReduce(buffer)),
        (transport.broadcast, Broadcast(buffer)),
    ):
        with SIM.stream(SIM.Stream()):
            SIM.current_stream().wait_stream(SIM.default_stream())
            flat.all_reduce(AllReduce(other))
            other.record_stream(SIM.current_stream())
        call(collective)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hierarchical.measurement, "costs_of", costs_of)
        transport.measure(TorchLibrary("sim", 0), "")


def two_libraries() -> None:
    """Kernels of torch's group have ended before CuPy's NCCL is used."""
    of_torch, buffer = native_transport(), torch.as_tensor(values()).to("sim")
    of_cupy: Any = SimpleNamespace(choose=lambda *_: SIM.host_access(buffer, True))
    transport = LibraryDispatcher(lambda: of_torch, lambda: of_cupy)
    sum_of_torch = AllReduce(buffer)
    transport.choose(sum_of_torch)(sum_of_torch)
    with cupy(others_are_early=False):
        transport.choose(AllReduce(cupy_array()))


class OnTwoStreams(torch.nn.Module):
    """The backward of a layer runs on the stream of its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = torch.nn.ParameterList(torch.zeros(LENGTH) for _ in range(6))
        self.side = SIM.Stream()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        current = SIM.current_stream()
        x.record_stream(self.side)
        total = x.new_zeros(())
        for number, part in enumerate(self.parts):
            if number % 3:
                total = total + (part * x).sum()
            else:
                total.record_stream(self.side)
                self.side.wait_stream(current)
                with SIM.stream(self.side):
                    total = total + (part * x).sum()
                total.record_stream(current)
                current.wait_stream(self.side)
        return total


def buckets() -> None:
    options = ms.CommunicationOptions(overlap=True, bytes_per_pack=2 * 4 * LENGTH)
    strategy = ms.MultiWorkerMirroredStrategy(
        comm=WORLD.Dup(), gradients="sum", communication_options=options
    )
    with strategy.scope():
        model = OnTwoStreams().to("sim")
    x = torch.as_tensor(values()).to("sim")

    def step() -> list[torch.Tensor]:
        model.zero_grad()
        model(x).backward()
        return [(part.grad * 1).cpu() for part in model.parts]

    found = [strategy.run(step) for _ in range(4)]

    def fails(_: Any) -> None:
        raise KeyError("on all ranks")

    with contextlib.suppress(KeyError), model.parts[0].register_hook(fails):
        strategy.run(step)
    for gradient in (gradient for gradients in found for gradient in gradients):
        expect(gradient)


def device_copies() -> None:
    copies = DeviceCopies(("sim:0",))
    batch = copies.start([torch.as_tensor(values())])
    (arrived,) = copies.arrived(batch)
    result = arrived * 1
    del batch, arrived
    gc.collect()
    expect(result.cpu(), values())


def samples() -> None:
    """The host reads samples of a device after they have arrived."""
    on_host = torch.as_tensor(values())
    expected = Samples({(0,): on_host}, 0)
    taken = Samples({(0,): on_host.to("sim") * 1}, 0)
    while not taken.have_arrived():
        pass
    assert taken.checksum() == expected.checksum()
    at_once = Samples({(0,): on_host.to("sim") * 1}, 0)
    assert at_once.by_key() == expected.by_key()


def plain_mpi() -> None:
    """As the benchmark measures it."""
    buffer = torch.zeros(LENGTH, device="sim")
    calls = raw_mpi.all_reduces(buffer)
    buffer.copy_(torch.as_tensor(values()).pin_memory(), non_blocking=True)
    expect(calls["MPI"]().cpu())


def at_its_host_address(address: int, nbytes: int) -> MPI.buffer:
    return MPI.buffer.fromaddress(SIM.host_address(address), nbytes)


raw_mpi.why_not_proven = lambda *_: ""
gpu_transports.why_not_proven = lambda *_: "nobody tries"
raw_mpi.MPI = SimpleNamespace(
    buffer=SimpleNamespace(fromaddress=at_its_host_address),
    **{name: getattr(MPI, name) for name in ("COMM_WORLD", "FLOAT", "IN_PLACE")},
)


def timed() -> None:
    """A timer stops when the device is done."""
    buffer = Device("sim:0").array(values()) * 1
    Device("sim:0").wait()
    SIM.host_access(buffer, True)


# CuPy


@contextlib.contextmanager
def cupy(others_are_early: bool) -> Iterator[None]:
    """The program's stream runs as late as it may; others as early as they may, or as late."""
    with pytest.MonkeyPatch.context() as patch:
        stand_in_cupy.install(patch, [f"0000:0{RANK}:00.0"])
        stream = stand_in_cupy.Stream()
        stream.is_early = False
        patch.setattr(stand_in_cupy, "STREAM", [stream])
        patch.setattr(stand_in_cupy.Stream, "is_early", others_are_early)
        yield


def cupy_array() -> Any:
    """It gets its values on the program's stream."""
    buffer = stand_in_cupy.asarray(np.zeros(LENGTH, np.float32))
    buffer[...] = values()
    return buffer


def staged_cupy() -> None:
    with cupy(others_are_early=False):
        communicator, buffer = new_communicator(staged_by), cupy_array()
        communicator.all_reduce(buffer)
        expect(buffer[:].view(np.ndarray))


def nccl(others_are_early: bool = False) -> None:
    """It returns when the host may use the sums."""

    def move_by(communicator: Any, host: Router) -> NcclTransport:
        channel = AbortChannel(communicator.mpi.comm)
        transport = NcclTransport(host, 0, CommunicatorWatch(), "")
        why_not = transport.start(CupyLibrary(0), channel)
        assert not why_not, why_not
        return transport

    with cupy(others_are_early):
        communicator, buffer = new_communicator(move_by), cupy_array()
        communicator.all_reduce(buffer)
        expect(buffer.view(np.ndarray).copy())


def early_nccl() -> None:
    nccl(others_are_early=True)


def unrecorded(of: Any) -> Any:
    """An event that has come, as all are that nobody has recorded."""
    if isinstance(of, TorchLibrary | torch.Stream):
        return torch.Event("sim")
    event = stand_in_cupy.Event(stand_in_cupy.NULL)
    event.reach()
    return event


HOST = [through_the_host, native_through_the_host]
TORCH = [staged, device_aware, native_sums, *HOST, until_idle]
NCCL = [nccl, early_nccl]
OTHERS = [by_node, two_libraries, timed, plain_mpi, buckets, samples, device_copies, staged_cupy]
ALL = [*TORCH, *OTHERS, *NCCL]
ACCELERATOR = "communicators/transports/accelerator"
# Where waits of a file show; of others, all is tried.
OF_FILE = {
    f"{ACCELERATOR}/buffers.py": [*HOST, *TORCH],
    f"{ACCELERATOR}/library_dispatcher.py": [two_libraries],
    f"{ACCELERATOR}/pending_calls.py": [until_idle],
    f"{ACCELERATOR}/device_aware.py": [device_aware],
    f"{ACCELERATOR}/hierarchical.py": [by_node],
    f"{ACCELERATOR}/native.py": TORCH,
    f"{ACCELERATOR}/nccl.py": NCCL,
    f"{ACCELERATOR}/staging.py": [staged],
    "input/device_copies.py": [device_copies],
    "pytorch/gradients/device_buckets.py": [buckets],
    "pytorch/watch/samples.py": [samples],
    "tools/bench/device.py": [timed],
    "tools/bench/peers/raw_mpi.py": [plain_mpi],
}


def seen(runs: list[Callable[[], None]], site: Site | None = None) -> str:
    """What goes wrong on any rank; "" if nothing does. Collective.

    A run looks at numbers after its last collective: they may be wrong on one rank and right on another.
    """
    for run in runs:
        wrong = ""
        try:
            with contextlib.nullcontext() if site is None else without(site, unrecorded):
                run()
        except Exception as error:
            wrong = f"{type(error).__name__}: {error}"
        gc.collect()
        torch.accelerator.synchronize()
        for text in WORLD.allgather((SIM.violations() or [wrong])[0]):
            if text:
                return f"{run.__name__}: {' '.join(text.split())[:150]}"
    return ""


def main() -> None:
    SIM.raise_violations(False)
    gc.freeze()
    everything = seen(ALL)
    assert not everything, everything
    for site in sites():
        what = seen(OF_FILE.get(site.file, ALL), site)
        if RANK == 0:
            print("seen" if what else "NOT SEEN", site, "|", what, flush=True)


if __name__ == "__main__":
    main()
