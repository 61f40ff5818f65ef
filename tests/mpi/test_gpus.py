"""Buffers on GPUs: each way against NumPy, on a stand-in for CuPy that keeps device memory on the host."""

import itertools
import os
import re
import sys
import time

import numpy as np
import pytest
from mpi4py import MPI

import mpistrat as ms
from mpistrat.communicators import Reduction, reducing
from mpistrat.communicators.construction import communicator_for
from mpistrat.communicators.transports.accelerator import device_memory_proof, gpu_transports
from mpistrat.communicators.transports.accelerator import staging as device_staging
from mpistrat.liveness.deadlines import RANK_WAITS_FOR_TRIAL_OF_DEVICE
from mpistrat.machine import gpu_advice
from support import stand_in_cupy
from support.memory_for_mpi import cupy_with
from support.rank_errors import errors_of_ranks

WORLD = MPI.COMM_WORLD
RANK, SIZE, LAST = WORLD.rank, WORLD.size, WORLD.size - 1

needs_ranks = pytest.mark.mpi(min_size=2)
WAYS = ("NCCL", "CUDA-aware MPI", "staging")


@pytest.fixture
def comm():
    duplicate = WORLD.Dup()  # its communicator of ours is this test's alone
    yield duplicate
    duplicate.Free()


@pytest.fixture
def own_gpus(monkeypatch):
    return stand_in_cupy.install(monkeypatch, [f"0000:0{RANK}:00.0"])


@pytest.fixture
def shared_gpu(monkeypatch):
    return stand_in_cupy.install(monkeypatch, ["0000:01:00.0"])


@pytest.fixture(params=WAYS)
def strategy(request, monkeypatch, comm):
    name = f"0000:0{RANK}:00.0" if request.param == "NCCL" else "0000:01:00.0"
    stand_in_cupy.install(monkeypatch, [name])
    # To MPI a pointer of the stand-in is one to host memory, which any MPI takes.
    untried = "" if request.param == "CUDA-aware MPI" else "not tried"
    monkeypatch.setattr(gpu_transports, "why_not_proven", lambda *_: untried)
    monkeypatch.setattr(device_staging, "CHUNK", 64)
    strategy = ms.MultiWorkerMirroredStrategy(comm=comm, gradients="sum")
    expected = {
        "NCCL": "GPUs: through NCCL",
        "staging": "pinned host memory",
    }.get(request.param, "through MPI, which was seen")
    assert SIZE == 1 or expected in strategy.extended.explain()
    return strategy


def on_gpu(array):
    return stand_in_cupy.asarray(array)


def of(rank, length, dtype):
    return (np.arange(length) * (rank + 1) % 50).astype(dtype)


def combined(op, *args):
    return getattr(np, op)([of(rank, *args) for rank in range(SIZE)], axis=0)


@needs_ranks
@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "uint8", "int64"])
def test_all_reduce(strategy, dtype):
    for op, length in itertools.product(["sum", "max", "min"], [1, 100, 0]):
        buffer = on_gpu(of(RANK, length, dtype))
        strategy.extended.communicator.all_reduce(buffer, op)
        np.testing.assert_array_equal(buffer, combined(op, length, dtype).astype(dtype))


@needs_ranks
@pytest.mark.parametrize("dtype", ["int16", "complex64", "float16"])
def test_what_nccl_does_not_know(strategy, dtype):
    buffer = on_gpu(of(RANK, 100, dtype))
    strategy.extended.communicator.all_reduce(buffer)
    np.testing.assert_array_equal(buffer, combined("sum", 100, "float64").astype(dtype))


@needs_ranks
def test_16_bits_are_rounded_once(strategy):
    buffer = on_gpu(np.array([2048 if RANK == 0 else 1], np.float16))
    strategy.extended.communicator.all_reduce(buffer)
    assert buffer[0] == np.float16(2048 + SIZE - 1)


@needs_ranks
def test_scale_and_out(strategy):
    communicator = strategy.extended.communicator
    buffer, out = on_gpu(of(RANK, 100, "float32")), on_gpu(np.zeros(100, "float32"))
    communicator.all_reduce(buffer, reducing(scale=1 / SIZE), out=out)
    np.testing.assert_allclose(out, combined("mean", 100, "float32"), rtol=1e-6)
    np.testing.assert_array_equal(buffer, of(RANK, 100, "float32"))


@needs_ranks
def test_a_wire_format_works_on_the_host(strategy):
    """On all of a buffer at once, for it remembers what it has cut off; between ranks of a node nothing is cut off."""
    lengths = []

    def wire(between, values):
        lengths.append(len(values))
        between.all_reduce(values)

    buffer = on_gpu(of(RANK, 1 << 15, "float32"))
    strategy.extended.communicator.all_reduce(buffer, Reduction(scale=0.5, compressor=wire))
    np.testing.assert_array_equal(buffer, combined("sum", 1 << 15, "float32") / 2)
    assert lengths in ([], [1 << 15])


@needs_ranks
def test_one_after_the_other(strategy):
    """Of different sizes, so that what lies in pinned memory still, or in flight, would show."""
    for length in (200, 3, 64, 1, 130):
        buffer = on_gpu(of(RANK, length, "float32"))
        strategy.extended.communicator.all_reduce(buffer)
        np.testing.assert_array_equal(buffer, combined("sum", length, "float32"))


@needs_ranks
def test_reduce_and_reduce_scatter(strategy):
    communicator = strategy.extended.communicator
    buffer = on_gpu(of(RANK, 10, "float32"))
    communicator.reduce(buffer, root=LAST)
    expected = combined("sum", 10, "float32") if RANK == LAST else of(RANK, 10, "float32")
    np.testing.assert_array_equal(buffer, expected)
    rows = on_gpu(of(RANK, 4 * SIZE, "float32").reshape(2 * SIZE, 2))
    out = on_gpu(np.empty((2, 2), "float32"))
    communicator.reduce_scatter(rows, out)
    everything = combined("sum", 4 * SIZE, "float32").reshape(SIZE, 2, 2)
    np.testing.assert_array_equal(out, everything[RANK])


@needs_ranks
def test_products_and_bits(strategy):
    communicator = strategy.extended.communicator
    for dtype in ("float32", "int32", "int16"):
        buffer = on_gpu(np.full(3, 2, dtype))
        communicator.all_reduce(buffer, "prod")
        assert (buffer == 2**SIZE).all()
    bits = on_gpu(np.full(3, 1 << RANK, "int32"))
    communicator.all_reduce(bits, "bor")
    assert (bits == 2**SIZE - 1).all()


@needs_ranks
def test_gathers_and_exchanges_of_rows(strategy):
    communicator = strategy.extended.communicator
    whole = on_gpu(np.zeros((SIZE, 2, 3), "float32"))
    communicator.all_gather_into(on_gpu(np.full((2, 3), RANK, "float32")), whole)
    np.testing.assert_array_equal(whole[:, 1, 1], range(SIZE))
    sent, received = list(range(SIZE)), [RANK] * SIZE  # as many rows as the receiver's rank
    rows = on_gpu(np.full((sum(sent), 2), RANK, "float32"))
    out = on_gpu(np.zeros((sum(received), 2), "float32"))
    communicator.all_to_all(rows, out, sent, received)
    np.testing.assert_array_equal(out[:, 0], np.repeat(range(SIZE), RANK))


@needs_ranks
@pytest.mark.parametrize("dtype", ["float32", "int16", "bool", "complex128"])
@pytest.mark.parametrize("root", [0, -1])
def test_broadcast(strategy, dtype, root):
    root %= SIZE
    buffer = on_gpu(of(RANK, 100, dtype))
    strategy.extended.communicator.broadcast(buffer, root)
    np.testing.assert_array_equal(buffer, of(root, 100, dtype))


@needs_ranks
def test_all_gather(strategy):
    """Of different shapes, one of them empty; and of scalars."""
    communicator = strategy.extended.communicator
    parts = communicator.all_gather(on_gpu(np.full((RANK, 3), RANK, "float16")))
    assert [part.shape for part in parts] == [(rank, 3) for rank in range(SIZE)]
    assert all((part == rank).all() for rank, part in enumerate(parts))
    assert all(isinstance(part, stand_in_cupy.ndarray) for part in parts)
    scalars = communicator.all_gather(on_gpu(np.float32(RANK)))
    assert [float(scalar) for scalar in scalars] == list(range(SIZE))


def test_the_strategy_s_values_stay_on_the_gpu(strategy):
    def step():
        context = ms.get_replica_context()
        value = {"a": on_gpu(of(RANK, 5, "float32")), "b": on_gpu(np.float32(RANK))}
        total = context.all_reduce("sum", value)
        rows = context.all_gather(on_gpu(of(RANK, 4, "float32").reshape(2, 2)), axis=1)
        return total, rows

    total, rows = strategy.run(step)
    np.testing.assert_array_equal(total["a"], combined("sum", 5, "float32"))
    assert float(total["b"]) == sum(range(SIZE))
    everyone = [of(rank, 4, "float32").reshape(2, 2) for rank in range(SIZE)]
    np.testing.assert_array_equal(rows, np.concatenate(everyone, axis=1))
    if SIZE > 1:
        assert isinstance(total["a"], stand_in_cupy.ndarray)
        assert isinstance(rows, stand_in_cupy.ndarray)
    on_host = strategy.reduce("mean", np.float32(RANK), axis=None)
    assert float(on_host) == sum(range(SIZE)) / SIZE


@needs_ranks
def test_nccl_is_used(own_gpus, comm):
    strategy = ms.MultiWorkerMirroredStrategy(comm=comm)
    assert strategy.extended.worker_devices == ("cuda:0",)
    stand_in_cupy.CALLS.clear()
    communicator = strategy.extended.communicator
    communicator.all_reduce(on_gpu(np.ones(3, "float32")))
    communicator.all_reduce(np.ones(3, "float32"))  # on the host: not by NCCL
    communicator.broadcast(on_gpu(np.ones(3, "float32")))
    assert stand_in_cupy.CALLS == ["allReduce", "broadcast"]


@needs_ranks
def test_a_second_strategy_uses_what_the_first_has_started(own_gpus, comm):
    first = ms.MultiWorkerMirroredStrategy(comm=comm).extended.communicator.transports.preferred[0]
    stand_in_cupy.CALLS.clear()
    again = ms.MultiWorkerMirroredStrategy(comm=comm).extended.communicator.transports.preferred[0]
    assert again is first
    assert stand_in_cupy.CALLS == []


def test_ranks_that_all_see_the_same_gpus(monkeypatch, comm):
    """Each has its own as the current one; they talk by NCCL unless there are more ranks than GPUs."""
    monkeypatch.setattr(gpu_transports, "why_not_proven", lambda *_: "not tried")
    stand_in_cupy.install(monkeypatch, ["0000:01:00.0", "0000:02:00.0"])
    strategy = ms.MultiWorkerMirroredStrategy(comm=comm)
    assert strategy.extended.worker_devices == (f"cuda:{RANK % 2}",)
    assert stand_in_cupy.CURRENT.ids == [RANK % 2]
    if SIZE > 1:
        expected = "through NCCL" if SIZE == 2 else "share a GPU"
        assert expected in strategy.extended.explain()


def test_a_gpu_of_the_program_s_own_choice(monkeypatch, comm):
    stand_in_cupy.install(monkeypatch, [f"0000:0{RANK}:00.0", f"0000:1{RANK}:00.0"])
    strategy = ms.MultiWorkerMirroredStrategy(comm=comm, devices=["gpu:1"])
    assert strategy.extended.worker_devices == ("cuda:1",)
    assert stand_in_cupy.CURRENT.ids == [1]
    if SIZE > 1:
        assert "through NCCL" in strategy.extended.explain()


@needs_ranks
def test_ranks_that_share_a_gpu_do_not_start_nccl(shared_gpu, comm, monkeypatch):
    monkeypatch.setattr(gpu_transports, "why_not_proven", lambda *_: "not tried")
    strategy = ms.MultiWorkerMirroredStrategy(comm=comm)
    assert "ranks 0 and 1 share a GPU" in strategy.extended.explain()
    assert stand_in_cupy.CALLS == []


@needs_ranks
def test_one_rank_without_nccl(own_gpus, comm, monkeypatch):
    monkeypatch.setattr(gpu_transports, "why_not_proven", lambda *_: "not tried")
    if RANK == LAST:
        monkeypatch.setattr(own_gpus.cuda.nccl, "available", False)
    explained = ms.MultiWorkerMirroredStrategy(comm=comm).extended.explain()
    assert f"rank {LAST} has none: ImportError: CuPy finds no libnccl" in explained


@needs_ranks
def test_nccl_that_does_not_start(own_gpus, comm, monkeypatch):
    """What two ranks see as two GPUs is one for NCCL, as parts of one by MIG are: all go another way."""
    monkeypatch.setattr(gpu_transports, "why_not_proven", lambda *_: "not tried")
    monkeypatch.setattr(gpu_transports, "shared_gpu", lambda gpus: "")
    monkeypatch.setattr(stand_in_cupy, "GPUS", ["0000:01:00.0"])
    strategy = ms.MultiWorkerMirroredStrategy(comm=comm)
    assert "Duplicate GPU" in strategy.extended.explain()
    buffer = on_gpu(np.ones(3, "float32"))
    strategy.extended.communicator.all_reduce(buffer)
    assert buffer.tolist() == [SIZE] * 3


@needs_ranks
def test_some_ranks_without_a_gpu(monkeypatch, comm):
    """Values go through the host, wherever they are."""
    stand_in_cupy.install(monkeypatch, [] if RANK == 0 else [f"0000:0{RANK}:00.0"])
    strategy = ms.MultiWorkerMirroredStrategy(comm=comm)
    assert not strategy.extended.communicator.takes_device_buffers
    value = np.ones(3, "float32") if RANK == 0 else on_gpu(np.ones(3, "float32"))
    total = strategy.reduce("sum", value, axis=None)
    assert total.tolist() == [SIZE] * 3


@needs_ranks
def test_a_buffer_on_the_gpu_here_and_on_the_host_there(strategy):
    value = np.ones(3, "float32") if RANK == 0 else on_gpu(np.ones(3, "float32"))
    errors = errors_of_ranks(lambda: strategy.extended.communicator.all_reduce(value))
    assert {name for name, _, _ in errors} == {"CollectiveMismatchError"}
    assert all("float32 on a GPU" in text for _, text, _ in errors)


@needs_ranks
def test_an_error_of_nccl_is_raised_by_all_ranks(own_gpus, comm, monkeypatch):
    """Found on one rank while the others wait for their GPUs; from then on nobody uses NCCL."""
    strategy = ms.MultiWorkerMirroredStrategy(comm=comm)
    communicator = strategy.extended.communicator
    stand_in_cupy.kernels_never_end(monkeypatch)
    if RANK == LAST:
        broken = stand_in_cupy.NcclError("NCCL_ERROR_SYSTEM_ERROR: remote process exited")
        monkeypatch.setattr(stand_in_cupy.NcclCommunicator, "failure", broken)
    stand_in_cupy.CALLS.clear()
    errors = errors_of_ranks(lambda: communicator.all_reduce(on_gpu(np.ones(3, "float32"))))
    assert all(
        f"NCCL was aborted on all ranks: rank {LAST}: NcclError" in text for _, text, _ in errors
    )
    assert stand_in_cupy.CALLS == ["allReduce", "abort"]
    errors = errors_of_ranks(lambda: communicator.all_reduce(on_gpu(np.ones(3, "float32"))))
    assert all("NCCL cannot be used any more" in text for _, text, _ in errors)
    on_host = np.ones(3)
    communicator.all_reduce(on_host)
    assert on_host.tolist() == [SIZE] * 3


@needs_ranks
def test_buffers_on_another_gpu_of_the_rank(monkeypatch, comm):
    """They are copied to the one that the rank uses, and back."""
    stand_in_cupy.install(monkeypatch, [f"0000:0{RANK}:00.0", f"0000:1{RANK}:00.0"])
    strategy = ms.MultiWorkerMirroredStrategy(comm=comm)
    monkeypatch.setattr(stand_in_cupy, "HOME", [1])  # where arrays are from now on
    buffer = on_gpu(np.ones(3, "float32"))
    strategy.extended.communicator.all_reduce(buffer)
    assert buffer.tolist() == [SIZE] * 3


@needs_ranks
def test_a_rank_opens_a_context_on_its_gpu_only(monkeypatch, comm):
    """It sees those of all ranks; a new thread, as the one that starts NCCL, begins with the first."""
    stand_in_cupy.install(monkeypatch, [f"0000:0{rank}:00.0" for rank in range(SIZE)])
    strategy = ms.MultiWorkerMirroredStrategy(comm=comm)
    monkeypatch.setattr(stand_in_cupy, "HOME", [RANK])
    strategy.extended.communicator.all_reduce(on_gpu(np.ones(3, "float32")))
    assert sorted(stand_in_cupy.OPENED) == [RANK]


@needs_ranks
def test_versions_of_nccl_that_differ(own_gpus, comm, monkeypatch):
    monkeypatch.setattr(gpu_transports, "why_not_proven", lambda *_: "not tried")
    if RANK == LAST:
        monkeypatch.setattr(own_gpus.cuda.nccl, "get_version", lambda: 22907)
    explained = ms.MultiWorkerMirroredStrategy(comm=comm).extended.explain()
    assert f"rank 0 has NCCL 22705, rank {LAST} NCCL 22907" in explained


STAGED = "in chunks through pinned host memory, not through NCCL"
OTHER_WAYS = {
    "shared": (STAGED, "ranks 0 and 1 share a GPU. Start one rank per GPU (--gpus-per-task=1"),
    "versions": (
        STAGED,
        f"rank 0 has NCCL 22705, rank {LAST} NCCL 22907. Start all ranks with one environment",
    ),
    "no NCCL": (STAGED, f"rank {LAST} has none: ImportError: CuPy finds no libnccl. Install NCCL"),
    "no GPU": ("through host memory", f"rank {LAST} sees no GPU. Start one rank per GPU"),
}


@needs_ranks
@pytest.mark.parametrize("cause", OTHER_WAYS)
def test_another_way_is_said_once(cause, comm, monkeypatch, notices):
    """By the first rank, with the reason and what to do; not where the program has chosen to go through the host."""
    monkeypatch.setattr(gpu_transports, "why_not_proven", lambda *_: "not tried")
    monkeypatch.setattr(gpu_advice, "notices", [])
    names = ["0000:01:00.0" if cause == "shared" else f"0000:0{RANK}:00.0"]
    cupy = stand_in_cupy.install(monkeypatch, [] if (cause, RANK) == ("no GPU", LAST) else names)
    if RANK == LAST:
        monkeypatch.setattr(cupy.cuda.nccl, "available", cause != "no NCCL")
        monkeypatch.setattr(
            cupy.cuda.nccl, "get_version", lambda: 22907 if cause == "versions" else 22705
        )
    said = []
    for options in ("MPI", "RING", "AUTO", "AUTO") if cause == "shared" else ("AUTO",):
        duplicate = comm.Dup()
        options = ms.CommunicationOptions(implementation=options)
        ms.MultiWorkerMirroredStrategy(comm=duplicate, communication_options=options)
        said.append([text for text in notices if text.startswith("values on GPUs go ")])
        duplicate.Free()
    way, reason = OTHER_WAYS[cause]
    assert said[:-2] in ([], [[], []])
    assert [len(texts) for texts in said[-2:]] == [int(RANK == 0)] * len(said[-2:])
    assert all(text[18:].startswith(f"{way}, because {reason}") for text in said[-1]), said


@needs_ranks
def test_nothing_is_said_of_ranks_that_have_chosen_the_host(own_gpus, comm, monkeypatch, notices):
    monkeypatch.setattr(gpu_advice, "notices", [])
    ms.MultiWorkerMirroredStrategy(comm=comm, devices=["cpu:0"] if RANK == LAST else None)
    assert not [text for text in notices if text.startswith("values on GPUs go ")]


@pytest.mark.mpi(min_size=4)
def test_groups_within_nodes_that_do_not_start(own_gpus, comm, monkeypatch, notices):
    """The group of all ranks does, and is used for all."""
    monkeypatch.setattr(gpu_advice, "notices", [])
    monkeypatch.setattr(gpu_transports, "why_not_proven", lambda *_: "not tried")
    start = stand_in_cupy.NcclCommunicator.__init__

    def start_all(self, size, *args):
        if size < SIZE:
            raise stand_in_cupy.NcclError("NCCL_ERROR_SYSTEM_ERROR")
        start(self, size, *args)

    monkeypatch.setattr(stand_in_cupy.NcclCommunicator, "__init__", start_all)
    communicator = communicator_for(comm)
    gpu_transports.use_gpus(
        communicator, [gpu_transports.Gpu(rank // 2, f"{rank}") for rank in range(4)], 0
    )
    # All ranks fail: the first to say so is named.
    reason = r"through NCCL 22705; not by node: NCCL does not start on rank [0-3]:"
    assert re.search(reason, communicator.explain())
    said = [text for text in notices if text.startswith("values on GPUs go through NCCL 22705 ")]
    assert len(said) == (RANK == 0)
    assert all("large ones not by node, because NCCL does not start" in text for text in said)


# Whether MPI takes device memory: two processes try, and none of their ends is an end of ours.


def reason_against(cupy, tmp_path, monkeypatch):
    """What rank 0 finds where the text `cupy` is that module; the others sleep meanwhile. Called by: every rank."""
    reason = None
    if RANK == 0:
        (tmp_path / "cupy.py").write_text(cupy)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        reason = device_memory_proof.reason_against.__wrapped__("cupy", 0)
    found = WORLD.Ibarrier()
    while not found.Test():
        time.sleep(0.01)
    return WORLD.bcast(reason)


def test_memory_that_mpi_takes(tmp_path, monkeypatch):
    assert reason_against(cupy_with(), tmp_path, monkeypatch) == ""


def test_memory_that_mpi_reads_and_does_not_write(tmp_path, monkeypatch):
    copied = cupy_with("copies.append(self.copy()) or copies[-1].ctypes.data")
    assert "elements are wrong" in reason_against(copied, tmp_path, monkeypatch)


def test_memory_that_mpi_crashes_on(tmp_path, monkeypatch):
    assert "exit code" in reason_against(cupy_with("4096"), tmp_path, monkeypatch)


def test_this_mpi_is_not_taken_for_cuda_aware(tmp_path, monkeypatch):
    """Tried for real: without CuPy, or without a GPU, the two processes fail."""
    missing = "raise ModuleNotFoundError('there is no CUDA')"
    assert "there is no CUDA" in reason_against(missing, tmp_path, monkeypatch)


def test_a_trial_that_does_not_end():
    sleeping = [sys.executable, "-c", "import time; time.sleep(60)"]
    assert device_memory_proof.run(sleeping, dict(os.environ), 0.5) == (
        False,
        f"no end within {RANK_WAITS_FOR_TRIAL_OF_DEVICE} s",
    )


def test_what_is_proven_is_kept(monkeypatch):
    tries = []
    monkeypatch.setattr(device_memory_proof, "commands", lambda *_: [(["mpiexec"], {})])
    monkeypatch.setattr(device_memory_proof, "run", lambda *_: (tries.append(1) or True, ""))
    device_memory_proof.reason_against.cache_clear()
    try:
        assert device_memory_proof.reason_against("torch", 0) == ""
        assert device_memory_proof.reason_against("torch", 0) == ""
    finally:
        device_memory_proof.reason_against.cache_clear()
    assert tries == [1]
