"""Sums gradients on XLA devices. XLA has not computed these gradients yet; its graphs pack and unpack them."""

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
    """`MpiAllReduce` that also sums gradients on XLA devices, as operations of the step's graph.

    If XLA does not connect the ranks, XLA first computes the graph up to the gradients. The ranks then sum the
    gradients through host memory, and a second graph continues with the sums.

    Args:
        sum_of_rank: returns the sum of a flat tensor over the cores of this rank, recorded in the graph.
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
        """Sum gradients over all replicas; parameters on XLA devices lose their unsummed gradients. Collective.

        Such a parameter's `.grad` and its entry in `contributions` are set to None, so that the graph outputs only the
        sum. `MpiAllReduce` sums the gradients on the host.
        Args: contributions: a single list with this rank's gradients.
        Returns: a dict from each index to the summed gradient.
        """
        on_host = [i for i in indices if like[i].device.type != "xla"]
        sums = super().all_reduce_packs(packer, like, on_host, contributions, reduction_of)
        (gradients,) = contributions
        on_xla = [i for i in indices if i not in sums]
        for group in packing.alike(like, on_xla):
            parameters = [like[i] for i in group]
            flat = packing.concatenated([_taken_from(gradients, i, like[i]) for i in group])
            total = self._sum(packer, self._sum_of_rank(flat), reduction_of(group))
            pieces = packing.unpack(total.to(flat.dtype), parameters)
            sums.update(zip(group, pieces, strict=True))
        return sums

    def _sum(self, packer: Packer, flat: torch.Tensor, reduction: Reduction) -> torch.Tensor:
        communicator = self.communicator
        if communicator.size == 1:
            return flat if reduction.scale is None else flat * reduction.scale
        if communicator.takes_device_buffers:
            communicator.all_reduce(flat, reduction)
            return flat
        device = flat.device
        host = to_host(flat)
        del flat
        buffer = packer.memory(len(host), host, host.dtype, communicator.memory)
        buffer.copy_(host)
        communicator.all_reduce(buffer, reduction)
        return to_device(buffer, str(device))


def _taken_from(gradients: list[Any], index: int, parameter: torch.Tensor) -> torch.Tensor:
    """Return the gradient of `parameter` as a dense tensor, and set `gradients[index]` and `parameter.grad` to None.

    Returns: zeros if the parameter has no gradient.
    """
    gradient = gradients[index]
    gradients[index] = parameter.grad = None
    if gradient is None:
        return torch.zeros_like(parameter)
    return gradient.to_dense() if gradient.is_sparse else gradient
