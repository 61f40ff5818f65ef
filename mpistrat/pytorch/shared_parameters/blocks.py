"""Where shared parameters and their gradients lie, and how what ranks wrote there is made one again."""

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
    """Where a parameter lies in the memories of its block: pages of its own."""

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
        """What `memory` holds at this place, one-dimensional, in its order there. It is a storage of its own."""
        return torch.from_numpy(memory[self.first : self.end]).view(self.dtype)

    def in_shape(self, flat: torch.Tensor) -> torch.Tensor:
        """Shaped and strided as the parameter is."""
        return flat.as_strided(self.shape, self.stride)

    def holds(self, tensor: torch.Tensor, view: View) -> bool:
        """Whether `tensor` is this place of `view`."""
        return (
            tensor.layout is torch.strided
            and tensor.dtype is self.dtype
            and tensor.data_ptr() == view.address + self.first
            and tensor.shape == self.shape
            and tensor.stride() == self.stride
        )

    def own(self, memory: CommonMemory) -> tuple[int, int]:
        """The part of the place that this rank owns, as elements of the parameter."""
        first, end = max(self.first, memory.first), min(self.end, memory.end)
        size = self.dtype.itemsize
        return ((first - self.first) // size, (end - self.first) // size) if first < end else (0, 0)

    def in_order(self, tensor: torch.Tensor) -> torch.Tensor:
        """The elements of a tensor of the parameter's shape, one-dimensional, in the order of the place."""
        if tensor.layout is not torch.strided:
            tensor = tensor.to_dense()
        if tensor.stride() != self.stride:
            tensor = tensor.new_empty_strided(self.shape, self.stride).copy_(tensor)
        return tensor.as_strided((tensor.numel(),), (1,))


class Block:
    """Parameters that were mirrored together, with their gradients.

    Args: contribution: this rank's contributions to `gradients`.
    """

    def __init__(
        self, values: CommonMemory, gradients: CommonMemory, contribution: np.ndarray
    ) -> None:
        self.values, self.gradients, self._contribution = values, gradients, contribution
        self.value_view, self.gradient_view = values.view(), gradients.view()
        # By where a place begins: a block does not refer to its places, which refer to it.
        self._contributions: dict[int, torch.Tensor] = {}
        # The memory of each `.grad` that was handed out: alive as long as anything refers to it.
        self._lent: dict[int, weakref.ref[np.ndarray]] = {}

    def bring(
        self, places: Sequence[ParameterPages], gradients: Sequence[torch.Tensor | None]
    ) -> None:
        """Put this rank's gradients, None for zero, where they are summed from."""
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
        """The gradients at `places` are about to be overwritten: leave to the program those it still holds.

        They stay where they are, in a view that changes no more; others are handed out in a new one.
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
    """The owners publish what ranks wrote into views of memories. Between `begin` and `end` only owners write."""

    def __init__(self, communicator: Communicator, why: str) -> None:
        self._communicator, self._why = communicator, why
        self._written: list[tuple[CommonMemory, View, np.ndarray]] = []

    def begin(self, memories: Iterable[tuple[CommonMemory, View]]) -> None:
        """Collective."""
        self._written = [(memory, view, view.written()) for memory, view in memories]
        # A rank that reads parameters has not come here yet.
        self._communicator.barrier(label=f"before {self._why}")
        for memory, view, pages in self._written:
            memory.publish(view, pages)

    def end(self) -> None:
        """Collective."""
        # Nobody goes on before all slices are there.
        self._communicator.barrier(label=f"after {self._why}")
        for _, view, pages in self._written:
            view.renew(pages)
