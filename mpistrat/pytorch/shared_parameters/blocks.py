"""Places of shared parameters and gradients in a node's memory, and the publication of writes there."""

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
    """The pages of one parameter in each memory of its block. No other parameter lies in them.

    Attributes:
        first: the parameter's first byte in the memory.
        nbytes: the parameter's size in bytes.
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
        """Return the parameter's bytes in `memory` as a one-dimensional view, in memory order, with its own storage."""
        return torch.from_numpy(memory[self.first : self.end]).view(self.dtype)

    def in_shape(self, flat: torch.Tensor) -> torch.Tensor:
        """Return a view of `flat` in the parameter's shape and strides."""
        return flat.as_strided(self.shape, self.stride)

    def holds(self, tensor: torch.Tensor, view: View) -> bool:
        """Whether `tensor` lies exactly at this place of `view`."""
        return (
            tensor.layout is torch.strided
            and tensor.dtype is self.dtype
            and tensor.data_ptr() == view.address + self.first
            and tensor.shape == self.shape
            and tensor.stride() == self.stride
        )

    def own(self, memory: CommonMemory) -> tuple[int, int]:
        """Return the first and the end element of this rank's slice of the parameter; (0, 0) if it is empty."""
        first, end = max(self.first, memory.first), min(self.end, memory.end)
        size = self.dtype.itemsize
        return ((first - self.first) // size, (end - self.first) // size) if first < end else (0, 0)

    def in_order(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the elements of `tensor` as one dimension, in memory order of the parameter; perhaps a copy."""
        if tensor.layout is not torch.strided:
            tensor = tensor.to_dense()
        if tensor.stride() != self.stride:
            tensor = tensor.new_empty_strided(self.shape, self.stride).copy_(tensor)
        return tensor.as_strided((tensor.numel(),), (1,))


class Block:
    """Parameters that were mirrored together, with their gradients, in memory of the node.

    Args: contribution: this rank's contributions to `gradients`.
    """

    def __init__(
        self, values: CommonMemory, gradients: CommonMemory, contribution: np.ndarray
    ) -> None:
        self.values, self.gradients, self._contribution = values, gradients, contribution
        self.value_view, self.gradient_view = values.view(), gradients.view()
        # Keys are the first bytes of places, because places refer to their block, and a cycle would keep both alive.
        self._contributions: dict[int, torch.Tensor] = {}
        # Weak references to the memory of each `.grad` that was lent: alive while the program refers to it.
        self._lent: dict[int, weakref.ref[np.ndarray]] = {}

    def bring(
        self, places: Sequence[ParameterPages], gradients: Sequence[torch.Tensor | None]
    ) -> None:
        """Copy this rank's `gradients` of `places` into its contribution. None counts as zeros."""
        targets, sources, absent = [], [], []
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
        """Prepare to overwrite the gradients at `places`, and keep tensors that the program still holds.

        These stay in a view that no longer changes. Later gradients are lent from a new view.
        """
        lent = {
            first: memory for first, kept in self._lent.items() if (memory := kept()) is not None
        }
        if not any(place.first in lent for place in places):
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
    """Lets owners publish the ranks' writes to their slices. Between `begin` and `end` only owners write."""

    def __init__(self, communicator: Communicator, why: str) -> None:
        self._communicator, self._why = communicator, why
        self._written: list[tuple[CommonMemory, View, np.ndarray]] = []

    def begin(self, memories: Iterable[tuple[CommonMemory, View]]) -> None:
        """Publish this rank's writes to its slices. Collective."""
        self._written = [(memory, view, view.written()) for memory, view in memories]
        # Wait for all ranks: another rank may still read parameters.
        self._communicator.barrier(label=f"before {self._why}")
        for memory, view, pages in self._written:
            memory.publish(view, pages)

    def end(self) -> None:
        """Make this rank's views show all published slices. Collective."""
        # Wait until all slices are there.
        self._communicator.barrier(label=f"after {self._why}")
        for _, view, pages in self._written:
            view.renew(pages)
