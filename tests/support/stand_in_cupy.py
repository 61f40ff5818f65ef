"""A stand-in for CuPy and its NCCL on machines without a GPU: it keeps "device" memory on the host.

It speaks the part of CuPy's documented interface that mpistrat uses, and nothing else. Streams are real queues: what is
given to one runs only when an event behind it is asked for, so code that forgets to wait reads what was there before.
NCCL's calls really combine memory between the ranks, over MPI, and refuse two ranks on one GPU as NCCL does,
but where NCCL_HOSTID names another host for each.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import numpy as np

from mpistrat.machine import devices

NCCL_DTYPES = ("int8", "uint8", "int32", "uint32", "int64", "uint64", "float32", "float64")
GPUS: list[str] = []  # what this process sees, by PCI bus id
CALLS: list[str] = []  # of NCCL


class ndarray(np.ndarray):  # noqa: N801 - CuPy's name
    __array_priority__ = 1.0  # what NumPy makes of several such arrays is one, too

    @property
    def data(self) -> Any:
        return types.SimpleNamespace(ptr=self.ctypes.data)

    @property
    def device(self) -> Any:
        return Device(HOME[-1])

    def get(
        self, stream: Any = None, order: str = "C", out: Any = None, blocking: bool = True
    ) -> np.ndarray:
        plain = self.view(np.ndarray)
        if out is None:
            return plain.copy()
        assert not blocking, "a copy that waits on the host is no copy in the background"
        stream.give(lambda: np.copyto(out, plain))
        return out

    def set(self, arr: np.ndarray, stream: Any = None) -> None:
        stream.give(lambda: np.copyto(self.view(np.ndarray), arr))

    def __setitem__(self, key: Any, value: Any) -> None:
        current_stream().give(lambda: np.ndarray.__setitem__(self, key, value))

    def __getitem__(self, key: Any) -> Any:
        current_stream().synchronize()
        return super().__getitem__(key)


class Device:
    def __init__(self, index: int) -> None:
        self.id = index
        self.pci_bus_id = GPUS[index]

    def use(self) -> None:
        CURRENT.ids[-1] = self.id
        CURRENT.open()

    def __enter__(self) -> None:
        CURRENT.ids.append(self.id)
        CURRENT.open()

    def __exit__(self, *_: object) -> None:
        CURRENT.ids.pop()
        CURRENT.open()  # CuPy makes the device current again that was so before


class Current(threading.local):
    """The devices that a thread has made current, last the one that is so now; a new thread begins with device 0."""

    def __init__(self) -> None:
        self.ids = [0]

    def open(self) -> None:
        """A call of CUDA's that needs a context opens it on the current device."""
        OPENED.add(self.ids[-1])


OPENED: set[int] = set()  # on which devices this process has contexts
CURRENT = Current()
HOME = [0]  # where all arrays are


class Stream:
    """Attributes: is_early: runs what it is given at once, as a stream may that waits for nothing."""

    is_early = False

    def __init__(self, non_blocking: bool = False) -> None:
        self.work: list[Callable[[], None]] = []
        self.ptr = id(self)
        STREAMS[self.ptr] = self

    def give(self, work: Callable[[], None]) -> None:
        self.work.append(work)
        while self.is_early and self.work:
            self.work.pop(0)()

    def record(self) -> Event:
        event = Event(self)
        self.give(event.reach)
        return event

    def wait_event(self, event: Event) -> None:
        self.give(event.run_until_done)

    def synchronize(self) -> None:
        self.record().run_until_done()


STREAMS: dict[int, Stream] = {}


class NullStream(Stream):
    """The current one: NumPy computes at once, and what it waits for must be there before."""

    def give(self, work: Callable[[], None]) -> None:
        work()


NULL = NullStream()
STREAM: list[Stream] = [NULL]  # the current one, last


def current_stream() -> Stream:
    return STREAM[-1]


class Event:
    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._reached = False

    def reach(self) -> None:
        self._reached = True

    def run_until_done(self) -> None:
        while not self._reached:
            self._stream.work.pop(0)()

    @property
    def done(self) -> bool:
        """A GPU works on while nobody looks; this one does a piece of work when it is looked at."""
        CURRENT.open()
        if not self._reached:
            self._stream.work.pop(0)()
        return self._reached


class NcclError(RuntimeError):
    pass


class NcclCommunicator:
    """`cupy.cuda.nccl.NcclCommunicator(ndev, commId, rank)`, over MPI.

    Attributes:
        failure: what `check_async_error` raises from now on.
    """

    failure: Exception | None = None

    def __init__(self, ndev: int, commId: tuple[int, ...], rank: int) -> None:  # noqa: N803
        from mpi4py import MPI

        assert len(commId) == 128
        self._comm = MPI.COMM_WORLD.Split(0, rank)
        assert (self._comm.size, self._comm.rank) == (ndev, rank)
        assert self._comm.allgather(commId) == [commId] * ndev
        CURRENT.open()
        host = os.environ.get("NCCL_HOSTID")
        gpu = GPUS[CURRENT.ids[-1]]
        gpus = self._comm.allgather((host, gpu))
        if len(set(gpus)) < ndev:
            raise NcclError("NCCL_ERROR_INVALID_USAGE: Duplicate GPU detected")
        self._aborted = False

    def _launch(self, stream: int, work: Callable[[], None]) -> None:
        assert not self._aborted
        STREAMS[stream].give(work)

    def allReduce(  # noqa: N802
        self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, stream: int
    ) -> None:
        from mpi4py import MPI

        CALLS.append("allReduce")
        operation = [MPI.SUM, MPI.PROD, MPI.MAX, MPI.MIN][op]

        def work() -> None:
            result = np.empty(count, NCCL_DTYPES[datatype])
            self._comm.Allreduce(_memory(sendbuf, count, datatype), result, operation)
            _memory(recvbuf, count, datatype)[:] = result

        self._launch(stream, work)

    def broadcast(
        self, sendbuff: int, recvbuff: int, count: int, datatype: int, root: int, stream: int
    ) -> None:
        CALLS.append("broadcast")

        def work() -> None:
            if self._comm.rank == root:
                _memory(recvbuff, count, datatype)[:] = _memory(sendbuff, count, datatype)
            self._comm.Bcast(_memory(recvbuff, count, datatype), root)

        self._launch(stream, work)

    def check_async_error(self) -> None:
        if self.failure is not None:
            raise self.failure

    def abort(self) -> None:
        CALLS.append("abort")
        CURRENT.open()
        self._aborted = True


def _memory(pointer: int, count: int, datatype: int) -> np.ndarray:
    dtype = np.dtype(NCCL_DTYPES[datatype])
    raw: Any = (ctypes.c_uint8 * (count * dtype.itemsize)).from_address(pointer)
    return np.frombuffer(raw, dtype)


def asarray(array: Any, dtype: Any = None) -> ndarray:
    return np.asarray(array, dtype).view(ndarray)


def empty(shape: Any, dtype: Any) -> ndarray:
    numbers = np.full(shape, 77).astype(dtype)
    return numbers.view(ndarray)


def install(monkeypatch: Any, gpus: list[str]) -> Any:
    """Have this process import the stand-in as `cupy`, and see `gpus`."""
    cupy: Any = types.ModuleType("cupy")
    cupy.ndarray = ndarray
    cupy.asarray = asarray
    cupy.array = lambda array: np.array(array).view(ndarray)
    cupy.empty = empty
    cuda: Any = types.ModuleType("cupy.cuda")
    cuda.Device = Device
    cuda.Stream = Stream
    cuda.get_current_stream = current_stream
    cuda.runtime = types.SimpleNamespace(getDeviceCount=lambda: len(GPUS))
    nccl: Any = types.ModuleType("cupy.cuda.nccl")
    nccl.available = True
    nccl.get_version = lambda: 22705
    nccl.get_unique_id = lambda: tuple(range(128))
    nccl.NcclCommunicator = NcclCommunicator
    nccl.NcclError = NcclError
    nccl.groupStart = nccl.groupEnd = lambda: None
    for number, name in enumerate(NCCL_DTYPES):
        setattr(nccl, f"NCCL_{name.upper()}", number)
    nccl.NCCL_SUM, nccl.NCCL_PROD, nccl.NCCL_MAX, nccl.NCCL_MIN = range(4)
    cupy.cuda = cuda
    cuda.nccl = nccl
    cupyx: Any = types.ModuleType("cupyx")
    cupyx.empty_pinned = np.empty
    modules = {"cupy": cupy, "cupy.cuda": cuda, "cupy.cuda.nccl": nccl, "cupyx": cupyx}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(sys.modules[__name__], "GPUS", gpus)
    torch = sys.modules.get("torch")
    if torch is not None:  # whose GPUs, if this machine has some, would be taken first
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys.modules[__name__], "CURRENT", Current())
    monkeypatch.setattr(devices, "chosen", None)
    CALLS.clear()
    OPENED.clear()
    return cupy


def kernels_never_end(monkeypatch: Any) -> None:
    """What NCCL is given from now on stays on its stream for ever, as where a peer is gone."""

    def launch(communicator: NcclCommunicator, stream: int, work: Callable[[], None]) -> None:
        def kernel() -> None:
            STREAMS[stream].work.insert(0, kernel)

        STREAMS[stream].give(kernel)

    monkeypatch.setattr(NcclCommunicator, "_launch", launch)
