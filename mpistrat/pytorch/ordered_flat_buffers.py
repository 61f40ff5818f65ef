"""Flat buffers of gradients whose sums do not depend on how replicas are spread over ranks."""

from __future__ import annotations

from typing import Any

import torch

from mpistrat import arrays
from mpistrat.communicators import Communicator
from mpistrat.communicators.reduction_tree import tree_of_ranks, tree_of_replicas
from mpistrat.pytorch.flat_buffers import FlatBuffers, alike, as_pieces, fill
from mpistrat.pytorch.registry import Registry


class OrderedFlatBuffers(FlatBuffers):
    """`FlatBuffers` that adds up replicas in the order of `communicators.reduction_tree`.

    Args:
        replicas_of_ranks: how many replicas each rank has, in rank order.
    """

    def __init__(self, registry: Registry, replicas_of_ranks: tuple[int, ...]) -> None:
        super().__init__(registry)
        self._replicas_of_ranks = replicas_of_ranks

    def reduce(
        self,
        communicator: Communicator,
        slots: list[int],
        parameters: list[torch.Tensor | None],
        contributions: list[list[Any]],
        scale: float | None,
    ) -> list[torch.Tensor]:
        views: dict[int, torch.Tensor] = {}
        for group in alike(slots, parameters).values():
            like = [parameters[slot] for slot in group]
            gradients = [[own[slot] for slot in group] for own in contributions]
            views.update(zip(group, self._sum(communicator, like, gradients, scale), strict=True))
        return [views[slot] for slot in slots]

    def _sum(
        self,
        communicator: Communicator,
        like: list[Any],
        gradients: list[list[Any]],
        scale: float | None,
    ) -> list[torch.Tensor]:
        """The sums over all replicas of one group's `gradients`, for each local replica a list."""
        of_ranks = self._replicas_of_ranks
        replicas, first = len(gradients), sum(of_ranks[: communicator.rank])
        mine = tree_of_replicas(sum(of_ranks), first, first + replicas)
        tree = tree_of_ranks(of_ranks)
        length = sum(parameter.numel() for parameter in like)
        dtype, device = like[0].dtype, like[0].device
        short = dtype.is_floating_point and dtype.itemsize < 4
        summed = torch.float32 if short and max(of_ranks) > 1 else dtype  # rounded once, at the end
        sums = self._buffer(
            communicator if tree.one_each else None, len(mine.left) * length, summed, device
        ).view(len(mine.left), length)
        places = dict(zip(mine.left, sums, strict=True))
        flats: dict[int, torch.Tensor] = {}  # by replica: its gradients, and what was added to them

        def flat_of(replica: int) -> torch.Tensor:
            if replica not in flats:
                flat = places.get(replica)
                if flat is None:
                    flat = self._buffer(None, length, summed, device)
                fill(as_pieces(flat, like), gradients[replica])
                flats[replica] = flat
            return flats[replica]

        for to, added in mine.additions:
            total = flat_of(to)
            if added in flats:
                total.add_(flats.pop(added))
            else:
                _add(as_pieces(total, like), gradients[added])
        for position in mine.left:
            flat_of(position)
        label = f"gradients of {len(like)} parameters"
        if device.type == "cpu":
            communicator.all_reduce_by_tree(sums, tree, label=label, scale=scale)
        elif communicator.size > 1:
            host = arrays.to_host(sums)
            communicator.all_reduce_by_tree(host, tree, label=label, scale=scale)
            sums[0].copy_(host[0])
        elif scale is not None:
            sums[0].mul_(scale)
        total = sums[0]
        if summed != dtype:
            total = self._buffer(None, length, dtype, device).copy_(total)
        return as_pieces(total, like)


def _add(pieces: list[torch.Tensor], gradients: list[Any]) -> None:
    """Where there is none, zero is added: minus zero must not survive on some splits of replicas only."""
    for piece, gradient in zip(pieces, gradients, strict=True):
        if gradient is None:
            piece.add_(0)
        else:
            piece.add_(gradient.to_dense() if gradient.is_sparse else gradient)
