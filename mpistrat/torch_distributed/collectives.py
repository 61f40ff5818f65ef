"""The collectives of `torch.distributed` on CPU tensors of any strides. Each call blocks until its result is there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mpistrat.communicators.communicator import Communicator
from mpistrat.communicators.recycled_buffers import RecycledBuffers
from mpistrat.torch_distributed.reductions import Combination, combination_of, operand
from mpistrat.torch_distributed.tensors import (
    Tensors,
    apart,
    by_dtype,
    flat,
    lengths,
    read,
    unflatten,
    unwritten,
    written,
)


class Collectives:
    """The collectives of one process group, on CPU tensors. Outputs are written in place; nothing is returned.

    `op` is a `torch.distributed.ReduceOp`; `root` is a rank of the group.
    Called by: `MpistratProcessGroup`, on every rank of `communicator`.
    Raises: CollectiveMismatchError on all ranks, if they make different calls or give different tensors. TypeError or
        ValueError on one rank for its own arguments, such as a list that has not one tensor for each rank. The caller
        then tells the other ranks.
    """

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator
        self._rank = communicator.rank
        self._size = communicator.size
        self._combinations: dict[Any, Combination] = {}  # for NumPy, by (operation, dtype)
        # A list of tensors is sent from one buffer, and received in another.
        self._buffers = RecycledBuffers(kept=2)

    def all_reduce(self, tensors: Tensors, op: Any) -> None:
        for tensor in tensors:
            if tensor.is_sparse:
                _all_reduce_sparse(self.communicator, tensor, op)
                continue
            kind = getattr(op, "op", op), tensor.dtype
            how = self._combinations.get(kind) or combination_of(op, tensor.dtype, self._size)
            if (
                how.of_numpy
                and tensor.is_contiguous()
                and not tensor.is_conj()
                and not tensor.is_neg()
            ):
                self._combinations[kind] = how
                self.communicator.all_reduce(tensor.detach().numpy(), how.reduction)
                continue
            with operand(tensor, how) as buffer:
                self.communicator.all_reduce(buffer, how.reduction)

    def all_reduce_coalesced(self, tensors: Tensors, op: Any) -> None:
        """Reduce all tensors in place, over all ranks, in one message per dtype."""
        for alike in by_dtype(tensors):
            buffer = flat(alike, self._buffers)
            self.all_reduce([buffer], op)
            unflatten(buffer, alike)

    def reduce(self, tensors: Tensors, root: int, op: Any) -> None:
        for tensor in tensors:
            how = combination_of(op, tensor.dtype, self._size)
            writes = how.factor is not None or how.divisor is not None
            if writes and self._rank != root:
                tensor = tensor.detach().clone()  # the program's tensor stays as it is
            with operand(tensor, how) as buffer:
                self.communicator.reduce(buffer, root, how.reduction)

    def broadcast(self, tensors: Tensors, root: int) -> None:
        for tensor in tensors:
            with written(tensor) as buffer:
                self.communicator.broadcast(buffer, root)

    def all_gather_single(self, out: Tensor, tensor: Tensor) -> None:
        sent = read(tensor)
        with written(out) as buffer:
            # Unless `tensor` is this rank's part of `out`.
            if sent.data_ptr() != buffer.data_ptr() + self._rank * sent.nbytes:
                sent = apart(sent, buffer)
            self.communicator.all_gather_into(sent, buffer)

    def all_gather_singles(self, outs: Tensors, tensors: Tensors) -> None:
        inputs = unwritten(tensors, [[out] for out in outs])
        for out, tensor in zip(outs, inputs, strict=True):
            self.all_gather_single(out, tensor)

    def all_gather(self, lists: Sequence[Tensors], tensors: Tensors) -> None:
        """Gather the ranks' tensors on all ranks. The shapes may differ between ranks.

        Args:
            lists: for each tensor of `tensors` a list of outputs. Its r-th tensor gets the tensor of rank r.
            tensors: this rank's tensors.
        """
        for outs, tensor in zip(lists, unwritten(tensors, lists), strict=True):
            _check_one_a_rank(self.communicator, "all_gather", outs)
            kinds = {(out.shape, out.dtype) for out in outs}
            if kinds == {(tensor.shape, tensor.dtype)}:
                shape = (self._size, *tensor.shape)
                gathered = self._buffers.empty(shape, tensor.dtype)
                self.communicator.all_gather_into(read(tensor), gathered)
                parts: Tensors = gathered.unbind()
            else:
                parts = self.communicator.all_gather(read(tensor))
            for out, part in zip(outs, parts, strict=True):
                out.detach().copy_(part)

    def gather(self, lists: Sequence[Tensors], tensors: Tensors, root: int) -> None:
        """Gather the ranks' tensors on rank `root`. All ranks give tensors of the same shapes.

        Args:
            lists: on rank `root`, for each tensor of `tensors` a list of outputs, one for each rank. Elsewhere empty.
            tensors: this rank's tensors.
        """
        here = self._rank == root
        for i, tensor in enumerate(tensors):
            outs: Tensors = ()
            if here:
                outs = lists[i]
                _check_one_a_rank(self.communicator, "gather", outs)
            rows = read(tensor).reshape(1, -1)
            sent, received = _one_row_to(root, self.communicator)
            gathered = rows.new_empty((sum(received), rows.shape[1]))
            label = f"gather of {tuple(tensor.shape)} to {root}"
            self.communicator.all_to_all(rows, gathered, sent, received, label=label)
            for out, part in zip(outs, gathered, strict=True):
                out.detach().copy_(part.view(out.shape))

    def scatter(self, outs: Tensors, lists: Sequence[Tensors], root: int) -> None:
        """Send each rank its tensors from rank `root`.

        Args:
            outs: this rank's outputs.
            lists: on rank `root`, for each output a list. Its r-th tensor goes to rank r. Elsewhere empty.
        """
        here = self._rank == root
        for i, out in enumerate(outs):
            label = f"scatter of {tuple(out.shape)} from {root}"
            received, sent = _one_row_to(root, self.communicator)
            with written(out) as buffer:
                row = buffer.view(1, -1)
                rows = row[:0]
                if here:
                    parts = lists[i]
                    _check_one_a_rank(self.communicator, "scatter", parts)
                    rows = torch.stack([part.detach().reshape(-1) for part in parts])
                self.communicator.all_to_all(rows, row, sent, received, label=label)

    def reduce_scatter_single(self, out: Tensor, tensor: Tensor, op: Any) -> None:
        how = combination_of(op, tensor.dtype, self._size)
        source = read(tensor)
        if how.factor is not None:
            source = source * how.factor
        with written(out) as buffer:
            parts = buffer.reshape(-1)
            whole = apart(source, buffer).reshape(-1)
            if whole.dtype is torch.bool:
                whole = whole.view(torch.uint8)
                parts = parts.view(torch.uint8)
            self.communicator.reduce_scatter(whole, parts, how.reduction)
            if how.divisor is not None:
                buffer.div_(how.divisor, rounding_mode="trunc")

    def reduce_scatter_singles(self, outs: Tensors, tensors: Tensors, op: Any) -> None:
        inputs = unwritten(tensors, [[out] for out in outs])
        for out, tensor in zip(outs, inputs, strict=True):
            self.reduce_scatter_single(out, tensor, op)

    def reduce_scatter(self, outs: Tensors, lists: Sequence[Tensors], op: Any) -> None:
        """Combine tensors over the ranks by `op`. Each rank gets the results for itself.

        Args:
            outs: this rank's outputs.
            lists: for each output a list of this rank's inputs. Its r-th tensor goes into the output of rank r. The
                shapes in a list may differ.
        """
        for out, parts in zip(outs, lists, strict=True):
            _check_one_a_rank(self.communicator, "reduce_scatter", parts)
            whole = flat(parts, self._buffers)
            counts = lengths(parts)
            if len(set(counts)) == 1:
                self.reduce_scatter_single(out, whole, op)
            else:
                self.all_reduce([whole], op)
                part = whole.split(counts)[self._rank]
                out.detach().copy_(part.view(out.shape))

    def all_to_all_single(
        self, out: Tensor, tensor: Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> None:
        """Send rows of `tensor` to the ranks, and receive rows in `out`, in the order of ranks.

        Args: received, sent: the number of rows from, and to, each rank; empty for equally many.
        Raises: ValueError if a list is empty and the rows cannot be divided equally.
        """
        with written(out) as buffer:
            sent = sent or _equal_parts(tensor, self._size, "input")
            received = received or _equal_parts(out, self._size, "output")
            rows = apart(read(tensor), buffer)
            self.communicator.all_to_all(rows, buffer, list(sent), list(received))

    def all_to_all(self, outs: Tensors, tensors: Tensors) -> None:
        """Send `tensors[r]` to each rank r, and receive the tensor from rank r in `outs[r]`. Shapes may differ."""
        _check_one_a_rank(self.communicator, "all_to_all", outs)
        _check_one_a_rank(self.communicator, "all_to_all", tensors)
        sent = lengths(tensors)
        received = lengths(outs)
        buffer = self._buffers.empty((sum(received),), tensors[0].dtype)
        self.communicator.all_to_all(flat(tensors, self._buffers), buffer, sent, received)
        unflatten(buffer, outs)


def _all_reduce_sparse(communicator: Communicator, tensor: Tensor, op: Any) -> None:
    name = getattr(op, "op", op).name
    if name not in ("SUM", "AVG"):
        raise ValueError(f"sparse tensors have ReduceOp.SUM and AVG, got ReduceOp.{name}")
    summand = tensor.detach().coalesce()
    indices = communicator.all_gather(summand.indices().contiguous(), label="indices")
    values = communicator.all_gather(summand.values().contiguous(), label="values")
    parts = torch.cat(indices, 1), torch.cat(values)
    total = torch.sparse_coo_tensor(*parts, summand.shape, device=summand.device).coalesce()
    if name == "AVG":
        total = total / communicator.size
    with torch.no_grad():
        tensor.copy_(total)  # not into detach(): its result has its own indices


def _one_row_to(root: int, communicator: Communicator) -> tuple[list[int], list[int]]:
    """Return arguments for an all-to-all that sends one row of each rank to `root`.

    Returns: the number of rows that this rank sends to, and receives from, each rank: two lists by rank.
    """
    sent = [int(rank == root) for rank in range(communicator.size)]
    return sent, [int(communicator.rank == root)] * communicator.size


def _check_one_a_rank(communicator: Communicator, call: str, tensors: Tensors) -> None:
    if len(tensors) != communicator.size:
        raise ValueError(
            f"rank {communicator.rank}: {call} over {communicator.size} ranks needs a list with a tensor for each, got "
            f"{len(tensors)}"
        )


def _equal_parts(tensor: Tensor, size: int, which: str) -> list[int]:
    rows = math.prod(tensor.shape[:1])  # a tensor without dimensions is one row
    if rows % size:
        raise ValueError(
            f"all_to_all_single without {which}_split_sizes needs an {which} whose rows can be shared out among {size} "
            f"ranks, got the shape {tuple(tensor.shape)}"
        )
    return [rows // size] * size
