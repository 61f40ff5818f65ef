"""`mpistrat-bench compare torch`: calls of torch.distributed on torch's own backend and on mpistrat, in one run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import torch.distributed as dist

from mpistrat import arrays
from mpistrat.tools.bench import operations
from mpistrat.tools.bench.device import HOST, Device
from mpistrat.tools.bench.operations import Operation
from mpistrat.tools.bench.peers.torch_distributed import MPISTRAT, backend_of_torch, group_on
from mpistrat.tools.bench.report import Row
from mpistrat.tools.bench.rounds import all_ranks, compare, medians

_FLOAT32 = np.dtype("float32")
# Newer versions of torch have other names for these two calls
_ALL_GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class TorchCollective(Operation):
    """One call of torch.distributed on float32 tensors, in ordinary host memory or on a device.

    Args:
        group: a process group of all ranks of the job; the call goes through its backend.
        nbytes: the size in bytes, as nccl-tests counts it.

    Attributes:
        sent, received: `source` and `result` as tensors over the same memory.
        sent_parts, received_parts: both, divided into one tensor for each rank.
    """

    def __init__(self, group: dist.ProcessGroup | None, nbytes: int, device: Device = HOST) -> None:
        super().__init__(all_ranks(), nbytes, _FLOAT32, in_window=False, device=device)
        self.group = group
        self.sent = arrays.as_tensor(self.source)
        self.received = arrays.as_tensor(self.result)
        self.sent_parts = list(self.sent.chunk(self.communicator.size))
        self.received_parts = list(self.received.chunk(self.communicator.size))

    def wrong_at_first(self) -> int:
        """Make one call, and return the number of wrong elements in this rank's result. Collective.

        Afterwards both buffers are zeros, so that timed sums in place do not overflow.
        """
        self.reset()
        self()
        wrong = self.wrong()
        self.source[:] = self.result[:] = 0  # repeated sums in place do not overflow
        return wrong


class TorchAllReduce(TorchCollective, operations.AllReduceOperation):
    def reset(self) -> None:
        self.result[:] = self.source

    def __call__(self) -> None:
        dist.all_reduce(self.received, group=self.group)


class TorchBroadcast(TorchCollective, operations.BroadcastOperation):
    def __call__(self) -> None:
        dist.broadcast(self.received, 0, group=self.group)


class TorchAllGather(TorchCollective, operations.AllGatherOperation):
    wrong = Operation.wrong

    def __call__(self) -> None:
        dist.all_gather(self.received_parts, self.sent, group=self.group)


class AllGatherIntoTensor(TorchAllGather):
    def __call__(self) -> None:
        _ALL_GATHER(self.received, self.sent, group=self.group)


class TorchReduceScatter(TorchCollective, operations.ReduceScatterOperation):
    def __call__(self) -> None:
        dist.reduce_scatter(self.received, self.sent_parts, group=self.group)


class ReduceScatterTensor(TorchReduceScatter):
    def __call__(self) -> None:
        _REDUCE_SCATTER(self.received, self.sent, group=self.group)


class TorchAllToAll(TorchCollective):
    redop = "none"
    splits = True

    def reset(self) -> None:
        self.result[:] = 0

    def __call__(self) -> None:
        dist.all_to_all(self.received_parts, self.sent_parts, group=self.group)

    def expected(self) -> np.ndarray:
        parts = []
        for rank in range(self.communicator.size):
            parts_of_rank = self.operand(rank, self.count).reshape(-1, self.part)
            parts.append(parts_of_rank[self.rank])
        return np.concatenate(parts)


class AllToAllSingle(TorchAllToAll):
    def __call__(self) -> None:
        dist.all_to_all_single(self.received, self.sent, group=self.group)


CALLS: dict[str, type[TorchCollective]] = {
    "all_reduce": TorchAllReduce,
    "broadcast": TorchBroadcast,
    "all_gather": TorchAllGather,
    "all_gather_into_tensor": AllGatherIntoTensor,
    "reduce_scatter": TorchReduceScatter,
    "reduce_scatter_tensor": ReduceScatterTensor,
    "all_to_all": TorchAllToAll,
    "all_to_all_single": AllToAllSingle,
}


def compare_calls(
    names: Iterable[str], sizes: Iterable[int], num_rounds: int, device: Device = HOST
) -> list[Row]:
    """Compare each named call at each size in bytes on torch's own backend and on mpistrat. Called by: every rank.

    Args: names: keys of `CALLS`.
    Returns: a row of `compare_call` for each call and size.
    Raises: CannotTakePart on all ranks if torch has no backend for `device`, or ranks share a device.
    """
    groups = {backend: group_on(backend) for backend in (backend_of_torch(device.name), MPISTRAT)}
    rows = []
    for name in names:
        kind = CALLS[name]
        for nbytes in sizes:
            # No name holds the calls: their tensors go before those of the next size are made.
            rows.append(
                compare_call(
                    name,
                    {backend: kind(group, nbytes, device) for backend, group in groups.items()},
                    num_rounds,
                )
            )
    return rows


def compare_call(name: str, calls: Mapping[str, TorchCollective], num_rounds: int) -> Row:
    """Compare one call at one size. Called by: every rank.

    Args: calls: the call on each backend by the backend's name, torch's own first, then mpistrat.
    Returns: the row. A column "… us" is the median over the rounds of the slowest rank's mean microseconds per call;
        "wrong" counts wrong elements of the first calls on all ranks; "samples" has each round's time.
    """
    wrong = sum(call.wrong_at_first() for call in calls.values())
    peer, ours = calls
    nbytes = calls[ours].nbytes
    repeat = max(1, min(100, (1 << 23) // nbytes))
    rounds = compare(calls, repeat, num_rounds, calls[ours].device.wait)
    times = medians(rounds)
    return {
        "call": name,
        "bytes": nbytes,
        **{f"{backend} us": us for backend, us in times.items()},
        f"{peer} / {ours}": times[peer] / times[ours],
        "wrong": sum(all_ranks().all_gather_object(wrong)),
        "samples": rounds,
    }
