"""On an NVIDIA GPU, which all ranks share: `scripts/test-gpu` runs these with 1 and 2 ranks."""

import numpy as np
import pytest
import torch
from mpi4py import MPI

import mpistrat as ms
from mpistrat.communicators import reducing
from mpistrat.communicators.router import Router, Ways
from mpistrat.communicators.transports.accelerator import device_memory_proof, gpu_ways
from mpistrat.communicators.transports.accelerator.library import CupyLibrary, TorchLibrary
from mpistrat.communicators.transports.accelerator.nccl import NcclTransport
from mpistrat.communicators.transports.accelerator.staging import CHUNK, StagedTransport
from mpistrat.communicators.transports.mpi import MpiTransport
from mpistrat.liveness.abort_channel import AbortChannel
from mpistrat.liveness.watch import CommunicatorWatch
from mpistrat.machine.devices import seen_accelerators

pytestmark = pytest.mark.gpu

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
LENGTHS = (1, 1000, 3 * CHUNK // 4 + 5)  # of float32; the last in several chunks
LIBRARIES = ("torch", "cupy")


def on_gpu(library, array):
    if library == "torch":
        return torch.as_tensor(array).to("cuda:0")
    import cupy

    return cupy.asarray(array)


def to_numpy(array):
    return array.cpu().numpy() if isinstance(array, torch.Tensor) else array.get()


def staged():
    mpi = MpiTransport(WORLD.Dup())
    return Router(Ways(mpi, [StagedTransport(Router(Ways(mpi)), 0, CommunicatorWatch())]))


def nccl_of_one_rank(library):
    mpi = MpiTransport(MPI.COMM_SELF.Dup())
    nccl = NcclTransport(
        Router(Ways(mpi)), 0, CommunicatorWatch(), "through NCCL", AbortChannel(mpi.comm)
    )
    why_not = nccl.start(TorchLibrary("cuda", 0) if library == "torch" else CupyLibrary(0))
    assert why_not == ""
    return Router(Ways(mpi, [nccl]))


def test_gpus_are_seen_by_name():
    assert len(set(seen_accelerators())) == torch.cuda.device_count()


def test_the_strategy_is_on_the_gpu():
    strategy = ms.MultiWorkerMirroredStrategy()
    assert strategy.extended.worker_devices == (f"cuda:{RANK % torch.cuda.device_count()}",)
    if torch.cuda.device_count() < SIZE:
        assert "share a GPU" in strategy.extended.explain()


@pytest.mark.parametrize("library", LIBRARIES)
def test_staging(library):
    communicator = staged()
    for length in LENGTHS:
        values = np.arange(length, dtype=np.float32) % 100
        buffer = on_gpu(library, values + RANK)
        communicator.all_reduce(buffer)
        expected = values * SIZE + sum(range(SIZE))
        np.testing.assert_array_equal(to_numpy(buffer), expected)


def test_staging_waits_for_the_kernels_before_it_and_is_waited_for():
    """A slow kernel writes the buffer last; the first kernel after it reads the sum."""
    communicator = staged()
    length = LENGTHS[-1]
    for _ in range(3):
        buffer = torch.zeros(length, device="cuda:0")
        torch.cuda._sleep(50_000_000)
        buffer += 1
        communicator.all_reduce(buffer)
        assert float((buffer + 1).sum(dtype=torch.float64)) == length * (SIZE + 1)


def test_staging_on_a_stream_of_the_program_s_own():
    communicator = staged()
    with torch.cuda.stream(torch.cuda.Stream()):
        buffer = torch.zeros(LENGTHS[-1], device="cuda:0")
        torch.cuda._sleep(50_000_000)
        buffer += 1
        communicator.all_reduce(buffer)
        assert float(buffer.min()) == float(buffer.max()) == SIZE


def test_bfloat16_is_rounded_once():
    communicator = staged()
    buffer = torch.tensor([256.0 if RANK == 0 else 1.0], dtype=torch.bfloat16, device="cuda:0")
    communicator.all_reduce(buffer)
    assert float(buffer) == float(torch.tensor(256.0 + SIZE - 1).bfloat16())


@pytest.mark.parametrize("library", LIBRARIES)
def test_broadcast_and_all_gather(library):
    communicator = staged()
    buffer = on_gpu(library, np.full(1000, RANK + 1, np.float32))
    communicator.broadcast(buffer, SIZE - 1)
    assert (to_numpy(buffer) == SIZE).all()
    parts = communicator.all_gather(on_gpu(library, np.full((RANK + 1, 2), RANK, np.int64)))
    assert [tuple(part.shape) for part in parts] == [(r + 1, 2) for r in range(SIZE)]
    assert all((to_numpy(part) == r).all() for r, part in enumerate(parts))


@pytest.mark.parametrize("library", LIBRARIES)
def test_nccl_of_one_rank(library):
    """What a single GPU can show of NCCL: that we speak its language, and order its stream rightly."""
    communicator = nccl_of_one_rank(library)
    for dtype in ("float32", "int64", "float16", "int16", "complex64"):
        values = (np.arange(1000) % 7).astype(dtype)
        buffer = on_gpu(library, values)
        communicator.all_reduce(buffer, "sum")
        communicator.broadcast(buffer, 0)
        (part,) = communicator.all_gather(buffer)
        np.testing.assert_array_equal(to_numpy(part), values)
    total = on_gpu(library, np.ones(1000, np.float32))
    communicator.all_reduce(total, reducing(scale=0.5))
    assert (to_numpy(total) == 0.5).all()


def test_nccl_waits_for_the_kernels_before_it():
    communicator = nccl_of_one_rank("torch")
    buffer = torch.zeros(1 << 20, device="cuda:0")
    torch.cuda._sleep(50_000_000)
    buffer += 1
    (part,) = communicator.all_gather(buffer)
    assert float(part.sum()) == 1 << 20


def test_whether_mpi_takes_device_memory_can_be_asked():
    """Whatever the answer is, this process lives on."""
    ms.MultiWorkerMirroredStrategy()
    answers = WORLD.allgather(device_memory_proof.reason_against("torch", 0))
    assert len(set(answers)) == 1


def test_training_gives_what_the_whole_batch_gives_on_the_cpu():
    torch.manual_seed(0)
    x, y = torch.randn(12, 8), torch.randn(12, 1)

    def net():
        torch.manual_seed(1)
        return torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))

    reference = net()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(reference(x), y).backward()
        optimizer.step()

    strategy = ms.MultiWorkerMirroredStrategy(gradients="sum")
    device = strategy.extended.worker_devices[0]
    with strategy.scope():
        model = net().to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mine = slice(RANK * 12 // SIZE, (RANK + 1) * 12 // SIZE)

    def step(x, y):
        optimizer.zero_grad()
        ((model(x) - y) ** 2).sum().div(12).backward()
        optimizer.step()

    for _ in range(5):
        strategy.run(step, args=(x[mine].to(device), y[mine].to(device)))
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.detach().cpu(), theirs.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.mpi(min_size=2)
def test_nccl_refuses_a_shared_gpu(monkeypatch):
    """If it were tried all the same: every rank gets the refusal, and goes another way."""
    monkeypatch.setattr(gpu_ways, "shared_gpu", lambda gpus: "")
    strategy = ms.MultiWorkerMirroredStrategy(comm=WORLD.Dup())
    if torch.cuda.device_count() < SIZE:
        assert "NCCL does not start" in strategy.extended.explain()
    total = strategy.reduce(
        "sum", torch.ones(3, device=strategy.extended.worker_devices[0]), axis=None
    )
    assert total.tolist() == [SIZE] * 3
