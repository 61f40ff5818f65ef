"""`shared_parameters=True`: the ranks of a node keep one copy of the parameters, and one of their gradients.

Each rank owns a slice of both. It sums this slice of all gradients, and its optimizer steps update this slice of the
parameters (`slice_steps`), so nothing is copied back.

Parameters and `.grad` are views that are copied on write (`common_memory`). When a program clips, scales, loads or
averages them, each rank does so in its own memory, as without sharing. At the next step the owners publish the written
parameters.
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
    """The parameters of a strategy in memory that a node's ranks share. Each rank has one replica."""

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator
        # Keys are ids of parameters: torch's own dictionaries with weak keys take a microsecond for each of them.
        self._places: dict[int, tuple[weakref.ref[torch.Tensor], ParameterPages]] = {}
        self._has_shared = False
        self._warned_of_devices = False
        self._refused = False

    def place_of(self, parameter: torch.Tensor) -> ParameterPages | None:
        """Return the place of `parameter`; None if it is not shared."""
        kept = self._places.get(id(parameter))
        return kept[1] if kept is not None and kept[0]() is parameter else None

    def has_moved(self, parameter: torch.Tensor) -> bool:
        """Whether a shared parameter has got other memory, by `.data = …` or a module's `.to(dtype)`."""
        place = self.place_of(parameter)
        if place is None:
            return False
        return parameter.data_ptr() != place.block.value_view.address + place.first

    def moved(self, registry: Registry) -> list[tuple[str, torch.Tensor]]:
        """Return the names and parameters that have got other memory (`has_moved`)."""
        pairs = zip(registry.slots, registry.parameters(), strict=True)
        return [(slot.name, p) for slot, p in pairs if p is not None and self.has_moved(p)]

    def check_unmoved(self, parameters: Iterable[torch.Tensor]) -> None:
        """Check that no parameter has got other memory since the last `run` began.

        Raises: RuntimeError if one has. The other ranks hear of it.
        """
        moved = next(filter(self.has_moved, parameters), None)
        if moved is not None:
            self.communicator.raise_together(
                RuntimeError(
                    f"a shared parameter of shape {list(moved.shape)} was given other memory inside run, by "
                    "`.data = …` or a module's .to(). Do this outside run: the next run shares the parameter again. Or "
                    "write in place: parameter.copy_(…)"
                )
            )

    def share(self, parameters: Sequence[torch.Tensor], registry: Registry) -> None:
        """Move `parameters`, equal on all ranks, to shared memory, unless they are there. Collective.

        Afterwards each parameter has the values of its slices' owners.
        Args: registry: all mirrored parameters, with `parameters` among them.
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
        """Return the ids of the mirrored parameters that share a storage with no other on any rank. Collective."""
        parameters = registry.parameters()
        storages = [0 if p is None else _storage(p) for p in parameters]
        in_storage = collections.Counter(storages)
        flags = np.array([not s or in_storage[s] == 1 for s in storages], np.uint8)
        if flags.size:  # a rank may have freed a parameter that other ranks still have
            self.communicator.all_reduce(flags, reducing("min", "storages of parameters"))
        return {id(p) for p, flag in zip(parameters, flags, strict=True) if flag}

    def _eligible(self, parameters: Sequence[torch.Tensor], alone: set[int]) -> list[torch.Tensor]:
        """Return the parameters that can be shared. All others stay each rank's own.

        Three kinds cannot be shared: parameters on a GPU; parameters in one storage, since they must stay together; and
        single numbers, because an optimizer's state of a single number looks like one of its counters.
        """
        devices = sorted({parameter.device.type for parameter in parameters} - {"cpu"})
        if devices and not self._warned_of_devices:
            self._warned_of_devices = True
            self.warn(f"those on {devices[0]} are each rank's own")
        return [p for p in parameters if id(p) in alone and _is_plain(p)]

    def _make_block(self, parameters: list[torch.Tensor]) -> None:
        """Move `parameters` to a new block; each rank copies its slice. Warns if there is no memory. Collective."""
        # Sort by dtype, in the same order on all ranks.
        parameters = sorted(parameters, key=lambda p: str(p.dtype))
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
        self.communicator.barrier(label="shared parameters")  # wait for all slices
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
        """Return the blocks that contain any of `parameters`, each once."""
        places = (self.place_of(p) for p in parameters)
        return list(dict.fromkeys(place.block for place in places if place is not None))

    def settle(self) -> None:
        """Make the ranks' parameters equal again: each slice gets the values of its owner. Collective."""
        blocks = dict.fromkeys(place.block for _, place in self._places.values())
        if self._has_shared:  # `_has_shared` is equal on all ranks; `blocks` may differ
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
        """Sum up the gradients of the shared parameters among `slots`. Collective.

        Args:
            parameters: the parameters by slot.
            contributions: this rank's gradients by slot; None counts as zeros.
            earlier: gradients of earlier backwards by slot. The used ones are added to the sums and removed here.
            scale: factor of the sums, or None.
        Returns: the sums by slot, without parameters that are not shared.
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
        """Sum up the gradients of the parameters at `places` in `block`. Collective.

        Args: before: the gradients of earlier backwards; they are added to the sums.
        Returns: the sums by slot.
        """
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
    """Copy the gradients `earlier` into the block's gradients.

    Returns: the slots of the gradients that lay there already.
    """
    view = block.gradient_view
    grown = {slot for slot, tensor in earlier.items() if places[slot].holds(tensor, view)}
    block.make_way(place for slot, place in places.items() if slot not in grown)
    if block.gradient_view is not view:
        grown = set()
    for slot in earlier.keys() - grown:  # the program has put these gradients elsewhere
        flat = places[slot].flat(block.gradient_view.memory)
        flat.copy_(places[slot].in_order(earlier[slot].detach()))
    return grown


def _leave(blocks: Sequence[Block], parameters: Iterable[torch.Tensor]) -> None:
    """Give unshared parameters in a block's memory, such as `Parameter(shared.data)`, memory of this rank's own.

    Each rank steps them whole, and a block's written pages get the shared values again. Parameters in one storage stay
    in one storage.
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
    """Return the address of the parameter's storage; 0 if it is not on the host, strided, and a plain tensor."""
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
    """Join places to few parts of a memory, in ascending order. The bytes between them are zeros in all memories.

    Args: places: pairs of a place and whether an earlier gradient is added there.
    """
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
