"""Buffers on GPUs through NCCL.

Only `_Cupy` and `version` use `cupy.cuda.nccl`; another binding of NCCL (NVIDIA's nccl4py) would replace only them.
Both import cupy on first use. If the program has imported torch before, CuPy then uses the libnccl that torch brings.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpistrat.arrays import Array, dtype_name, num_elements
from mpistrat.communicators.reduction import Reduction
from mpistrat.communicators.reduction.arithmetic import scale
from mpistrat.communicators.reduction.as_float32 import combined_as_float32
from mpistrat.communicators.transports.accelerator.buffers import DeviceTransport
from mpistrat.communicators.transports.accelerator.collective_group import CollectiveGroup
from mpistrat.communicators.transports.accelerator.library import DeviceLibrary
from mpistrat.liveness.ending.abort_channel import AbortChannel

OPS = ("sum", "max", "min", "prod")
DTYPES = ("int8", "uint8", "int32", "uint32", "int64", "uint64", "float32", "float64")


class _Cupy:
    """A rank's NCCL communicator. All ranks make it together, each with its own GPU as the current device."""

    def __init__(self, size: int, unique_id: Any, rank: int) -> None:
        from cupy.cuda import nccl

        self._comm = nccl.NcclCommunicator(size, unique_id, rank)
        self._dtypes = {name: _number(nccl, name) for name in DTYPES}
        self._ops = {op: _number(nccl, op) for op in OPS}
        self._group_start = nccl.groupStart
        self._group_end = nccl.groupEnd

    @staticmethod
    def unique_id() -> Any:
        from cupy.cuda import nccl

        return nccl.get_unique_id()

    def all_reduce(self, pointer: int, count: int, dtype: str, op: str, stream: int) -> None:
        dtype_number = self._dtypes[dtype]
        op_number = self._ops[op]
        self._comm.allReduce(pointer, pointer, count, dtype_number, op_number, stream)

    def broadcast_bytes(self, pointers: list[int], counts: list[int], stream: int) -> None:
        """Start a broadcast from each rank `r` with `counts[r]` > 0, all as one NCCL group. Does not wait.

        Args:
            pointers: for each rank, an address on this rank's GPU: for this rank, the bytes that it sends; for another
                rank, the memory that gets the other rank's bytes.
            counts: for each rank, how many bytes it sends.
            stream: a `cudaStream_t` as an integer.
        """
        byte = self._dtypes["uint8"]
        self._group_start()
        for root, (pointer, count) in enumerate(zip(pointers, counts, strict=True)):
            if count:
                self._comm.broadcast(pointer, pointer, count, byte, root, stream)
        self._group_end()

    def raise_if_failed(self) -> None:
        self._comm.check_async_error()

    def abort(self) -> None:
        self._comm.abort()


def _number(nccl: Any, name: str) -> int:
    """Return the number that NCCL has for a dtype or an operation: `NCCL_FLOAT32` for "float32"."""
    return getattr(nccl, f"NCCL_{name.upper()}")


def version() -> int:
    """Return the version of the NCCL that CuPy would use: 22705 is 2.27.5.

    Raises: ImportError if CuPy is not installed or finds no libnccl.
    """
    from cupy.cuda import nccl

    if not nccl.available:
        raise ImportError("CuPy finds no libnccl")
    return int(nccl.get_version())


class NcclTransport(DeviceTransport):
    """Moves CuPy's arrays on GPUs by NCCL. Each rank has a GPU of its own.

    NCCL works on a stream of its own, after the work that the caller's current stream holds. A collective returns when
    the GPU has done it. Floats of 16 bits are summed as float32, as by every transport. Dtypes that NCCL does not
    combine (complex numbers, booleans, integers of 16 bits) and bitwise operations go through the host.

    An error in NCCL, a stall, or another rank's error aborts the NCCL communicator on all ranks that wait in it. After
    that the ranks can combine no buffer on a GPU any more.
    """

    _group: CollectiveGroup[_Cupy]
    _stream: Any

    def start(self, library: DeviceLibrary, channel: AbortChannel) -> str:
        """Join the ranks in an NCCL communicator, and try a first reduction. Collective.

        Called by: `gpu_transports`, once.
        Args:
            library: CuPy on this rank's GPU.
            channel: the abort channel between the ranks of `host`: it carries a rank's error to the other ranks.
        Returns: why NCCL cannot be used, the same text on all ranks; "" if it can be used.
        """
        self._group = CollectiveGroup("NCCL", self.host, channel, self._watch, _Cupy.abort)
        unique_id = None
        why = ""
        if self.rank == 0:
            try:
                unique_id = _Cupy.unique_id()
            except Exception as error:
                why = f"NCCL does not start on rank 0: {type(error).__name__}: {error}"
        unique_id, why = self.host.broadcast_object((unique_id, why))
        if why:
            return why

        def make() -> _Cupy:
            with library.device():
                return _Cupy(self.size, unique_id, self.rank)

        def sum_of_ones(nccl: _Cupy) -> float:
            with library.device():
                ones = library.empty((1,), "float32")
                ones[...] = 1
                stream = self._stream = library.new_stream()
                stream.wait_event(library.record(library.current_stream()))
                pointer = library.pointer(ones)
                nccl.all_reduce(pointer, 1, "float32", "sum", library.handle(stream))
                library.current_stream().wait_event(library.record(stream))
                return float(ones[0])

        return self._group.start(make, sum_of_ones)

    def _combine(self, buffer: Array, reduction: Reduction) -> None:
        name = dtype_name(buffer)
        if combined_as_float32(buffer, reduction, self._combine):
            return
        if name not in DTYPES or reduction.op not in OPS:
            self.combine_on_host(buffer, reduction)
            return
        library = self.library(buffer)
        pointer = library.pointer(buffer)
        count = num_elements(buffer)
        self._run(library, _Cupy.all_reduce, pointer, count, name, reduction.op)
        scale(buffer, reduction.scale)

    def _spread(self, buffer: Array, root: int) -> None:
        library = self.library(buffer)
        counts = [0] * self.size
        counts[root] = int(buffer.nbytes)
        pointers = [library.pointer(buffer)] * self.size
        self._run(library, _Cupy.broadcast_bytes, pointers, counts)

    def _gather(self, buffer: Array) -> list[Array]:
        library = self.library(buffer)
        shapes = self.host.all_gather_object(tuple(buffer.shape))
        parts = [library.empty(shape, buffer.dtype) for shape in shapes]
        parts[self.rank][...] = buffer
        pointers = [library.pointer(p) for p in parts]
        counts = [int(p.nbytes) for p in parts]
        self._run(library, _Cupy.broadcast_bytes, pointers, counts)
        return parts

    def _run(self, library: DeviceLibrary, call: Callable[..., None], *args: Any) -> None:
        """Let `call` submit work to NCCL's stream, and wait until the GPU has done that work.

        Args: call: takes the NCCL communicator, `args`, and the stream as a `cudaStream_t`.
        Raises: RuntimeError, StallError or RankLostError if NCCL was or is aborted.
        """
        with self._group as nccl:
            self._stream.wait_event(library.record(library.current_stream()))
            call(nccl, *args, library.handle(self._stream))
            self.wait(library, library.record(self._stream))

    def wait(self, library: DeviceLibrary, event: Any) -> None:
        """Wait until the GPU has reached `event`, or NCCL or another rank fails.

        Raises: the error of NCCL, or FailedElsewhereError if another rank has failed. The wait is inside the `with`
            block of a `CollectiveGroup`: this aborts NCCL on all ranks, and makes a RuntimeError of either.
        """

        def done() -> bool:
            nccl = self._group.group
            if nccl is not None:
                nccl.raise_if_failed()
            return library.is_done(event)

        self._group.wait_until(done)
