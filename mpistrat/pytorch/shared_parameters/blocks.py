"""Where shared parameters and gradients lie in a node's memory, and how ranks publish their writes."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from mpistrat.communicators import Communicator
from mpistrat.communicators.node.common_memory import PAGE, CommonMemory, View


@dataclasses.dataclass(frozen=True, eq=False)
class ParameterPages:
    """The place of one parameter in the memories of its block: whole memory pages that no other parameter uses.

    The parameter, its gradient and its optimizer state lie at the same bytes of several memories of equal size.
    Attributes:
        block: the `Block`, the memories of the parameters that were mirrored together with this parameter.
        first: the parameter's first byte in each memory.
        nbytes: the parameter's size in bytes.
        end: the byte after the parameter's last.
        pages: the numbers of the memory pages.
    """

    block: Block
    first: int
    nbytes: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]

    @property
    def end(self) -> int:
        return self.first + self.nbytes

    @property
    def pages(self) -> slice:
        return slice(self.first // PAGE, -(-self.end // PAGE))

    def flat(self, memory: np.ndarray) -> torch.Tensor:
        """Return the parameter's elements in `memory` as a one-dimensional view, in memory order.

        The storage of the view is these bytes alone.
        """
        return torch.from_numpy(memory[self.first : self.end]).view(self.dtype)

    def in_shape(self, flat: torch.Tensor) -> torch.Tensor:
        """Return a view of `flat` in the parameter's shape and strides."""
        return flat.as_strided(self.shape, self.stride)

    def holds(self, tensor: torch.Tensor, view: View) -> bool:
        """Whether `tensor` is the memory of `view` at this place, with the parameter's dtype, shape and strides."""
        return (
            tensor.layout is torch.strided
            and tensor.dtype is self.dtype
            and tensor.data_ptr() == view.address + self.first
            and tensor.shape == self.shape
            and tensor.stride() == self.stride
        )

    def own(self, memory: CommonMemory) -> tuple[int, int]:
        """Return the first element of this rank's slice of the parameter, and the element after its last.

        The slice is the part of the parameter in this rank's part of the memory. (0, 0): the slice is empty.
        """
        first = max(self.first, memory.first) - self.first
        end = min(self.end, memory.end) - self.first
        if first >= end:
            return (0, 0)
        size = self.dtype.itemsize
        return (first // size, end // size)

    def in_order(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the elements of `tensor` as one dimension, in the memory order of the parameter.

        The result is a view of `tensor`, or a copy if `tensor` is sparse or has other strides.
        """
        tensor = tensor.to_dense()
        if tensor.stride() != self.stride:
            tensor = tensor.new_empty_strided(self.shape, self.stride).copy_(tensor)
        return tensor.as_strided((tensor.numel(),), (1,))


class Block:
    """Memory that a node's ranks share, for the parameters that were mirrored together, and for their gradients.

    Args:
        values: the memory of the parameters.
        gradients: the memory of the summed gradients, of the same size.
        contribution: bytes for this rank's own gradients before the sum, of the same size.

    Attributes:
        value_view: this rank's copy-on-write view of `values`; parameters are tensors in it.
        gradient_view: this rank's copy-on-write view of `gradients`; `.grad`s are tensors in it.
    """

    def __init__(
        self, values: CommonMemory, gradients: CommonMemory, contribution: np.ndarray
    ) -> None:
        self.values = values
        self.gradients = gradients
        self._contribution = contribution
        self.value_view = values.view()
        self.gradient_view = gradients.view()
        # Keys are first bytes. `ParameterPages` refer to their block, so as keys they would keep it alive.
        self._contributions: dict[int, torch.Tensor] = {}
        # Weak references to the memory of each `.grad` that `lend` returned, alive while the program refers to it.
        self._lent: dict[int, weakref.ref[np.ndarray]] = {}

    def bring(
        self, places: Sequence[ParameterPages], gradients: Sequence[torch.Tensor | None]
    ) -> None:
        """Copy this rank's gradients to its contribution, so that the ranks can sum them.

        Args:
            places: the places of the parameters.
            gradients: the gradient for each place; None counts as zeros. A sparse gradient becomes dense.
        """
        targets = []
        sources = []
        absent = []
        for place, gradient in zip(places, gradients, strict=True):
            target = self._contributions.get(place.first)
            if target is None:
                target = place.in_shape(place.flat(self._contribution))
                self._contributions[place.first] = target
            if gradient is None:
                absent.append(target)
            else:
                targets.append(target)
                sources.append(gradient.to_dense() if gradient.is_sparse else gradient)
        if absent:
            torch._foreach_zero_(absent)
        if targets:
            torch._foreach_copy_(targets, sources)

    def make_way(self, places: Iterable[ParameterPages]) -> None:
        """Save earlier gradients that the program still refers to, before the sums overwrite `places`.

        If `places` have any such gradient, all earlier gradients in use keep their values in the old view, private to
        this rank, and `gradient_view` becomes a new view. Else nothing changes.
        """
        lent = {}
        for first, reference in self._lent.items():
            memory = reference()
            if memory is not None:
                lent[first] = memory
        if lent.keys().isdisjoint(place.first for place in places):
            return
        for first, memory in lent.items():
            self.gradient_view.detach(first, first + len(memory))
        self._lent = {}
        self.gradient_view = self.gradients.view()

    def lend(self, place: ParameterPages) -> torch.Tensor:
        memory = self.gradient_view.memory[place.first : place.end]
        self._lent[place.first] = weakref.ref(memory)
        return place.in_shape(torch.from_numpy(memory).view(place.dtype))


class Settling:
    """Makes the ranks' views of shared memories equal: in each slice, all see the values that its owner has written.

    Each rank owns one slice of a memory. Between `begin` and `end` only the owner of a slice may write it.
    Args: why: words for the reason, in the labels of the two barriers.
    """

    def __init__(self, communicator: Communicator, why: str) -> None:
        self._communicator = communicator
        self._why = why
        self._written: list[tuple[CommonMemory, View, np.ndarray]] = []

    def begin(self, memories: Iterable[tuple[CommonMemory, View]]) -> None:
        """Wait for all ranks, then publish this rank's slice of each memory to the shared memory. Collective.

        Only pages that this rank has written through its view are copied. Until `end`, the view keeps showing the
        rank's own writes, also in slices of other ranks.
        Args: memories: pairs of a memory and this rank's copy-on-write view of it.
        """
        self._written = [(memory, view, view.written()) for memory, view in memories]
        # Wait for all ranks: another rank may still read parameters.
        self._communicator.barrier(label=f"before {self._why}")
        for memory, view, pages in self._written:
            memory.publish(view, pages)

    def end(self) -> None:
        """Wait for all ranks, then have this rank's views show the published values of all slices. Collective.

        This rank's writes to slices of other ranks are lost.
        """
        # Wait until all slices are there.
        self._communicator.barrier(label=f"after {self._why}")
        for _, view, pages in self._written:
            view.renew(pages)
