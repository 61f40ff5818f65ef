"""On GPUs of any maker that torch knows: `scripts/test-gpu` runs these with one for each rank, and with one too few."""

import importlib.util

import numpy as np
import pytest
import torch
from mpi4py import MPI

import mpistrat as ms
from mpistrat.communicators import reducing
from mpistrat.communicators.router import Router, Transports
from mpistrat.communicators.transports.accelerator import device_memory_proof, gpu_transports
from mpistrat.communicators.transports.accelerator.staging import CHUNK, StagedTransport
from mpistrat.communicators.transports.mpi import MpiTransport
from mpistrat.liveness.records.watch import CommunicatorWatch
from mpistrat.machine.devices import seen_accelerators

pytestmark = pytest.mark.gpu

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
LENGTHS = (1, 1000, 3 * CHUNK // 4 + 5)  # of float32; the last in several chunks
LIBRARIES = (
    "torch",
    pytest.param(
        "cupy",
        marks=pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="needs CuPy"),
    ),
)
KIND = getattr(torch.accelerator.current_accelerator(check_available=True), "type", "")
GPUS = torch.accelerator.device_count() if KIND else 0
INDEX = RANK % max(1, GPUS)
GPU = f"{KIND}:{INDEX}"
each_has_its_own = pytest.mark.skipif(GPUS < SIZE, reason="needs a GPU for each rank")


@pytest.fixture(autouse=True)
def _on_this_gpu():
    """Ranks that share a GPU are as right as ranks that have one each."""
    torch.accelerator.set_device_index(INDEX)


def keep_busy():
    """Submit kernels that take some milliseconds."""
    if KIND == "cuda":
        torch.cuda._sleep(50_000_000)
    else:
        matrix = torch.ones(2048, 2048, device=GPU)
        for _ in range(10):
            matrix = matrix @ matrix / 2048


def on_gpu(library, array):
    if library == "torch":
        return torch.as_tensor(array).to(GPU)
    import cupy

    return cupy.asarray(array)


def to_numpy(array):
    return array.cpu().numpy() if isinstance(array, torch.Tensor) else array.get()


def staged():
    mpi = MpiTransport(WORLD.Dup())
    return Router(
        Transports(mpi, [StagedTransport(Router(Transports(mpi)), INDEX, CommunicatorWatch())])
    )


def group_of_one_rank(library):
    """A communicator of this rank alone that uses what would combine the GPUs of several."""
    router = Router(Transports(MpiTransport(MPI.COMM_SELF.Dup())))
    gpu_transports.use_gpus(router, [gpu_transports.Gpu(0, GPU)], INDEX)
    router.all_reduce(on_gpu(library, np.ones(1, np.float32)))
    assert "pinned" not in router.explain(), router.explain()
    return router


def test_gpus_are_seen_by_name():
    assert len(set(seen_accelerators())) == GPUS


def test_the_strategy_is_on_the_gpu():
    strategy = ms.MultiWorkerMirroredStrategy()
    assert strategy.extended.worker_devices == (GPU,)
    if GPUS < SIZE:
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
        buffer = torch.zeros(length, device=GPU)
        keep_busy()
        buffer += 1
        communicator.all_reduce(buffer)
        assert float((buffer + 1).sum(dtype=torch.float64)) == length * (SIZE + 1)


def test_staging_on_a_stream_of_the_program_s_own():
    communicator = staged()
    with torch.Stream(device=GPU):
        buffer = torch.zeros(LENGTHS[-1], device=GPU)
        keep_busy()
        buffer += 1
        communicator.all_reduce(buffer)
        assert float(buffer.min()) == float(buffer.max()) == SIZE


def test_bfloat16_is_rounded_once():
    communicator = staged()
    buffer = torch.tensor([256.0 if RANK == 0 else 1.0], dtype=torch.bfloat16, device=GPU)
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
def test_a_group_of_one_rank(library):
    """What a single GPU can show of NCCL: that we speak its language, and order its stream rightly."""
    communicator = group_of_one_rank(library)
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


def test_a_group_waits_for_the_kernels_before_it():
    communicator = group_of_one_rank("torch")
    buffer = torch.zeros(1 << 20, device=GPU)
    keep_busy()
    buffer += 1
    (part,) = communicator.all_gather(buffer)
    assert float(part.sum()) == 1 << 20


@each_has_its_own
@pytest.mark.mpi(min_size=2)
def test_a_group_of_ranks_that_have_a_gpu_each():
    """Sums are right, in the order of streams, and the host does not wait for them."""
    strategy = ms.MultiWorkerMirroredStrategy()
    communicator = strategy.extended.communicator
    assert "pinned" not in strategy.extended.explain(), strategy.extended.explain()
    assert communicator.ordered_by_streams
    ranks = sum(range(SIZE))
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.int16, torch.complex64):
        buffer = torch.full((1 << 20,), RANK, dtype=dtype, device=GPU)
        keep_busy()
        buffer += 1
        communicator.all_reduce(buffer)
        assert (buffer == ranks + SIZE).all()
    buffer = torch.full((1000,), float(RANK), device=GPU)
    communicator.broadcast(buffer, SIZE - 1)
    assert (buffer == SIZE - 1).all()
    parts = communicator.all_gather(torch.full((RANK + 1, 2), RANK, device=GPU))
    assert [part.shape[0] for part in parts] == [rank + 1 for rank in range(SIZE)]
    out = torch.empty(3, device=GPU)
    communicator.reduce_scatter(torch.ones(3 * SIZE, device=GPU), out)
    assert out.tolist() == [SIZE] * 3


def test_batch_norm_over_all_replicas():
    """Its buffers are averaged, and those of SyncBatchNorm are of all examples."""
    examples = torch.randn(4 * SIZE, 3, generator=torch.Generator().manual_seed(0))
    mine = examples[4 * RANK : 4 * RANK + 4].to(GPU)
    strategy = ms.MultiWorkerMirroredStrategy(gradients="sum")
    with strategy.scope():
        model = torch.nn.BatchNorm1d(3)
        synced = ms.convert_sync_batchnorm(torch.nn.BatchNorm1d(3))
    strategy.run(lambda: (model(mine) + synced(mine)).square().sum().backward())
    alone = torch.nn.BatchNorm1d(3)
    alone(examples)
    torch.testing.assert_close(synced.running_var.cpu(), alone.running_var)
    means = examples.view(SIZE, 4, 3).mean(1).mean(0) * 0.1
    torch.testing.assert_close(model.running_mean.cpu(), means)
    assert model.num_batches_tracked == 1


def test_whether_mpi_takes_device_memory_can_be_asked():
    """Whatever the answer is, this process lives on."""
    ms.MultiWorkerMirroredStrategy()
    answers = WORLD.allgather(device_memory_proof.reason_against("torch", INDEX))
    assert len(set(map(bool, answers))) == 1


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
def test_a_group_refuses_a_shared_gpu(monkeypatch):
    """If it were tried all the same: every rank gets the refusal, and goes another way."""
    monkeypatch.setattr(gpu_transports, "shared_gpu", lambda gpus: "")
    strategy = ms.MultiWorkerMirroredStrategy(comm=WORLD.Dup())
    if GPUS < SIZE:
        assert "does not start" in strategy.extended.explain()
    total = strategy.reduce(
        "sum", torch.ones(3, device=strategy.extended.worker_devices[0]), axis=None
    )
    assert total.tolist() == [SIZE] * 3
