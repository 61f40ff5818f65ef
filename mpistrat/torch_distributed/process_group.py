"""A process group of `torch.distributed` over one of our communicators.

torch calls the methods by the names that its own groups have: from Python, and from C++, as DDP and functional
collectives do, through trampolines (torch/csrc/distributed/c10d/PyProcessGroup.hpp). A few names differ between torch
2.9 and 2.13; both are here.
"""

from __future__ import annotations

import atexit
import datetime
import math
import os
import sys
import threading
import types
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from mpistrat.communicators.communication_thread import CommunicationThread, takes_a_core
from mpistrat.communicators.communicator import Communicator
from mpistrat.communicators.contract.joint_errors import is_raised_by_all
from mpistrat.liveness import deadlines
from mpistrat.liveness.call_site import outside
from mpistrat.torch_distributed.after_backward import CallsAfterBackward, inside_backward
from mpistrat.torch_distributed.collectives import Collectives
from mpistrat.torch_distributed.compilation import not_compiled
from mpistrat.torch_distributed.native import NativeGroups
from mpistrat.torch_distributed.work import DoneWork, Steps, UnfinishedWork, end_job_for

if TYPE_CHECKING:
    from mpistrat.torch_distributed.messages import Messages

NAME = "mpistrat"

Tensors = Sequence[torch.Tensor]
_SUM = dist.AllreduceOptions()


class MpistratProcessGroup(dist.ProcessGroup):
    """Moves tensors in CPU memory by `communicator`, and those of accelerators by torch's own groups.

    A call that the program waits for runs on its own thread. One that it does not wait for (`async_op=True`, DDP's
    buckets) runs on a communication thread, after those before it; a call that the program waits for lets these end
    first. So the calls of a group are in the program's order, which is the same on all ranks. Where the ranks of a node
    have no core to spare for such a thread, calls of a backward() wait for its end.

    Args:
        communicator: nobody else uses it.
        messages: what `send` and `recv` go by; None for a group of one rank.
        native: for accelerators.
        name: torch's name of the group.
        give_back: called once, when the group is destroyed and its calls have ended.
        cpu_share: the CPUs that this rank has, as `machine.cpu_share` shares them out.

    Attributes:
        options: as of torch's own backends.
    """

    def __init__(
        self,
        communicator: Communicator,
        messages: Messages | None,
        native: NativeGroups,
        name: str,
        give_back: Callable[[], None],
        cpu_share: float = math.inf,
    ) -> None:
        super().__init__(communicator.rank, communicator.size)  # type: ignore[call-arg]
        self._communicator, self._messages, self._native = communicator, messages, native
        self.options = c10d.Backend.Options(NAME)
        self.options.group_name = name
        self._give_back = give_back
        self._cpu_share = cpu_share
        self._collectives = Collectives(communicator)
        self._order = threading.RLock()  # of the calls of several threads of the program
        self._thread: CommunicationThread | None = None
        self._after_backward = CallsAfterBackward()
        self._failed: list[UnfinishedWork] = []  # whose errors nobody has asked for so far
        self._coalesced: list[DoneWork] | None = None
        self._is_shut_down = False
        self._pid = os.getpid()
        # Before a thread registers its own: so it runs after what is under way has ended, or failed.
        atexit.register(self._end_job_if_unobserved)

    # What torch asks of a group. Without the properties, DeviceMesh and functional collectives find no group.

    @property
    def group_name(self) -> str:
        return self.options.group_name

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(name) for name in dist.Backend.backend_capability[NAME]]

    @property
    def communicator(self) -> Communicator:
        return self._communicator

    def getBackendName(self) -> str:  # noqa: N802
        return NAME

    def name(self) -> str:
        return NAME

    def rank(self) -> int:
        return self._communicator.rank

    def size(self) -> int:
        return self._communicator.size

    getRank, getSize = rank, size  # noqa: N815

    def _get_backend(self, device: torch.device) -> MpistratProcessGroup:
        return self

    def get_group_store(self) -> c10d.Store:
        return self._native.store

    def _get_sequence_number_for_group(self) -> int:
        return self._communicator.contract.calls

    def _set_sequence_number_for_group(self) -> None:
        """The ranks' numbers are equal."""

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return False

    supports_splitting = supports_coalescing = supports_time_estimate = supports_shrinking = False
    use_pg_for_symm_mem_rendezvous = False

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        """How long a call waits for the other ranks."""
        seconds = max(0.0, timeout.total_seconds())
        before = self.options
        self.options = c10d.Backend.Options(NAME, timeout)
        self.options.group_name = before.group_name
        self.options.global_ranks_in_group = before.global_ranks_in_group
        watch = self._communicator.contract.watch
        if watch is not None:
            watch.timeout = seconds
        if self._messages is not None:
            self._messages.timeout = seconds

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        """Not collective. Calls on their way end first. Called by `destroy_process_group`."""
        if self._is_shut_down:
            return
        self._is_shut_down = True
        self._native.shut_down()
        if self._thread is not None:
            self._after_backward.make()
            self._thread.wait_until_idle()
            self._thread.end()
        self._give_back()
        self._raise_unobserved()
        atexit.unregister(self._end_job_if_unobserved)

    def abort(self) -> None:
        """Not collective. Calls on their way are left, and so are the communicator and errors nobody has asked for."""
        self._is_shut_down = True
        atexit.unregister(self._end_job_if_unobserved)
        self._native.abort()
        self._after_backward.leave()
        if self._thread is not None:
            self._thread.end()

    # Collectives

    def allreduce(self, tensors: Tensors, opts: Any = _SUM, timeout: Any = None) -> dist.Work:
        if isinstance(tensors, torch.Tensor):
            tensors = [tensors]
        if native := self._native_of(tensors):
            return native.allreduce(tensors, opts)
        op = getattr(opts, "reduceOp", opts)
        return self._run(opts, tensors, self._collectives.all_reduce, tensors, op)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = _SUM) -> dist.Work:
        if native := self._native_of(tensors):
            return native.allreduce_coalesced(tensors, opts)
        call = self._collectives.all_reduce_coalesced
        return self._run(opts, tensors, call, tensors, opts.reduceOp)

    def reduce(self, tensors: Tensors, opts: Any, op: Any = None) -> dist.Work:
        tensors = _listed(tensors)
        if native := self._native_of(tensors):
            return native.reduce(tensors, opts)
        root = getattr(opts, "rootRank", opts)
        op = getattr(opts, "reduceOp", op or dist.ReduceOp.SUM)
        return self._run(opts, tensors, self._collectives.reduce, tensors, op, root)

    def broadcast(self, tensors: Tensors, opts: Any = 0, timeout: Any = None) -> dist.Work:
        tensors = _listed(tensors)
        if native := self._native_of(tensors):
            return native.broadcast(tensors, opts)
        root = getattr(opts, "rootRank", opts)
        return self._run(opts, tensors, self._collectives.broadcast, tensors, root)

    def allgather(self, lists: Any, tensors: Tensors, opts: Any = None) -> dist.Work:
        if isinstance(tensors, torch.Tensor):
            lists, tensors = [lists], [tensors]
        if native := self._native_of(tensors):
            return native.allgather(lists, tensors, opts or c10d.AllgatherOptions())
        result = [out for outs in lists for out in outs]
        return self._run(opts, result, self._collectives.all_gather, lists, tensors)

    def allgather_coalesced(self, lists: Any, tensors: Tensors, opts: Any = None) -> dist.Work:
        """`lists` has a list for each rank, with what becomes of the rank's tensors."""
        return self.allgather(list(zip(*lists, strict=True)), tensors, opts)

    def all_gather_single(
        self, out: torch.Tensor, tensor: torch.Tensor, opts: Any = None
    ) -> dist.Work:
        if native := self._native_of([tensor]):
            return native._allgather_base(out, tensor, opts or c10d.AllgatherOptions())
        return self._run(opts, [out], self._collectives.all_gather_single, out, tensor)

    def all_gather_single_coalesced(
        self, outs: Tensors, tensors: Tensors, opts: Any = None
    ) -> dist.Work:
        if native := self._native_of(tensors):
            opts = opts or c10d.AllgatherOptions()
            return _as_one(native, native._allgather_base, outs, tensors, opts)
        return self._run(opts, outs, self._collectives.all_gather_singles, outs, tensors)

    def gather(self, lists: Any, tensors: Any, opts: Any = 0, timeout: Any = None) -> dist.Work:
        if isinstance(tensors, torch.Tensor):
            lists, tensors = [lists], [tensors]
        if native := self._native_of(tensors):
            return native.gather(lists, tensors, opts)
        root = getattr(opts, "rootRank", opts)
        result = [out for outs in lists for out in outs]
        return self._run(opts, result, self._collectives.gather, lists, tensors, root)

    def scatter(self, outs: Any, lists: Any, opts: Any = 0, timeout: Any = None) -> dist.Work:
        if isinstance(outs, torch.Tensor):
            outs, lists = [outs], [lists]
        if native := self._native_of(outs):
            return native.scatter(outs, lists, opts)
        root = getattr(opts, "rootRank", opts)
        return self._run(opts, outs, self._collectives.scatter, outs, lists, root)

    def reduce_scatter(self, outs: Any, lists: Any, opts: Any = None) -> dist.Work:
        opts = opts or dist.ReduceScatterOptions()
        if isinstance(outs, torch.Tensor):
            outs, lists = [outs], [lists]
        if native := self._native_of(outs):
            return native.reduce_scatter(outs, lists, opts)
        op = getattr(opts, "reduceOp", opts)
        return self._run(opts, outs, self._collectives.reduce_scatter, outs, lists, op)

    def reduce_scatter_single(
        self, out: torch.Tensor, tensor: torch.Tensor, opts: Any = None
    ) -> dist.Work:
        opts = opts or dist.ReduceScatterOptions()
        if native := self._native_of([tensor]):
            return native._reduce_scatter_base(out, tensor, opts)
        call = self._collectives.reduce_scatter_single
        return self._run(opts, [out], call, out, tensor, opts.reduceOp)

    def reduce_scatter_single_coalesced(
        self, outs: Tensors, tensors: Tensors, opts: Any = None
    ) -> dist.Work:
        opts = opts or dist.ReduceScatterOptions()
        if native := self._native_of(tensors):
            return _as_one(native, native._reduce_scatter_base, outs, tensors, opts)
        call = self._collectives.reduce_scatter_singles
        return self._run(opts, outs, call, outs, tensors, opts.reduceOp)

    def all_to_all_single(
        self,
        out: torch.Tensor,
        tensor: torch.Tensor,
        received: Sequence[int] = (),
        sent: Sequence[int] = (),
        opts: Any = None,
    ) -> dist.Work:
        if native := self._native_of([tensor]):
            opts = opts or dist.AllToAllOptions()
            return native.alltoall_base(out, tensor, received, sent, opts)
        call = self._collectives.all_to_all_single
        return self._run(opts, [out], call, out, tensor, received, sent)

    def alltoall(self, outs: Tensors, tensors: Tensors, opts: Any = None) -> dist.Work:
        if native := self._native_of(tensors):
            return native.alltoall(outs, tensors, opts or dist.AllToAllOptions())
        return self._run(opts, outs, self._collectives.all_to_all, outs, tensors)

    def barrier(self, opts: Any = None, timeout: datetime.timedelta | None = None) -> dist.Work:
        return self._run(opts, (), self._barrier, timeout or getattr(opts, "timeout", None))

    def monitored_barrier(
        self, timeout: datetime.timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """The report of a stall says which ranks are missing."""
        self.barrier(timeout=timeout).wait()

    # torch 2.9's names
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # Messages

    def send(self, tensors: Tensors, rank: int, tag: int = 0) -> dist.Work:
        (tensor,) = tensors
        if native := self._native_of(tensors):
            return native.send(tensors, rank, tag)
        return self._collect(self._peers().send(tensor, rank, tag, self._note_failure))

    def recv(self, tensors: Tensors, rank: int | None, tag: int = 0) -> dist.Work:
        (tensor,) = tensors
        if native := self._native_of(tensors):
            return native.recv(tensors, rank, tag)
        return self._collect(self._peers().receive(tensor, rank, tag, self._note_failure))

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> dist.Work:
        return self.recv(tensors, None, tag)

    # Several calls as one

    def _start_coalescing(self, device: torch.device) -> None:
        if device.type == "cpu":
            self._coalesced = []
        else:
            self._native.of(device)._start_coalescing()

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        if device.type != "cpu":
            return self._native.of(device)._end_coalescing()
        works, self._coalesced = self._coalesced or [], None
        return Steps(works)

    def _collect(self, work: DoneWork) -> DoneWork:
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _run(
        self, opts: Any, result: Sequence[torch.Tensor], call: Callable[..., None], *operands: Any
    ) -> DoneWork:
        """Make a call here, or on the communication thread if the program does not wait for it."""
        self._check_usable()
        if self._thread is not None and self._is_in_callback(self._thread):
            self._make(call, operands)
            self._stay_inside(True)
            return self._collect(DoneWork(result))
        # A program that calls a group's own method, without options, waits for the result.
        if not getattr(opts, "asyncOp", True) or not self._communicator.thread_multiple:
            if self._thread is not None:
                self._after_backward.make()
                self._thread.wait_until_idle()
            self._make(call, operands)
            return self._collect(DoneWork(result))
        with self._order:
            if self._thread is None:
                self._thread = CommunicationThread(
                    self._communicator, deadlines.PROGRAM_END_WAITS_FOR_CALLS
                )
        after = self._after_backward
        cpus, threads = self._cpu_share, torch.get_num_threads()
        is_busy = takes_a_core(self._communicator.on_one_node, cpus, threads)
        holds = after.is_worth_it and is_busy and inside_backward()
        work = UnfinishedWork(result, self._note_failure, after.make if holds else None)

        def make() -> None:
            try:
                self._make(call, operands)
            except BaseException as error:
                work.end(error)
            else:
                self._end(work)

        frame = outside(sys._getframe(2))
        if holds:
            after.add(make, self._thread, frame)
        else:
            self._thread.submit(make, frame)
        return self._collect(work)

    def _is_in_callback(self, thread: CommunicationThread) -> bool:
        """Whether this thread has just made a call, and is now in a callback of the call's future.

        The calls of the callback come next, on all ranks: whether the communication thread or the thread of backward()
        makes the calls, is each rank's own choice. They must not wait for calls that this thread has yet to make.
        """
        return self._after_backward.is_making() or thread.is_current()

    def _make(self, call: Callable[..., None], operands: Sequence[Any]) -> None:
        """What this rank alone finds wrong with a call, the others hear of: they are in it, or will be."""
        with self._order:
            try:
                call(*operands)
            except Exception as error:
                if is_raised_by_all(error) or self._communicator.contract.is_abandoned:
                    raise
                self._communicator.raise_together(error)

    def _end(self, work: UnfinishedWork) -> None:
        """The call of `work` is made. Callbacks of its future run, on this thread."""
        self._stay_inside(True)
        try:
            work.end(None)
        finally:
            self._stay_inside(False)

    def _stay_inside(self, stays: bool) -> None:
        watch = self._communicator.contract.watch
        if watch is not None:
            watch.stay_inside(stays)

    def _check_usable(self) -> None:
        """Raises: RuntimeError where no call can be made; the error of an earlier call that nobody waited for."""
        if self._is_shut_down:
            raise RuntimeError(
                f"rank {self.rank()}: the process group {self.group_name!r} was destroyed"
            )
        if self._pid != os.getpid():
            raise RuntimeError(
                f"the process group {self.group_name!r} was used in a forked child of rank {self.rank()}; MPI belongs "
                "to the parent: return what the child computed, and communicate there"
            )
        if self._failed:
            self._raise_unobserved()

    def _note_failure(self, work: UnfinishedWork) -> None:
        self._failed.append(work)

    def _raise_unobserved(self) -> None:
        """Raise the error of an earlier call that nobody waited for."""
        while self._failed:
            work = self._failed.pop(0)
            if not work.observed:
                work.wait()

    def _end_job_if_unobserved(self) -> None:
        """At exit."""
        try:
            self._raise_unobserved()
        except Exception as error:
            end_job_for(error)

    def _barrier(self, timeout: datetime.timedelta | None) -> None:
        watch = self._communicator.contract.watch
        seconds = timeout.total_seconds() if timeout else 0.0
        if watch is None or seconds <= 0:
            self._collectives.barrier()
            return
        with watch.waiting(seconds):
            self._collectives.barrier()

    def _native_of(self, tensors: Any) -> Any:
        """torch's own group for these tensors; None: they are in CPU memory."""
        device = tensors[0].device
        return None if device.type == "cpu" else self._native.of(device)

    def _peers(self) -> Messages:
        self._check_usable()
        if self._messages is None:
            raise RuntimeError("a group of one rank has nobody to send to, or to receive from")
        return self._messages


def _listed(tensors: Any) -> Tensors:
    return [tensors] if isinstance(tensors, torch.Tensor) else tensors


def _as_one(
    native: Any, call: Callable[..., Any], outs: Tensors, tensors: Tensors, opts: Any
) -> dist.Work:
    """`call` for each pair, submitted together: torch's own groups have no call for several at once."""
    native._start_coalescing()
    for out, tensor in zip(outs, tensors, strict=True):
        call(out, tensor, opts)
    return native._end_coalescing()


for _member in vars(MpistratProcessGroup).values():
    if isinstance(_member, types.FunctionType):
        not_compiled(_member)
