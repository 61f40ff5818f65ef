"""Sums of the dense gradients that were not sent while `backward()` ran, in one pack (flat buffer) after the other."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence

import torch

from mpistrat.arrays import is_on_gpu
from mpistrat.communicators import Reduction, reducing
from mpistrat.cross_device_ops.packing import Packer
from mpistrat.pytorch.gradients.agreement import ReplicaBackward
from mpistrat.pytorch.gradients.buckets import cut
from mpistrat.pytorch.gradients.device_buckets import bucket_bytes, let_go
from mpistrat.pytorch.gradients.wires import Wires
from mpistrat.replicas.torch_modules import ModuleParts

_IS_CPU = operator.attrgetter("is_cpu")


class DenseSums:
    """Sums up dense gradients over all replicas of all ranks, after backward().

    Attributes:
        spent: this rank's own gradients of the last sum on the host, by slot. They are kept only so that the next
            backward, when it drops them, gets their memory again.
    """

    def __init__(self, parts: ModuleParts, packer: Packer, wires: Wires) -> None:
        self._packer = packer
        self._wires = wires
        self._communicator = parts.group.communicator
        self._options = parts.ops.options
        self._all_reduce_packs = (parts.gradient_sums or parts.ops.over_ranks).all_reduce_packs
        # If these tensors were freed right after the sum, they could lie at the top of the heap. glibc would return
        # them to the system, and page faults of the next backward took a quarter of a training step.
        self.spent: list[torch.Tensor] = []

    def of(self, slots: list[int], steps: list[ReplicaBackward]) -> dict[int, torch.Tensor]:
        """Sum up the gradients of the parameters with the numbers `slots`, over all replicas. Collective.

        Gradients of the host and of XLA devices are in one call. Gradients of GPUs are summed up in several packs, one
        after the other. A rank of one replica frees a pack's gradients after its sum, so that the next pack uses their
        memory.
        Args: steps: the backwards of this rank's replicas. On a GPU, with one replica, their gradients and `.grad`
            become None.
        Returns: the sums by slot, multiplied by the backward's `scale`. A parameter that this rank's replicas have
            not used counts as zeros.
        """
        step = steps[0]
        parameters = step.parameters
        gradients = [backward.gradients for backward in steps]
        reduction_of = functools.partial(self._reduction, step)
        # Maps of C functions: a generator would run Python code for each parameter.
        like = list(map(parameters.__getitem__, slots))
        if all(map(_IS_CPU, like)):
            self.spent = step.gradients
            return self._all_reduce_packs(self._packer, parameters, slots, gradients, reduction_of)
        parts = [slots]
        if any(is_on_gpu(parameter) for parameter in like):
            nbytes = self._options.bytes_per_pack or bucket_bytes(like)
            parts = cut(slots[::-1], parameters, nbytes)
        sums: dict[int, torch.Tensor] = {}
        for part in parts:
            sums |= self._all_reduce_packs(self._packer, parameters, part, gradients, reduction_of)
            if len(steps) == 1 and is_on_gpu(parameters[part[0]]):
                let_go(map(step.gradients.__getitem__, part))
                for slot in part:
                    step.gradients[slot] = parameters[slot].grad = None
        return sums

    def _reduction(self, step: ReplicaBackward, slots: Sequence[int]) -> Reduction:
        label = f"gradients of {len(slots)} parameters"
        if not self._wires.has_format:
            return reducing("sum", label, step.scale)
        on_gpu = is_on_gpu(step.parameters[slots[0]])
        natively = on_gpu and self._communicator.ordered_by_streams
        return self._wires.reduction(label, step.scale, slots, natively=natively)
