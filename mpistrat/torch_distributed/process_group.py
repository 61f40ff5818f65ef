"""The process group of `torch.distributed` over one of our communicators.

torch calls its methods by the names of its own groups. It does so from Python, and from C++ through trampolines
(torch/csrc/distributed/c10d/PyProcessGroup.hpp), as DDP and functional collectives do. A few names differ between torch
2.9 and 2.13; both are here.
"""

from __future__ import annotations

import contextlib
import datetime
import math
import types
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch.distributed import Work

from mpistrat.communicators.communicator import Communicator
from mpistrat.torch_distributed.collectives import Collectives
from mpistrat.torch_distributed.compilation import not_compiled
from mpistrat.torch_distributed.native import NativeGroups
from mpistrat.torch_distributed.next_group import asked_name
from mpistrat.torch_distributed.tensors import Tensors
from mpistrat.torch_distributed.work import CoalescedWork, GroupCalls, seconds_of

if TYPE_CHECKING:
    from mpistrat.torch_distributed.messages import Messages

NAME = "mpistrat"

_SUM = c10d.AllreduceOptions()


class GroupCollective(NamedTuple):
    """The description of one of torch's collectives. Its first operand is the output, or is changed in place.

    Attributes:
        make: the method of `Collectives` that makes the collective with CPU tensors.
        native: the name of the method of torch's own groups that makes it with tensors of an accelerator.
        options: torch's class of the collective's options.
        fields: names of the options that `make` takes after the operands.
        is_of_lists: whether operands are lists of tensors. A program that calls the group's method itself may give one
            tensor instead.
        gathers: whether the first operand holds a list of outputs for each tensor of the second operand. On some ranks
            it may be empty.
        is_coalesced: whether `make` takes lists of outputs and inputs, and `native` only one output and one input.
    """

    make: Callable[..., None]
    native: str
    options: Callable[[], Any]
    fields: tuple[str, ...] = ()
    is_of_lists: bool = True
    gathers: bool = False
    is_coalesced: bool = False

    def options_of(self, *values: Any) -> Any:
        """Return torch's options with `values` for `fields`, in their order; None leaves a field's default."""
        options = self.options()
        for field, value in zip(self.fields, values, strict=False):
            if value is not None:
                setattr(options, field, value)
        return options

    def by_native(self, group: Any, operands: Sequence[Any], opts: Any) -> Work:
        """Make the collective by one of torch's own groups, and return the group's work.

        If `is_coalesced`, one call for each pair of an output and an input is submitted, all together.
        Args:
            group: torch's own process group.
            operands: the tensors, or lists of tensors.
            opts: torch's options.
        """
        call = getattr(group, self.native)
        if not self.is_coalesced:
            return call(*operands, opts)
        group._start_coalescing()
        for pair in zip(*operands, strict=True):
            call(*pair, opts)
        return group._end_coalescing()


_ROOT = ("rootRank",)
_OP = ("reduceOp",)
_ALL_REDUCE = GroupCollective(Collectives.all_reduce, "allreduce", c10d.AllreduceOptions, _OP)
_ALL_REDUCE_COALESCED = GroupCollective(
    Collectives.all_reduce_coalesced, "allreduce_coalesced", c10d.AllreduceCoalescedOptions, _OP
)
_REDUCE = GroupCollective(Collectives.reduce, "reduce", c10d.ReduceOptions, (*_ROOT, *_OP))
_BROADCAST = GroupCollective(Collectives.broadcast, "broadcast", c10d.BroadcastOptions, _ROOT)
_ALL_GATHER = GroupCollective(
    Collectives.all_gather, "allgather", c10d.AllgatherOptions, gathers=True
)
_ALL_GATHER_SINGLE = GroupCollective(
    Collectives.all_gather_single, "_allgather_base", c10d.AllgatherOptions, is_of_lists=False
)
_ALL_GATHER_SINGLES = _ALL_GATHER_SINGLE._replace(
    make=Collectives.all_gather_singles, is_coalesced=True
)
_GATHER = GroupCollective(Collectives.gather, "gather", c10d.GatherOptions, _ROOT, gathers=True)
_SCATTER = GroupCollective(Collectives.scatter, "scatter", c10d.ScatterOptions, _ROOT)
_REDUCE_SCATTER = GroupCollective(
    Collectives.reduce_scatter, "reduce_scatter", c10d.ReduceScatterOptions, _OP
)
_REDUCE_SCATTER_SINGLE = GroupCollective(
    Collectives.reduce_scatter_single, "_reduce_scatter_base", c10d.ReduceScatterOptions, _OP, False
)
_REDUCE_SCATTER_SINGLES = _REDUCE_SCATTER_SINGLE._replace(
    make=Collectives.reduce_scatter_singles, is_coalesced=True
)
_ALL_TO_ALL = GroupCollective(Collectives.all_to_all, "alltoall", c10d.AllToAllOptions)
_ALL_TO_ALL_SINGLE = GroupCollective(
    Collectives.all_to_all_single, "alltoall_base", c10d.AllToAllOptions, is_of_lists=False
)


class MpistratProcessGroup(dist.ProcessGroup):
    """The process group of the backend "mpistrat". torch calls its methods.

    `communicator` moves tensors in CPU memory, and torch's own groups (NCCL's) move tensors of accelerators.
    Args:
        communicator: makes this group's collectives, and nothing else.
        messages: makes `send` and `recv`; None for a group of one rank.
        native: torch's own groups, for accelerators.
        name: torch's name of the group.
        give_back: called without arguments, once, when the group is destroyed and its calls have ended.
        cpu_share: number of CPUs that this rank has. A CPU that ranks share counts in part.

    Attributes:
        communicator: the argument `communicator`.
        options: options with the attributes of torch's own backends: timeout, name, global ranks.
        asked_name: the name of the backend that the program asked for, as "gloo"; at first, the default group's.
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
        self.communicator = communicator
        self._messages = messages
        self._native = native
        self.options = c10d.Backend.Options(NAME)
        self.options.group_name = name
        self.asked_name = asked_name() or NAME
        self._give_back = give_back
        self._collectives = Collectives(communicator)
        self._calls = GroupCalls(communicator, name, cpu_share)

    # torch asks about the group by these names. Without the properties, DeviceMesh and functional collectives find no
    # group.

    @property
    def group_name(self) -> str:
        return self.options.group_name

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(name) for name in dist.Backend.backend_capability[NAME]]

    def name(self) -> str:
        return self.asked_name

    def getBackendName(self) -> str:  # noqa: N802
        return NAME  # C++ takes a group with another name for torch's own

    def rank(self) -> int:
        return self.communicator.rank

    def size(self) -> int:
        return self.communicator.size

    _get_backend_name = name
    getRank = rank  # noqa: N815
    getSize = size  # noqa: N815

    def _get_backend(self, device: torch.device) -> MpistratProcessGroup:
        return self

    def get_group_store(self) -> c10d.Store:
        return self._native.store

    def _get_sequence_number_for_group(self) -> int:
        return self.communicator.contract.calls

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing, because the sequence numbers (counts of calls) are equal on all ranks anyway."""

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return False

    supports_splitting = supports_coalescing = supports_time_estimate = supports_shrinking = False
    use_pg_for_symm_mem_rendezvous = False

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        """Set how long each call waits for other ranks. Zero or less leaves only the limit of the settings."""
        seconds = seconds_of(timeout)
        before = self.options
        self.options = c10d.Backend.Options(NAME, timeout)
        self.options.group_name = before.group_name
        self.options.global_ranks_in_group = before.global_ranks_in_group
        watch = self.communicator.contract.watch
        if watch is not None:
            watch.timeout = seconds
        if self._messages is not None:
            self._messages.timeout = seconds

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        """Wait until this rank's calls have ended, and end the group on this rank. Not collective.

        Called by: `destroy_process_group`.   Raises: the error of a call that nobody has waited for.
        """
        self._calls.shut_down(self._native.shut_down, self._give_back)

    def abort(self) -> None:
        """End the group on this rank at once. Its calls, communicator and errors are given up. Not collective."""
        self._calls.abort(self._native.abort)

    # Collectives

    def _collective(
        self, collective: GroupCollective, opts: Any, *operands: Any, op: Any = None
    ) -> Work:
        """Make a collective: of CPU tensors by `communicator`, of others by torch's own group for their device.

        Args:
            collective: the collective's description.
            opts: torch's options. A program that calls the group's method itself may give the root's rank or the
                operation instead.
            operands: the tensors, or lists of tensors.
            op: the operation, if `opts` is the root's rank.
        Returns: the work of the call. It has ended if the call was not asynchronous.
        """
        if not hasattr(opts, "asyncOp"):
            with self.communicator.raising_together():
                opts = collective.options_of(opts, op)
        tensors = operands[1] if collective.gathers else operands[0]
        if isinstance(tensors, Tensor):
            tensors = [tensors]
            if collective.is_of_lists:
                operands = tuple([operand] for operand in operands)
        device = tensors[0].device
        if device.type != "cpu":
            return collective.by_native(self._native.of(device), operands, opts)
        result = tensors
        if collective.gathers:
            result = []
            for outs in operands[0]:  # a comprehension would be a call of its own, here and below
                result += outs
        arguments = [self._collectives, *operands]
        for field in collective.fields:
            arguments.append(getattr(opts, field))
        return self._calls.run(opts.asyncOp, result, collective.make, *arguments)

    def allreduce(self, tensors: Any, opts: Any = _SUM, timeout: Any = None) -> Work:
        return self._collective(_ALL_REDUCE, opts, tensors)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Work:
        return self._collective(_ALL_REDUCE_COALESCED, opts, tensors)

    def reduce(self, tensors: Any, opts: Any, op: Any = None) -> Work:
        return self._collective(_REDUCE, opts, tensors, op=op)

    def broadcast(self, tensors: Any, opts: Any = 0, timeout: Any = None) -> Work:
        return self._collective(_BROADCAST, opts, tensors)

    def allgather(self, lists: Any, tensors: Any, opts: Any = None) -> Work:
        return self._collective(_ALL_GATHER, opts, lists, tensors)

    def allgather_coalesced(self, lists: Any, tensors: Tensors, opts: Any = None) -> Work:
        """Gather several tensors from all ranks.

        Args: lists: a list for each rank, with an output for each of this rank's `tensors`.
        """
        return self.allgather(list(zip(*lists, strict=True)), tensors, opts)

    def all_gather_single(self, out: Tensor, tensor: Tensor, opts: Any = None) -> Work:
        return self._collective(_ALL_GATHER_SINGLE, opts, out, tensor)

    def all_gather_single_coalesced(self, outs: Any, tensors: Any, opts: Any = None) -> Work:
        return self._collective(_ALL_GATHER_SINGLES, opts, outs, tensors)

    def gather(self, lists: Any, tensors: Any, opts: Any = 0, timeout: Any = None) -> Work:
        return self._collective(_GATHER, opts, lists, tensors)

    def scatter(self, outs: Any, lists: Any, opts: Any = 0, timeout: Any = None) -> Work:
        return self._collective(_SCATTER, opts, outs, lists)

    def reduce_scatter(self, outs: Any, lists: Any, opts: Any = None) -> Work:
        return self._collective(_REDUCE_SCATTER, opts, outs, lists)

    def reduce_scatter_single(self, out: Tensor, tensor: Tensor, opts: Any = None) -> Work:
        return self._collective(_REDUCE_SCATTER_SINGLE, opts, out, tensor)

    def reduce_scatter_single_coalesced(self, outs: Any, tensors: Any, opts: Any = None) -> Work:
        return self._collective(_REDUCE_SCATTER_SINGLES, opts, outs, tensors)

    def all_to_all_single(
        self, out: Tensor, tensor: Tensor, received: Any = (), sent: Any = (), opts: Any = None
    ) -> Work:
        """Send rows of `tensor` to the ranks, and receive rows in `out`, in the order of ranks.

        Args: received, sent: the number of rows from, and to, each rank; empty for equally many.
        """
        return self._collective(_ALL_TO_ALL_SINGLE, opts, out, tensor, received, sent)

    def alltoall(self, outs: Tensors, tensors: Tensors, opts: Any = None) -> Work:
        return self._collective(_ALL_TO_ALL, opts, outs, tensors)

    def barrier(self, opts: Any = None, timeout: datetime.timedelta | None = None) -> Work:
        seconds = seconds_of(timeout or getattr(opts, "timeout", None))
        return self._calls.run(getattr(opts, "asyncOp", True), (), self._barrier, seconds)

    def monitored_barrier(
        self, timeout: datetime.timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Wait for all ranks. If ranks do not come, the report of the stall names them.

        Args:
            timeout: how long to wait; None for the group's limit.
            wait_all_ranks: ignored, because the report always names all missing ranks.
        """
        self.barrier(timeout=timeout).wait()

    def _barrier(self, seconds: float) -> None:
        """Wait for all ranks. Args: seconds: the most seconds to wait; 0 for the limit of all calls of the group."""
        watch = self.communicator.contract.watch
        with watch.waiting(seconds) if watch and seconds else contextlib.nullcontext():
            self.communicator.barrier()

    # torch 2.9's names
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # Messages

    def send(self, tensors: Tensors, rank: int, tag: int = 0) -> Work:
        (tensor,) = tensors
        if tensor.device.type != "cpu":
            return self._native.of(tensor.device).send(tensors, rank, tag)
        message = self._peers().send(tensor, rank, tag, self._calls.failed.append)
        return self._calls.collect(message)

    def recv(self, tensors: Tensors, rank: int | None, tag: int = 0) -> Work:
        (tensor,) = tensors
        if tensor.device.type != "cpu":
            return self._native.of(tensor.device).recv(tensors, rank, tag)
        failed = self._calls.failed.append
        return self._calls.collect(self._peers().receive(tensor, rank, tag, failed))

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Work:
        return self.recv(tensors, None, tag)

    def _peers(self) -> Messages:
        self._calls.check_usable()
        if self._messages is None:
            raise RuntimeError("a group of one rank has nobody to send to, or to receive from")
        return self._messages

    # Several calls as one

    def _start_coalescing(self, device: torch.device) -> None:
        if device.type == "cpu":
            self._calls.coalesced = []
        else:
            self._native.of(device)._start_coalescing()

    def _end_coalescing(self, device: torch.device) -> Work:
        if device.type != "cpu":
            return self._native.of(device)._end_coalescing()
        works = self._calls.coalesced or []
        self._calls.coalesced = None
        return CoalescedWork(works)


for _member in vars(MpistratProcessGroup).values():
    if isinstance(_member, types.FunctionType):
        not_compiled(_member)
