"""`shared_parameters=True`: the ranks of a node keep one copy of the parameters, and one of their gradients.

Each rank owns a slice of both: it sums that slice of all gradients, and its optimizer steps update that slice of the
parameters (`slice_steps`); so nothing is copied back. Parameters and `.grad` are views that are copied on write
(`common_memory`): whatever else a program does to them, clipping, scaling, loading, averaging weights, each rank does
to memory of its own, as it would without sharing. At the next step owners publish what was written to parameters.
"""

from __future__ import annotations

import collections
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from mpistrat.communicators import Communicator, reducing
from mpistrat.communicators.node.common_memory import PAGE, ByteRange
from mpistrat.communicators.reduction.arithmetic import can_combine
from mpistrat.cross_device_ops.packing import is_dense
from mpistrat.machine.notices import warn_on_first_rank
from mpistrat.pytorch.modules.registry import Registry, is_inexact
from mpistrat.pytorch.shared_parameters.blocks import Block, ParameterPages, Settling


class SharedParameters:
    """Which parameters of a strategy lie in memory that the ranks of a node share. One replica per rank."""

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator
        # By id, because torch's own dictionaries of weak keys take a microsecond for each of them.
        self._places: dict[int, tuple[weakref.ref[torch.Tensor], ParameterPages]] = {}
        self._has_shared = False
        self._warned_of_devices = False
        self._refused = False

    def place_of(self, parameter: torch.Tensor) -> ParameterPages | None:
        """None where it is not shared."""
        kept = self._places.get(id(parameter))
        return kept[1] if kept is not None and kept[0]() is parameter else None

    def has_moved(self, parameter: torch.Tensor) -> bool:
        """Whether a shared parameter has been given other memory: by `.data = …`, or a module's `.to(dtype)`."""
        place = self.place_of(parameter)
        if place is None:
            return False
        return parameter.data_ptr() != place.block.value_view.address + place.first

    def moved(self, registry: Registry) -> list[tuple[str, torch.Tensor]]:
        """The mirrored parameters that `has_moved` is true of, with their names."""
        pairs = zip(registry.slots, registry.parameters(), strict=True)
        return [(slot.name, p) for slot, p in pairs if p is not None and self.has_moved(p)]

    def check_unmoved(self, parameters: Iterable[torch.Tensor]) -> None:
        """RuntimeError on all ranks if one of them has been given other memory since the last `run` began."""
        moved = next(filter(self.has_moved, parameters), None)
        if moved is not None:
            self.communicator.raise_together(
                RuntimeError(
                    f"a shared parameter of shape {list(moved.shape)} was given other memory inside run, by "
                    "`.data = …` or a module's .to(); do it outside run, where the next run shares it again, or "
                    "write in place: parameter.copy_(…)"
                )
            )

    def share(self, parameters: Sequence[torch.Tensor], registry: Registry) -> None:
        """Move `parameters`, equal on all ranks, to shared memory where they are not there yet.

        Collective. Then all parameters are equal to what the owners of their slices have.
        Args: registry: of all mirrored parameters, these among them.
        """
        mirrored = [p for p in registry.parameters() if p is not None]
        alone = self._alone(registry)
        pending = {id(p): p for p in parameters if self.place_of(p) is None or self.has_moved(p)}
        for key in pending:
            self._places.pop(key, None)
        eligible = [] if self._refused else self._eligible(list(pending.values()), alone)
        if eligible:
            self._make_block(eligible)
        self.settle()
        blocks = self.blocks(mirrored)
        for key in {*map(id, mirrored)} - alone:
            self._places.pop(key, None)
        _leave(blocks, [p for p in mirrored if self.place_of(p) is None])

    def _alone(self, registry: Registry) -> set[int]:
        """Ids of the mirrored parameters that lie in one storage with no other on any rank. Collective."""
        parameters = registry.parameters()
        storages = [0 if p is None else _storage(p) for p in parameters]
        in_storage = collections.Counter(storages)
        flags = np.array([not s or in_storage[s] == 1 for s in storages], np.uint8)
        if flags.size:  # a rank may have freed a parameter that others still have
            self.communicator.all_reduce(flags, reducing("min", "storages of parameters"))
        return {id(p) for p, flag in zip(parameters, flags, strict=True) if flag}

    def _eligible(self, parameters: Sequence[torch.Tensor], alone: set[int]) -> list[torch.Tensor]:
        """The parameters that can be shared. Each rank keeps the others for itself, as without sharing.

        Three kinds cannot be shared: parameters on a GPU; parameters that lie in one storage, where they must stay; and
        single numbers, because the state that an optimizer keeps for a single number looks like one of its counters.
        """
        devices = sorted({parameter.device.type for parameter in parameters} - {"cpu"})
        if devices and not self._warned_of_devices:
            self._warned_of_devices = True
            self.warn(f"those on {devices[0]} are each rank's own")
        return [p for p in parameters if id(p) in alone and _is_plain(p)]

    def _make_block(self, parameters: list[torch.Tensor]) -> None:
        parameters = sorted(parameters, key=lambda p: str(p.dtype))  # a stable order of dtypes
        firsts, nbytes = [], 0
        for parameter in parameters:
            firsts.append(nbytes)
            nbytes += -(-parameter.nbytes // PAGE) * PAGE
        values, why = self.communicator.memory.common_memory(nbytes)
        gradients = None
        if values is not None:
            gradients, why = self.communicator.memory.common_memory(nbytes, summed=True)
        if values is None or gradients is None or gradients.contribution is None:
            self._refused = True
            self.warn(f"each rank keeps a copy of its own: {why}")
            return
        block = Block(values, gradients, gradients.contribution)
        self._has_shared = True
        places = []
        for parameter, first in zip(parameters, firsts, strict=True):
            layout = parameter.dtype, parameter.shape, parameter.stride()
            place = ParameterPages(block, first, parameter.nbytes, *layout)
            start, end = place.own(values)
            place.flat(values.shared)[start:end] = place.in_order(parameter.detach())[start:end]
            places.append(place)
        self.communicator.barrier(label="shared parameters")  # all slices are there
        for parameter, place in zip(parameters, places, strict=True):
            self._keep(parameter, place)
            parameter.data = place.in_shape(place.flat(block.value_view.memory))

    def _keep(self, parameter: torch.Tensor, place: ParameterPages) -> None:
        places, key = self._places, id(parameter)

        def forget(reference: weakref.ref[torch.Tensor]) -> None:
            if key in places and places[key][0] is reference:
                del places[key]

        places[key] = (weakref.ref(parameter, forget), place)

    def warn(self, what: str) -> None:
        text = f"the ranks of a node are to share parameters, but {what}"
        warn_on_first_rank(self.communicator.rank, text, stacklevel=3)

    def blocks(self, parameters: Iterable[torch.Tensor]) -> list[Block]:
        """Those that `parameters` lie in."""
        places = (self.place_of(p) for p in parameters)
        return list(dict.fromkeys(place.block for place in places if place is not None))

    def settle(self) -> None:
        """Make one copy again of what ranks wrote into parameters: what the owners of the slices wrote. Collective."""
        blocks = dict.fromkeys(place.block for _, place in self._places.values())
        if self._has_shared:  # the same on all ranks, which blocks still live is not
            settling = Settling(self.communicator, "publishing shared parameters")
            settling.begin((block.values, block.value_view) for block in blocks)
            settling.end()

    def reduce(
        self,
        slots: Sequence[int],
        parameters: Sequence[Any],
        contributions: Sequence[torch.Tensor | None],
        earlier: dict[int, torch.Tensor],
        scale: float | None,
    ) -> dict[int, torch.Tensor]:
        """By slot, the reduced gradients of the shared parameters among `slots`.

        A gradient of an earlier backward is taken out of `earlier`, and is in the sum.

        Args:
            parameters, contributions: by slot; None of the latter counts as zero.
            earlier: by slot, the gradients of earlier backwards.
            scale: multiplied to the sums, or None.
        """
        by_block: dict[Block, dict[int, ParameterPages]] = {}
        for slot in slots:
            place = self.place_of(parameters[slot])
            if place is not None:
                by_block.setdefault(place.block, {})[slot] = place
        reduced: dict[int, torch.Tensor] = {}
        for block, places in by_block.items():
            self.check_unmoved(parameters[slot] for slot in places)
            before = {slot: earlier.pop(slot) for slot in places if slot in earlier}
            reduced.update(self._reduce_block(block, places, contributions, before, scale))
        return reduced

    def _reduce_block(
        self,
        block: Block,
        places: dict[int, ParameterPages],
        contributions: Sequence[torch.Tensor | None],
        before: dict[int, torch.Tensor],
        scale: float | None,
    ) -> dict[int, torch.Tensor]:
        block.bring(list(places.values()), [contributions[slot] for slot in places])
        grown = _bring_earlier(block, places, before)
        view = block.gradient_view
        parts = _parts([(place, slot in before) for slot, place in places.items()])
        reduction = reducing(label=f"gradients of {len(places)} parameters", scale=scale)
        self.communicator.memory.sum_into(block.gradients, parts, view, reduction)
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


def _bring_earlier(
    block: Block, places: dict[int, ParameterPages], earlier: dict[int, torch.Tensor]
) -> set[int]:
    """Let the block's gradients hold `earlier`, by slot. Returns the slots whose tensors lie there already."""
    view = block.gradient_view
    grown = {slot for slot, tensor in earlier.items() if places[slot].holds(tensor, view)}
    block.make_way(place for slot, place in places.items() if slot not in grown)
    if block.gradient_view is not view:
        grown = set()
    for slot in earlier.keys() - grown:  # these lie elsewhere: the program put them there
        flat = places[slot].flat(block.gradient_view.memory)
        flat.copy_(places[slot].in_order(earlier[slot].detach()))
    return grown


def _leave(blocks: Sequence[Block], parameters: Iterable[torch.Tensor]) -> None:
    """Give those of `parameters`, which are not shared, memory of this rank's own if they lie in one of `blocks`.

    Made of a shared parameter's memory (`Parameter(shared.data)`), they are stepped whole, by each rank; a block's
    pages that were written are filled again from what is shared. What lay in one storage goes on doing so.
    """
    storages: dict[int, torch.UntypedStorage] = {}
    for parameter in parameters:
        address = _storage(parameter)
        if any(block.value_view.holds(address) for block in blocks):
            if address not in storages:
                storages[address] = parameter.untyped_storage().clone()
            layout = parameter.storage_offset(), parameter.shape, parameter.stride()
            empty = torch.empty(0, dtype=parameter.dtype, device="cpu")
            parameter.data = empty.set_(storages[address], *layout)


def _storage(parameter: torch.Tensor) -> int:
    """The address of what `parameter` lies in; 0 for one that lies nowhere on the host, or in a way of its own."""
    is_strided = parameter.device.type == "cpu" and parameter.layout is torch.strided
    if is_strided and type(parameter.data) is torch.Tensor:
        return parameter.untyped_storage().data_ptr()
    return 0


def _is_plain(parameter: torch.Tensor) -> bool:
    return (
        _storage(parameter) != 0
        and not parameter.is_inference()
        and is_inexact(parameter)
        and can_combine(parameter.dtype, "sum")
        and parameter.numel() > 1
        and is_dense(parameter)
    )


def _parts(places: Sequence[tuple[ParameterPages, bool]]) -> list[ByteRange]:
    """As few parts as `places`, in ascending order, allow. The bytes between them are zeros in all memories."""
    parts: list[ByteRange] = []
    for place, added in sorted(places, key=lambda pair: pair[0].first):
        end = place.pages.stop * PAGE
        part = ByteRange(torch.empty(0, dtype=place.dtype, device="cpu"), place.first, end, added)
        if parts and _follows(part, parts[-1]):
            parts[-1] = parts[-1]._replace(end=end)
        else:
            parts.append(part)
    return parts


def _follows(part: ByteRange, before: ByteRange) -> bool:
    alike = part.like.dtype is before.like.dtype and part.added == before.added
    return alike and part.first == before.end
