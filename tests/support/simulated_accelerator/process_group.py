"""`ProcessGroupSim`: a native process group of the simulated accelerator, as `ProcessGroupNCCL` is of CUDA.

A collective returns when it is on the group's own stream, which waits for what the caller's current stream holds;
`work.wait()` makes the caller's current stream wait for its end, and the host never waits. The numbers of all ranks are
really combined, by a thread of each group; they appear in device memory as late as they may.

As NCCL it refuses tensors on other devices, of dtypes that it has no kernels for, and that leave out bytes; two ranks
on one device, but where NCCL_HOSTID names another host for each. It does not end when another rank is gone, but when
somebody calls `abort()`, after which its destructor takes long. Each rank sums in the order of ranks, in the dtype of
the tensors.

What it does not show: what else NCCL's watchdog does, deadlocks of kernels that need the same multiprocessors, and the
order in which a real group sums.
"""

from __future__ import annotations

import datetime
import os
import pickle
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from support.simulated_accelerator.links import Links

BACKEND = "simccl"
SECONDS_OF_A_WATCHDOG, SECONDS_BETWEEN_LOOKS = 10.0, 0.1
# What goes wrong on this rank: "constructor" and "connect" raise, with "hang" no kernel ends until `abort()`.
faults = set(filter(None, os.environ.get("SIMULATED_FAULTS", "").split(",")))

Tensors = Sequence[torch.Tensor]
Combine = Callable[[list[list[torch.Tensor]]], list[torch.Tensor]]

_REDUCTIONS: dict[Any, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.AVG: torch.add,
    dist.ReduceOp.PREMUL_SUM: torch.add,
    dist.ReduceOp.PRODUCT: torch.mul,
    dist.ReduceOp.MIN: torch.minimum,
    dist.ReduceOp.MAX: torch.maximum,
}
# NCCL has no kernels for others; it moves complex numbers as pairs, and booleans as bytes.
_DTYPES = {
    torch.int8, torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.bool, torch.complex64, torch.complex128,
}  # fmt: skip


class Options:
    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self._timeout = datetime.timedelta(minutes=10)
        self.group_name = ""
        self.global_ranks_in_group: list[int] = []


class WorkSim(dist.Work):
    """A collective that is on the group's stream.

    Args:
        end: an event after it; None where it runs on the caller's own stream.
        tensors: what it reads and writes, kept until somebody waits for it or it has ended.
    """

    def __init__(
        self,
        device: torch.device,
        end: torch.Event | None,
        tensors: list[torch.Tensor],
        host_waits: bool = False,
    ) -> None:
        super().__init__()
        self._device, self._end, self._tensors, self._host_waits = device, end, tensors, host_waits
        self._result = list(tensors)

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        stream = torch.accelerator.current_stream(self._device)
        if self._end is not None:
            stream.wait_event(self._end)
        self._tensors.clear()
        if self._host_waits:
            stream.synchronize()
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._end is None or self._end.query()

    is_success = is_completed

    def exception(self) -> None:
        return None

    def result(self) -> list[torch.Tensor]:
        return self._result

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future(
            devices=[self._device]
        )
        side = torch.Stream(self._device)
        if self._end is not None:
            side.wait_event(self._end)
        with side:
            future.set_result(self._result)
        return future


class ProcessGroupSim(dist.ProcessGroup):
    """Args: store: of this group alone; the ranks find each other through it at the first call."""

    Options = Options

    def __init__(self, store: c10d.Store, rank: int, size: int, options: Any = None) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._aborted = threading.Event()
        if "constructor" in faults:
            raise RuntimeError(
                "simulated fault: the constructor of ProcessGroupSim fails on this rank"
            )
        self._store, self._rank, self._size = store, rank, size
        self.options = options or Options()
        self._connected: Links | None = None
        self._streams: dict[int, torch.Stream] = {}
        self._jobs: queue.SimpleQueue[tuple[int, Callable[[Tensors], Tensors]] | None] = (
            queue.SimpleQueue()
        )
        self._under_way: dict[int, tuple[torch.Stream, list[torch.Tensor]]] = {}
        self._order = (
            threading.Lock()
        )  # of calls of several threads: the stream's and the thread's must be one
        self._thread: threading.Thread | None = None

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    getRank, getSize = rank, size  # noqa: N815

    def name(self) -> str:
        return BACKEND

    def getBackendName(self) -> str:  # noqa: N802
        return BACKEND

    @property
    def group_name(self) -> str:
        return self.options.group_name

    @property
    def _links(self) -> Links:
        assert self._connected is not None, "no thread runs before the ranks have met"
        return self._connected

    # The life of a group

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Meet the other ranks. Blocks until all have come. Raises: RuntimeError for two ranks on one device."""
        if self._thread is not None:
            return
        if "connect" in faults:
            raise RuntimeError("simulated fault: this rank fails to connect")
        uuid = torch.get_device_module(device).get_device_properties(device).uuid
        uuid = f"{os.environ.get('NCCL_HOSTID', '')} {uuid}"  # NCCL compares names of hosts, too
        self._store.set(f"device/{self._rank}", str(uuid))
        uuids = [self._store.get(f"device/{rank}").decode() for rank in range(self._size)]
        for rank, other in enumerate(uuids):
            if rank != self._rank and other == str(uuid):
                raise RuntimeError(
                    f"Duplicate GPU detected : rank {self._rank} and rank {rank} both on device {uuid}"
                )
        self._connected = Links(self._store, self._rank, self._size)
        self._thread = threading.Thread(
            target=self._run_jobs, name=f"{BACKEND} {self.group_name}", daemon=True
        )
        self._thread.start()

    def abort(self) -> None:
        """Not collective. Kernels under way end; what they should have written is not there."""
        self._aborted.set()
        for collective in list(self._under_way):
            torch.ops.simulated.end_collective(collective, [])
        self._jobs.put(None)
        if self._connected is not None:
            self._connected.close()

    def __del__(self) -> None:
        """NCCL's destructor waits for its watchdog, which sleeps for a minute after an error of a call."""
        if self._aborted.is_set():
            print("an aborted group waits for its watchdog", file=sys.__stderr__, flush=True)
            time.sleep(SECONDS_OF_A_WATCHDOG)

    def shutdown(self) -> None:
        """Collectives under way end first."""
        if self._thread is not None and not self._aborted.is_set():
            self._jobs.put(None)
            self._thread.join()
            self._links.close()

    def _run_jobs(self) -> None:
        while (job := self._jobs.get()) is not None:
            collective, combine = job
            if "hang" in faults:
                self._aborted.wait()
            results: Tensors = []
            try:
                inputs = torch.ops.simulated.collective_inputs(collective)
                if not self._aborted.is_set():
                    results = combine(inputs)
            except Exception:
                # Another rank is gone, say: nobody tells a kernel. NCCL's watchdog finds out when it looks next.
                if not self._aborted.wait(SECONDS_BETWEEN_LOOKS):
                    traceback.print_exc(file=sys.__stderr__)
                    self._aborted.wait()
            torch.ops.simulated.end_collective(collective, results)

    def _submit(
        self,
        inputs: Tensors,
        outputs: Tensors,
        combine: Callable[[Tensors], Tensors],
        opts: Any,
        host_waits: bool = False,
    ) -> WorkSim:
        tensors = [*inputs, *outputs]
        device = _check(tensors)
        if self._aborted.is_set():
            raise RuntimeError(
                f"the communicator of group {self.group_name!r} was aborted on rank {self._rank}"
            )
        with self._order:
            self.eager_connect_single_device(device)
            self._forget_ended()
            current = torch.accelerator.current_stream(device)
            if not getattr(opts, "asyncOp", True):
                self._start(inputs, outputs, combine, current)
                return WorkSim(device, None, [], host_waits)
            stream = self._streams.get(device.index)
            if stream is None:
                stream = self._streams[device.index] = torch.Stream(device)
            stream.wait_stream(current)
            collective = self._start(inputs, outputs, combine, stream)
            self._under_way[collective] = stream, tensors
            return WorkSim(device, stream.record_event(), tensors, host_waits)

    def _start(
        self,
        inputs: Tensors,
        outputs: Tensors,
        combine: Callable[[Tensors], Tensors],
        stream: torch.Stream,
    ) -> int:
        collective: int = torch.ops.simulated.start_collective(
            list(inputs), list(outputs), stream.device_index, stream.stream_id
        )
        self._under_way[collective] = stream, []
        self._jobs.put((collective, combine))
        # Another thread may have aborted since `_submit` has looked, and the group's thread may have ended.
        if self._aborted.is_set():
            torch.ops.simulated.end_collective(collective, [])
        return collective

    def _forget_ended(self) -> None:
        """Let go of tensors that nobody waits for: their memory is free when the group's stream is done with it."""
        for collective in [*filter(torch.ops.simulated.collective_has_ended, self._under_way)]:
            stream, tensors = self._under_way.pop(collective)
            for tensor in tensors:
                tensor.record_stream(stream)

    # What the thread does with copies of the inputs in host memory, all flat

    def _exchange(self, inputs: Tensors) -> list[list[torch.Tensor]]:
        """The inputs of every rank, which have the same sizes."""
        packed = torch.cat([tensor.view(torch.uint8) for tensor in inputs]).numpy().tobytes()
        sizes = [tensor.nbytes for tensor in inputs]
        ranks = [
            torch.frombuffer(bytearray(data), dtype=torch.uint8)
            for data in self._links.exchange(packed)
        ]
        return [
            [
                part.clone().view(like.dtype)
                for part, like in zip(rank.split(sizes), inputs, strict=True)
            ]
            for rank in ranks
        ]

    def _together(self, combine: Combine) -> Callable[[Tensors], Tensors]:
        return lambda inputs: combine(self._exchange(inputs))

    def _send(self, to: int) -> Callable[[Tensors], Tensors]:
        def job(inputs: Tensors) -> Tensors:
            self._links.send(inputs[0].view(torch.uint8).numpy().tobytes(), to)
            return []

        return job

    def _receive(self, like: torch.Tensor, source: int) -> Callable[[Tensors], Tensors]:
        return lambda inputs: [
            torch.frombuffer(bytearray(self._links.receive(source)), dtype=like.dtype)
        ]

    # Collectives, with the arguments of torch's own groups

    def allreduce(self, tensors: Tensors, opts: Any = None, timeout: Any = None) -> WorkSim:
        tensors, opts = _listed(tensors), opts or c10d.AllreduceOptions()

        def combine(ranks: list[list[torch.Tensor]]) -> list[torch.Tensor]:
            return [_reduce(same, opts.reduceOp) for same in zip(*ranks, strict=True)]

        return self._submit(tensors, tensors, self._together(combine), opts)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Tensors, opts: Any) -> WorkSim:
        tensors = _listed(tensors)
        outputs = tensors if self._rank == opts.rootRank else []

        def combine(ranks: list[list[torch.Tensor]]) -> list[torch.Tensor]:
            return [_reduce(same, opts.reduceOp) for same in zip(*ranks, strict=True)][
                : len(outputs)
            ]

        return self._submit(tensors, outputs, self._together(combine), opts)

    def broadcast(self, tensors: Tensors, opts: Any) -> WorkSim:
        tensors = _listed(tensors)
        return self._submit(
            tensors, tensors, self._together(lambda ranks: ranks[opts.rootRank]), opts
        )

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> WorkSim:
        (into,), (tensor,) = outputs, inputs
        return self._submit(
            [tensor], into, self._together(lambda ranks: [r[0] for r in ranks]), opts
        )

    def _allgather_base(
        self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None
    ) -> WorkSim:
        return self.allgather_into_tensor_coalesced([output], [tensor], opts)

    all_gather_single = _allgather_base

    def allgather_into_tensor_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> WorkSim:
        def combine(ranks: list[list[torch.Tensor]]) -> list[torch.Tensor]:
            return [torch.cat(same) for same in zip(*ranks, strict=True)]

        return self._submit(inputs, outputs, self._together(combine), opts)

    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def reduce_scatter(
        self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None
    ) -> WorkSim:
        (output,), (parts,), opts = outputs, inputs, opts or c10d.ReduceScatterOptions()

        def combine(ranks: list[list[torch.Tensor]]) -> list[torch.Tensor]:
            return [_reduce([rank[self._rank] for rank in ranks], opts.reduceOp)]

        return self._submit(parts, [output], self._together(combine), opts)

    def _reduce_scatter_base(
        self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None
    ) -> WorkSim:
        return self.reduce_scatter_tensor_coalesced([output], [tensor], opts)

    reduce_scatter_single = _reduce_scatter_base

    def reduce_scatter_tensor_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> WorkSim:
        opts = opts or c10d.ReduceScatterOptions()

        def combine(ranks: list[list[torch.Tensor]]) -> list[torch.Tensor]:
            mine = [[tensor.chunk(self._size)[self._rank] for tensor in rank] for rank in ranks]
            return [_reduce(same, opts.reduceOp) for same in zip(*mine, strict=True)]

        return self._submit(inputs, outputs, self._together(combine), opts)

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> WorkSim:
        into = list(outputs[0]) if self._rank == opts.rootRank else []
        return self._submit(
            inputs, into, self._together(lambda ranks: [r[0] for r in ranks[: len(into)]]), opts
        )

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> WorkSim:
        """Of parts of equal size."""
        return self._submit(
            inputs, outputs, self._together(lambda ranks: [r[self._rank] for r in ranks]), opts
        )

    def alltoall_base(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_sizes: Any,
        input_sizes: Any,
        opts: Any = None,
    ) -> WorkSim:
        sizes = list(input_sizes) or [len(tensor) // self._size] * self._size
        row = tensor.numel() // (len(tensor) or 1)

        def combine(inputs: Tensors) -> Tensors:
            parts = [part.contiguous() for part in inputs[0].split([size * row for size in sizes])]
            sent = [part.view(torch.uint8).numpy().tobytes() for part in parts]
            received = [
                pickle.loads(data)[self._rank] for data in self._links.exchange(pickle.dumps(sent))
            ]
            whole = bytearray(b"".join(received))
            empty = torch.empty(0, dtype=output.dtype)
            return [torch.frombuffer(whole, dtype=output.dtype) if whole else empty]

        return self._submit([tensor], [output], combine, opts)

    all_to_all_single = alltoall_base

    def send(self, tensors: Tensors, to: int, tag: int = 0) -> WorkSim:
        return self._submit(tensors, [], self._send(to), None)

    def recv(self, tensors: Tensors, source: int, tag: int = 0) -> WorkSim:
        return self._submit([], tensors, self._receive(tensors[0], source), None)

    def barrier(self, opts: Any = None) -> WorkSim:
        """Alone of all, it makes the host wait in `wait()`, as NCCL's."""
        device = torch.device("sim", torch.accelerator.current_device_index())
        tensor = torch.zeros(1, device=device)
        return self._submit(
            [tensor], [tensor], self._together(lambda ranks: ranks[0]), None, host_waits=True
        )


def register() -> None:
    """Tell torch of the backend, so that it is the one of "sim" devices for `init_process_group` and others."""
    if BACKEND.upper() in dist.Backend._plugins:
        return

    def make(backend: Any, options: Options | None) -> ProcessGroupSim:
        options = options or Options()
        options._timeout, options.group_name = backend.timeout, backend.group_id
        return ProcessGroupSim(backend.store, backend.group_rank, backend.group_size, options)

    dist.Backend.register_backend(BACKEND, make, extended_api=True, devices=["sim"])


def _listed(tensors: Any) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _check(tensors: Tensors) -> torch.device:
    """The one device of `tensors`. Raises: as NCCL does."""
    devices = {tensor.device for tensor in tensors}
    if len(devices) != 1 or next(iter(devices)).type != "sim":
        raise RuntimeError(
            f"No backend type associated with device type {sorted(map(str, devices))}"
        )
    for tensor in tensors:
        if tensor.is_sparse:
            raise RuntimeError("Tensors must be dense")
        if tensor.dtype not in _DTYPES:
            raise TypeError(
                f"Input tensor data type is not supported for NCCL process group: {tensor.dtype}"
            )
    return devices.pop()


def _reduce(tensors: Tensors, op: Any) -> torch.Tensor:
    kind, factor = op.__getstate__()
    total = tensors[0].clone()
    if kind == dist.ReduceOp.PREMUL_SUM:
        tensors = [tensor * factor for tensor in tensors]
        total = tensors[0]
    for tensor in tensors[1:]:
        if tensor.dtype is torch.bool and kind in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
            total = total | tensor
        else:
            total = _REDUCTIONS[kind](total, tensor)
    return total / len(tensors) if kind == dist.ReduceOp.AVG else total
