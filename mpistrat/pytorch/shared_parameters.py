"""`shared_parameters=True`: the ranks of a node keep one copy of the parameters, and one of their gradients.

Each rank owns a slice of both: it sums that slice of all gradients, and its optimizer steps update that slice of the
parameters (`slice_steps`); so nothing is copied back. Parameters and `.grad` are views that are copied on write
(`common_memory`): whatever else a program does to them, clipping, scaling, loading, averaging weights, each rank does
to memory of its own, as it would without sharing. At the next step owners publish what was written to parameters.
"""

from __future__ import annotations

import dataclasses
import warnings
import weakref
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from mpistrat.communicators import Communicator
from mpistrat.communicators.arithmetic import arithmetic_of
from mpistrat.communicators.common_memory import PAGE, CommonMemory, Part, View
from mpistrat.pytorch.flat_buffers import is_dense
from mpistrat.pytorch.registry import Registry


@dataclasses.dataclass(frozen=True, eq=False)
class Place:
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
            tensor = torch.empty_strided(self.shape, self.stride, dtype=tensor.dtype).copy_(tensor)
        return tensor.as_strided((tensor.numel(),), (1,))


class Block:
    """Parameters that were mirrored together, with their gradients."""

    def __init__(self, values: CommonMemory, gradients: CommonMemory) -> None:
        self.values, self.gradients = values, gradients
        self.value_view, self.gradient_view = values.view(), gradients.view()
        assert gradients.contribution is not None
        self._mine = gradients.contribution
        # By where a place begins: a block does not refer to its places, which refer to it.
        self._contributions: dict[int, torch.Tensor] = {}
        # The memory of each `.grad` that was handed out: alive as long as anything refers to it.
        self._lent: dict[int, weakref.ref[np.ndarray]] = {}

    def bring(self, places: Sequence[Place], gradients: Sequence[torch.Tensor | None]) -> None:
        """Put this rank's gradients, None for zero, where they are summed from."""
        targets, sources, absent = [], [], []
        for place, gradient in zip(places, gradients, strict=True):
            target = self._contributions.get(place.first)
            if target is None:
                target = place.in_shape(place.flat(self._mine))
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

    def make_way(self, places: Iterable[Place]) -> None:
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

    def lend(self, place: Place) -> torch.Tensor:
        memory = self.gradient_view.memory[place.first : place.end]
        self._lent[place.first] = weakref.ref(memory)
        return place.in_shape(torch.from_numpy(memory).view(place.dtype))


class SharedParameters:
    """Which parameters of a strategy lie in memory that the ranks of a node share. One replica per rank."""

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator
        # By id, because torch's own dictionaries of weak keys take a microsecond for each of them.
        self._places: dict[int, tuple[weakref.ref[torch.Tensor], Place]] = {}
        self._told_of_devices = False
        self._refused = False

    def place_of(self, parameter: torch.Tensor) -> Place | None:
        """None where it is not shared."""
        kept = self._places.get(id(parameter))
        return kept[1] if kept is not None and kept[0]() is parameter else None

    def has_moved(self, parameter: torch.Tensor) -> bool:
        """Whether a shared parameter has been given other memory: by `.data = …`, or a module's `.to(dtype)`."""
        place = self.place_of(parameter)
        return (
            place is not None
            and parameter.data_ptr() != place.block.value_view.address + place.first
        )

    def moved(self, registry: Registry) -> list[tuple[str, torch.Tensor]]:
        """The mirrored parameters that `has_moved` is true of, with their names."""
        pairs = zip(registry.slots, registry.parameters(), strict=True)
        return [(slot.name, p) for slot, p in pairs if p is not None and self.has_moved(p)]

    def check_unmoved(self, parameters: Iterable[torch.Tensor]) -> None:
        """RuntimeError on all ranks if one of them has been given other memory since the last `run` began."""
        for parameter in parameters:
            if self.has_moved(parameter):
                self.communicator.raise_together(
                    RuntimeError(
                        f"a shared parameter of shape {list(parameter.shape)} was given other memory inside run, by "
                        "`.data = …` or a module's .to(); do it outside run, where the next run shares it again, or "
                        "write in place: parameter.copy_(…)"
                    )
                )

    def share(self, parameters: Sequence[torch.Tensor]) -> None:
        """Move `parameters`, equal on all ranks, to shared memory where they are not there yet.

        Collective. Then all parameters are equal to what the owners of their slices have.
        """
        pending = {id(p): p for p in parameters if self.place_of(p) is None or self.has_moved(p)}
        eligible = [] if self._refused else self._eligible(list(pending.values()))
        if eligible:
            self._make_block(eligible)
        self.settle()

    def _eligible(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Those that can be shared; the others are each rank's own, as without sharing.

        Not what lies on a GPU, nor tensors that lie in one storage, which must go on doing so, nor single numbers,
        whose state in an optimizer could not be told from its counters.
        """
        storages = [p.untyped_storage().data_ptr() for p in parameters if _is_plain(p)]
        shared = []
        for parameter in parameters:
            if _is_plain(parameter) and storages.count(parameter.untyped_storage().data_ptr()) == 1:
                shared.append(parameter)
            elif parameter.device.type != "cpu" and not self._told_of_devices:
                self._told_of_devices = True
                self._warn(f"parameters on {parameter.device.type} are each rank's own")
        return shared

    def _make_block(self, parameters: list[torch.Tensor]) -> None:
        parameters = sorted(parameters, key=lambda p: str(p.dtype))  # a stable order of dtypes
        firsts, nbytes = [], 0
        for parameter in parameters:
            firsts.append(nbytes)
            nbytes += -(-parameter.nbytes // PAGE) * PAGE
        values, why = self.communicator.common_memory(nbytes)
        gradients = None
        if values is not None:
            gradients, why = self.communicator.common_memory(nbytes, summed=True)
        if values is None or gradients is None:
            self._refused = True
            self._warn(f"each rank keeps a copy of its own: {why}")
            return
        block = Block(values, gradients)
        places = []
        for parameter, first in zip(parameters, firsts, strict=True):
            given = (parameter.dtype, parameter.shape, parameter.stride())
            place = Place(block, first, parameter.nbytes, *given)
            start, end = place.own(values)
            place.flat(values.shared)[start:end] = place.in_order(parameter.detach())[start:end]
            places.append(place)
        self.communicator.barrier(label="shared parameters")  # all slices are there
        for parameter, place in zip(parameters, places, strict=True):
            self._keep(parameter, place)
            parameter.data = place.in_shape(place.flat(block.value_view.memory))

    def _keep(self, parameter: torch.Tensor, place: Place) -> None:
        places, key = self._places, id(parameter)

        def forget(reference: weakref.ref[torch.Tensor]) -> None:
            if key in places and places[key][0] is reference:
                del places[key]

        places[key] = (weakref.ref(parameter, forget), place)

    def _warn(self, what: str) -> None:
        if self.communicator.rank == 0:
            warnings.warn(f"shared_parameters=True, but {what}", RuntimeWarning, stacklevel=2)

    def blocks(self, parameters: Iterable[torch.Tensor]) -> list[Block]:
        """Those that `parameters` lie in."""
        places = (self.place_of(p) for p in parameters)
        return list(dict.fromkeys(place.block for place in places if place is not None))

    def settle(self) -> None:
        """Make one copy again of what ranks wrote into parameters: what the owners of the slices wrote. Collective."""
        blocks = dict.fromkeys(place.block for _, place in self._places.values())
        if blocks:
            settling = Settling(self.communicator, "publishing shared parameters")
            for block in blocks:
                settling.add(block.values, block.value_view)
            settling.begin()
            settling.end()

    def reduce(
        self,
        slots: Sequence[int],
        parameters: Sequence[torch.Tensor | None],
        contributions: Sequence[torch.Tensor | None],
        aside: dict[int, torch.Tensor],
        scale: float | None,
    ) -> dict[int, torch.Tensor]:
        """The reduced gradients of those of `slots` that are shared, added to those in `aside`, which are taken out.

        Args:
            parameters, contributions: by slot; None of the latter counts as zero.
            aside: by slot, the gradients of earlier backwards.
            scale: multiplied to the sums, or None.
        """
        by_block: dict[Block, dict[int, Place]] = {}
        for slot in slots:
            parameter = parameters[slot]
            place = None if parameter is None else self.place_of(parameter)
            if place is not None:
                by_block.setdefault(place.block, {})[slot] = place
        reduced: dict[int, torch.Tensor] = {}
        for block, places in by_block.items():
            self.check_unmoved(parameters[slot] for slot in places)  # type: ignore[misc]
            before = {slot: aside.pop(slot) for slot in places if slot in aside}
            reduced.update(self._reduce_block(block, places, contributions, before, scale))
        return reduced

    def _reduce_block(
        self,
        block: Block,
        places: dict[int, Place],
        contributions: Sequence[torch.Tensor | None],
        before: dict[int, torch.Tensor],
        scale: float | None,
    ) -> dict[int, torch.Tensor]:
        block.bring(list(places.values()), [contributions[slot] for slot in places])
        view = block.gradient_view
        grown = {slot for slot, tensor in before.items() if places[slot].holds(tensor, view)}
        block.make_way(place for slot, place in places.items() if slot not in grown)
        if block.gradient_view is not view:
            view, grown = block.gradient_view, set()
        for slot, tensor in before.items():
            if slot not in grown:  # it lies elsewhere: the program put it there
                flat = places[slot].flat(view.memory)
                flat.copy_(places[slot].in_order(tensor.detach()))
        parts = _parts([(place, slot in before) for slot, place in places.items()])
        label = f"gradients of {len(places)} parameters"
        self.communicator.sum_into(block.gradients, parts, view, scale, label=label)
        written = view.written()
        if written.any():
            used = np.zeros_like(written)
            for place in places.values():
                used[place.pages] = True
            written &= used
        view.renew(written)
        return {
            slot: before[slot] if slot in grown else block.lend(place)
            for slot, place in places.items()
        }


class Settling:
    """What ranks wrote into views of memories, published by the owners; between `begin` and `end` only owners write."""

    def __init__(self, communicator: Communicator, why: str) -> None:
        self._communicator, self._why = communicator, why
        self._written: list[tuple[CommonMemory, View, np.ndarray]] = []

    def add(self, memory: CommonMemory, view: View) -> None:
        self._written.append((memory, view, view.written()))

    def begin(self) -> None:
        """Collective."""
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


def _is_plain(parameter: torch.Tensor) -> bool:
    return (
        parameter.device.type == "cpu"
        and parameter.layout is torch.strided
        and type(parameter.data) is torch.Tensor
        and not parameter.is_inference()
        and (parameter.is_floating_point() or parameter.is_complex())
        and arithmetic_of(parameter, "sum") is not None
        and parameter.numel() > 1
        and is_dense(parameter)
    )


def _parts(places: Sequence[tuple[Place, bool]]) -> list[Part]:
    """As few parts as `places`, in ascending order, allow. The bytes between them are zeros in all memories."""
    parts: list[Part] = []
    first = end = 0
    run: tuple[torch.dtype, bool] | None = None
    for place, added in sorted(places, key=lambda one: one[0].first):
        if run != (place.dtype, added) or end != place.first:
            if run is not None:
                parts.append(Part(torch.empty(0, dtype=run[0]), first, end, run[1]))
            first, run = place.first, (place.dtype, added)
        end = place.pages.stop * PAGE
    if run is not None:
        parts.append(Part(torch.empty(0, dtype=run[0]), first, end, run[1]))
    return parts
