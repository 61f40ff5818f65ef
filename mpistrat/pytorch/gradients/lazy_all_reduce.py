"""Sums of gradients that XLA has yet to compute: they are packed and unpacked inside its graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from mpistrat.arrays import to_device, to_host
from mpistrat.communicators import Communicator, Reduction
from mpistrat.cross_device_ops import packing
from mpistrat.cross_device_ops.all_reduce import MpiAllReduce
from mpistrat.cross_device_ops.packing import Packer


class LazyAllReduce(MpiAllReduce):
    """As `MpiAllReduce`; parameters on the host are treated as there.

    Args:
        sum_of_rank: the sum over the cores of this rank, inside the graph.

    Where XLA does not connect the ranks, what was recorded so far is computed; the sums go through host memory, and a
    second graph goes on with them.
    """

    def __init__(
        self, communicator: Communicator, sum_of_rank: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        super().__init__(communicator)
        self._sum_of_rank = sum_of_rank

    def all_reduce_packs(
        self,
        packer: Packer,
        like: Sequence[Any],
        indices: Sequence[int],
        contributions: Sequence[Any],
        reduction_of: Callable[[Sequence[int]], Reduction],
    ) -> dict[int, Any]:
        """As of any. A gradient that is summed leaves `.grad` and `contributions`.

        Else the graph would have it as a result of its own.
        """
        on_host = [i for i in indices if like[i].device.type != "xla"]
        sums = super().all_reduce_packs(packer, like, on_host, contributions, reduction_of)
        (own,) = contributions
        lazy = [i for i in indices if i not in sums]
        for group in packing.alike(like, lazy):
            gradients = []
            for i in group:
                parameter, gradient = like[i], own[i]
                own[i] = parameter.grad = None
                if gradient is None:
                    gradient = torch.zeros_like(parameter)
                gradients.append(gradient.to_dense() if gradient.is_sparse else gradient)
            flat = packing.concatenated(gradients)
            shapes = [like[i] for i in group]
            dtype = flat.dtype
            del gradients, gradient
            total = self._sum(packer, flat, reduction_of(group))
            sums.update(zip(group, packing.unpack(total.to(dtype), shapes), strict=True))
        return sums

    def _sum(self, packer: Packer, flat: torch.Tensor, reduction: Reduction) -> torch.Tensor:
        flat = self._sum_of_rank(flat)
        communicator = self.communicator
        if communicator.size == 1:
            return flat if reduction.scale is None else flat * reduction.scale
        if communicator.takes_device_buffers:
            communicator.all_reduce(flat, reduction)
            return flat
        device = flat.device
        host = to_host(flat)
        del flat
        buffer = packer.memory(len(host), host, communicator=communicator)
        buffer.copy_(host)
        communicator.all_reduce(buffer, reduction)
        return to_device(buffer, str(device))
