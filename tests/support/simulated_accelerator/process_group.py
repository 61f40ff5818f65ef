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
SECONDS_OF_A_WATCHDOG = 10.0
SECONDS_BETWEEN_LOOKS = 0.1
# What goes wrong on this rank: "constructor" and "connect" raise, with "hang" no kernel ends until `abort()`.
faults = set(os.environ.get("SIMULATED_FAULTS", "").split(",")) - {""}

Tensors = Sequence[torch.Tensor]
Job = Callable[[Tensors], Tensors]  # what the group's thread makes of the inputs
Numbered = tuple[int, Job]  # a collective's job
UnderWay = tuple[torch.Stream, list[torch.Tensor]]  # of a collective: where it runs, what it uses
Ranks = list[list[torch.Tensor]]  # the inputs of each rank
Combine = Callable[[Ranks], list[torch.Tensor]]
Reduction = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

_REDUCTIONS: dict[Any, Reduction] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.AVG: torch.add,
    dist.ReduceOp.PREMUL_SUM: torch.add,
    dist.ReduceOp.PRODUCT: torch.mul,
    dist.ReduceOp.MIN: torch.minimum,
    dist.ReduceOp.MAX: torch.maximum,
}
# NCCL has no kernels for others; it moves complex numbers as pairs, and booleans as bytes.
_DTYPES = {
    torch.int8, torch.uint8, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
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
        self._device = device
        self._end = end
        self._tensors = tensors
        self._host_waits = host_waits
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
        future: torch.futures.Future[list[torch.Tensor]]
        future = torch.futures.Future(devices=[self._device])
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
        self._store = store
        self._rank = rank
        self._size = size
        self.options = options or Options()
        self._connected: Links | None = None
        self._streams: dict[int, torch.Stream] = {}
        self._jobs: queue.SimpleQueue[Numbered | None] = queue.SimpleQueue()
        self._under_way: dict[int, UnderWay] = {}
        # Of calls of several threads: the stream's and the thread's must be one.
        self._order = threading.Lock()
        self._thread: threading.Thread | None = None

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    getRank = rank  # noqa: N815
    getSize = size  # noqa: N815

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
        keys = [f"device/{rank}" for rank in range(self._size)]
        uuids = [self._store.get(key).decode() for key in keys]
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
        combine: Job,
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
        combine: Job,
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
        for collective in list(self._under_way):
            if torch.ops.simulated.collective_has_ended(collective):
                stream, tensors = self._under_way.pop(collective)
                for tensor in tensors:
                    tensor.record_stream(stream)

    # What the thread does with copies of the inputs in host memory, all flat

    def _exchange(self, inputs: Tensors) -> Ranks:
        """The inputs of every rank, which have the same sizes."""
        sizes = [tensor.nbytes for tensor in inputs]
        packed = torch.cat([tensor.view(torch.uint8) for tensor in inputs])
        ranks: Ranks = []
        for data in self._links.exchange(_bytes_of(packed)):
            parts = _tensor_of(data, torch.uint8).split(sizes)
            tensors = []
            for part, like in zip(parts, inputs, strict=True):
                tensors.append(part.clone().view(like.dtype))
            ranks.append(tensors)
        return ranks

    def _together(self, combine: Combine) -> Job:
        return lambda inputs: combine(self._exchange(inputs))

    def _send(self, to: int) -> Job:
        def job(inputs: Tensors) -> Tensors:
            self._links.send(_bytes_of(inputs[0]), to)
            return []

        return job

    def _receive(self, like: torch.Tensor, source: int) -> Job:
        return lambda inputs: [_tensor_of(self._links.receive(source), like.dtype)]

    # Collectives, with the arguments of torch's own groups

    def allreduce(self, tensors: Tensors, opts: Any = None, timeout: Any = None) -> WorkSim:
        tensors = _listed(tensors)
        opts = opts or c10d.AllreduceOptions()

        def combine(ranks: Ranks) -> list[torch.Tensor]:
            return [_reduce(same, opts.reduceOp) for same in zip(*ranks, strict=True)]

        return self._submit(tensors, tensors, self._together(combine), opts)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Tensors, opts: Any) -> WorkSim:
        tensors = _listed(tensors)
        outputs = tensors if self._rank == opts.rootRank else []

        def combine(ranks: Ranks) -> list[torch.Tensor]:
            reduced = [_reduce(same, opts.reduceOp) for same in zip(*ranks, strict=True)]
            return reduced[: len(outputs)]

        return self._submit(tensors, outputs, self._together(combine), opts)

    def broadcast(self, tensors: Tensors, opts: Any) -> WorkSim:
        tensors = _listed(tensors)
        of_root = self._together(lambda ranks: ranks[opts.rootRank])
        return self._submit(tensors, tensors, of_root, opts)

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> WorkSim:
        (into,) = outputs
        (tensor,) = inputs
        of_all = self._together(lambda ranks: [rank[0] for rank in ranks])
        return self._submit([tensor], into, of_all, opts)

    def _allgather_base(
        self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None
    ) -> WorkSim:
        return self.allgather_into_tensor_coalesced([output], [tensor], opts)

    all_gather_single = _allgather_base

    def allgather_into_tensor_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> WorkSim:
        def combine(ranks: Ranks) -> list[torch.Tensor]:
            return [torch.cat(same) for same in zip(*ranks, strict=True)]

        return self._submit(inputs, outputs, self._together(combine), opts)

    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def reduce_scatter(
        self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None
    ) -> WorkSim:
        (output,) = outputs
        (parts,) = inputs
        opts = opts or c10d.ReduceScatterOptions()

        def combine(ranks: Ranks) -> list[torch.Tensor]:
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

        def combine(ranks: Ranks) -> list[torch.Tensor]:
            reduced = []
            for same in zip(*ranks, strict=True):
                mine = [tensor.chunk(self._size)[self._rank] for tensor in same]
                reduced.append(_reduce(mine, opts.reduceOp))
            return reduced

        return self._submit(inputs, outputs, self._together(combine), opts)

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> WorkSim:
        into = list(outputs[0]) if self._rank == opts.rootRank else []

        def combine(ranks: Ranks) -> list[torch.Tensor]:
            return [rank[0] for rank in ranks[: len(into)]]

        return self._submit(inputs, into, self._together(combine), opts)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> WorkSim:
        """Of parts of equal size."""
        mine = self._together(lambda ranks: [rank[self._rank] for rank in ranks])
        return self._submit(inputs, outputs, mine, opts)

    def alltoall_base(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_sizes: Any,
        input_sizes: Any,
        opts: Any = None,
    ) -> WorkSim:
        equal = [len(tensor) // self._size] * self._size
        sizes = list(input_sizes) or equal
        row = tensor.numel() // (len(tensor) or 1)

        def combine(inputs: Tensors) -> Tensors:
            parts = inputs[0].split([size * row for size in sizes])
            sent = [_bytes_of(part.contiguous()) for part in parts]
            everyone = self._links.exchange(pickle.dumps(sent))
            mine = [pickle.loads(data)[self._rank] for data in everyone]
            received = b"".join(mine)
            if not received:
                return [torch.empty(0, dtype=output.dtype)]
            return [_tensor_of(received, output.dtype)]

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
        of_first = self._together(lambda ranks: ranks[0])
        return self._submit([tensor], [tensor], of_first, None, host_waits=True)


def register() -> None:
    """Tell torch of the backend, so that it is the one of "sim" devices for `init_process_group` and others."""
    if BACKEND.upper() in dist.Backend._plugins:
        return

    def make(backend: Any, options: Options | None) -> ProcessGroupSim:
        options = options or Options()
        options._timeout = backend.timeout
        options.group_name = backend.group_id
        return ProcessGroupSim(backend.store, backend.group_rank, backend.group_size, options)

    dist.Backend.register_backend(BACKEND, make, extended_api=True, devices=["sim"])


def _listed(tensors: Any) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.view(torch.uint8).numpy().tobytes()


def _tensor_of(data: bytes, dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=dtype)


def _check(tensors: Tensors) -> torch.device:
    """The one device of `tensors`. Raises: as NCCL does."""
    devices = {tensor.device for tensor in tensors}
    if len(devices) != 1 or next(iter(devices)).type != "sim":
        names = sorted(str(device) for device in devices)
        raise RuntimeError(f"No backend type associated with device type {names}")
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
    is_or = kind in (dist.ReduceOp.SUM, dist.ReduceOp.MAX)  # of booleans
    for tensor in tensors[1:]:
        if is_or and tensor.dtype is torch.bool:
            total |= tensor
        else:
            total = _REDUCTIONS[kind](total, tensor)
    if kind == dist.ReduceOp.AVG:
        return total / len(tensors)
    return total
