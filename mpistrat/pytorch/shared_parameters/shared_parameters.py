"""`shared_parameters=True`: the ranks of a node keep one copy of the parameters, and one of their gradients.

Each rank owns a slice of both. It sums up the gradients in this slice, and its optimizer steps update this slice of the
parameters (`slice_steps`), so nothing is copied back.

Parameters and `.grad` are copy-on-write views of the shared memory (`common_memory`). When a program clips, scales,
loads or averages them, each rank does so in its own memory, as without sharing. At the next step each rank publishes
its writes to its slice of the parameters. Its writes to other slices are lost.
"""

from __future__ import annotations

import collections
import weakref
from collections.abc import Container, Iterable, Sequence
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
    """The parameters of a strategy that lie in memory that a node's ranks share. Each rank has one replica.

    Args: communicator: the strategy's ranks.
    """

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator
        # Keys are `id`s of parameters, because torch's dictionaries with weak keys take a microsecond per look-up.
        self._places: dict[int, tuple[weakref.ref[torch.Tensor], ParameterPages]] = {}
        self._has_shared = False
        self._warned_of_devices = False
        self._refused = False

    def place_of(self, parameter: torch.Tensor) -> ParameterPages | None:
        """Return where `parameter` lies in the shared memory; None if it is not shared."""
        kept = self._places.get(id(parameter))
        if kept is None:
            return None
        reference, place = kept
        return place if reference() is parameter else None

    def has_moved(self, parameter: torch.Tensor) -> bool:
        """Whether the program has given a shared parameter other memory, by `.data = …` or a module's `.to(dtype)`.

        False also for a parameter that is not shared.
        """
        place = self.place_of(parameter)
        if place is None:
            return False
        return parameter.data_ptr() != place.block.value_view.address + place.first

    def moved(self, registry: Registry) -> list[tuple[str, torch.Tensor]]:
        """Return pairs (name, parameter) of the shared parameters in `registry` that have got other memory."""
        pairs = zip(registry.slots, registry.parameters(), strict=True)
        return [(slot.name, p) for slot, p in pairs if p is not None and self.has_moved(p)]

    def check_unmoved(self, parameters: Iterable[torch.Tensor]) -> None:
        """Check that no shared parameter has got other memory since the last `run` began.

        Called by: each reduction of gradients, and each optimizer step.
        Raises: RuntimeError if one has. The other ranks raise CollectiveMismatchError in their next collective.
        """
        for parameter in parameters:
            if self.has_moved(parameter):
                self.communicator.raise_together(
                    RuntimeError(
                        f"a shared parameter of shape {list(parameter.shape)} was given other memory inside run, by "
                        "`.data = …` or a module's .to(). Do this outside run: the next run shares the parameter "
                        "again. Or write in place: parameter.copy_(…)"
                    )
                )

    def share(self, parameters: Sequence[torch.Tensor], registry: Registry) -> None:
        """Move `parameters` to shared memory, unless they are there already. Collective.

        Parameters on a GPU, in a common storage, of one element or of integers are not moved. If there is no shared
        memory, none is moved from now on, and rank 0 warns. Afterwards all shared parameters are equal on all ranks.
        Called by: every rank, after `parameters` were mirrored.
        Args:
            parameters: have equal values on all ranks.
            registry: all mirrored parameters, with `parameters` among them.
        """
        mirrored = [p for p in registry.parameters() if p is not None]
        alone = self._alone(registry)
        pending = {}
        for parameter in parameters:
            if self.place_of(parameter) is None or self.has_moved(parameter):
                pending[id(parameter)] = parameter
        for key in pending:
            self._places.pop(key, None)
        eligible = [] if self._refused else self._eligible(list(pending.values()), alone)
        if eligible:
            self._make_block(eligible)
        self.settle()
        blocks = self.blocks(mirrored)
        for key in {id(parameter) for parameter in mirrored} - alone:
            self._places.pop(key, None)
        _leave(blocks, [p for p in mirrored if self.place_of(p) is None])

    def _alone(self, registry: Registry) -> set[int]:
        """Return the `id`s of the parameters that share no storage with another one on any rank. Collective."""
        parameters = registry.parameters()
        storages = [0 if p is None else _storage(p) for p in parameters]
        in_storage = collections.Counter(storages)
        are_alone = [not storage or in_storage[storage] == 1 for storage in storages]
        flags = np.array(are_alone, np.uint8)
        if flags.size:  # a rank may have freed a parameter that other ranks still have
            self.communicator.all_reduce(flags, reducing("min", "storages of parameters"))
        return {id(p) for p, flag in zip(parameters, flags, strict=True) if flag}

    def _eligible(self, parameters: Sequence[torch.Tensor], alone: set[int]) -> list[torch.Tensor]:
        """Return the parameters that can be shared. Of all others each rank keeps its own copy.

        Not shared are parameters on a GPU (rank 0 warns once); of integers; sparse; in one storage with others,
        since they must stay together; and of one element, because the state of one element looks like a step counter.
        Args: alone: `id`s of the parameters that share no storage with another.
        """
        devices = sorted({parameter.device.type for parameter in parameters} - {"cpu"})
        if devices and not self._warned_of_devices:
            self._warned_of_devices = True
            self.warn(f"those on {devices[0]} are each rank's own")
        return [p for p in parameters if id(p) in alone and _is_plain(p)]

    def _make_block(self, parameters: list[torch.Tensor]) -> None:
        """Move `parameters` to a new block of shared memory. Each rank copies its slice of them. Collective.

        If there is no shared memory, rank 0 warns, nothing is moved, and this strategy does not try again.
        """
        # Sort by dtype, in the same order on all ranks.
        parameters = sorted(parameters, key=lambda p: str(p.dtype))
        firsts = []
        nbytes = 0
        for parameter in parameters:
            firsts.append(nbytes)
            nbytes += -(-parameter.nbytes // PAGE) * PAGE
        values, why = self.communicator.memory.common_memory(nbytes)
        gradients: Any = None
        if values is not None:
            gradients, why = self.communicator.memory.common_memory(nbytes, summed=True)
        if values is None or gradients is None:
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
            flat = place.in_order(parameter.detach())
            shared = place.flat(values.shared)
            shared[start:end] = flat[start:end]
            places.append(place)
        self.communicator.barrier(label="shared parameters")  # wait for all slices
        for parameter, place in zip(parameters, places, strict=True):
            self._keep(parameter, place)
            parameter.data = place.in_shape(place.flat(block.value_view.memory))

    def _keep(self, parameter: torch.Tensor, place: ParameterPages) -> None:
        places = self._places
        key = id(parameter)

        def forget(reference: weakref.ref[torch.Tensor]) -> None:
            if key in places and places[key][0] is reference:
                del places[key]

        places[key] = (weakref.ref(parameter, forget), place)

    def warn(self, what: str) -> None:
        text = f"the ranks of a node are to share parameters, but {what}"
        warn_on_first_rank(self.communicator.rank, text, stacklevel=3)

    def blocks(self, parameters: Iterable[torch.Tensor]) -> list[Block]:
        """Return the blocks (memory of parameters that were mirrored together) with any of `parameters`, each once."""
        places = (self.place_of(p) for p in parameters)
        return list(dict.fromkeys(place.block for place in places if place is not None))

    def settle(self) -> None:
        """Make all shared parameters equal on all ranks: each slice gets the values of its owner. Collective.

        Makes no collective if nothing was ever shared.
        """
        if self._has_shared:  # this is equal on all ranks; the blocks may differ
            places = [place for _, place in self._places.values()]
            blocks = dict.fromkeys(place.block for place in places)
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
        """Sum up the gradients of the shared parameters over all ranks. Collective.

        Args:
            slots: numbers of the parameters that any rank has used; equal on all ranks.
            parameters: the parameters by slot.
            contributions: this rank's gradients by slot; None counts as zeros.
            earlier: gradients of earlier backwards, already reduced, by slot. Entries of shared parameters in `slots`
                are added to the sums and removed from the dict.
            scale: number that multiplies the sums; None for plain sums.
        Returns: the sums by slot, as tensors in shared memory; parameters that are not shared are absent.
        Raises: RuntimeError if a parameter was given other memory inside `run`.
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
        """Sum up the gradients of parameters in one block over all ranks. Collective.

        Args:
            places: the place of each parameter, by slot.
            contributions: this rank's gradients by slot; None counts as zeros.
            before: the gradients of earlier backwards by slot. They are added to the sums.
            scale: number that multiplies the new gradients' sums; None for plain sums.
        Returns: the sums by slot. A tensor of `before` that lies in the block is itself the sum.
        """
        of_places = [contributions[slot] for slot in places]
        block.bring(list(places.values()), of_places)
        grown = _bring_earlier(block, places, before)
        view = block.gradient_view
        parts = _parts(places, before)
        reduction = reducing(label=f"gradients of {len(places)} parameters", scale=scale)
        self.communicator.memory.sum_into(block.gradients, parts, view, reduction)
        written = view.written()
        if written.any():
            used = np.zeros_like(written)
            for place in places.values():
                used[place.pages] = True
            written &= used
        view.renew(written)
        sums = {}
        for slot, place in places.items():
            sums[slot] = before[slot] if slot in grown else block.lend(place)
        return sums


def _bring_earlier(
    block: Block, places: dict[int, ParameterPages], earlier: dict[int, torch.Tensor]
) -> set[int]:
    """Have the gradients `earlier` in the block's view of gradients, so that the sums are added to them there.

    Gradients that the program has put elsewhere are copied.
    Returns: the slots of gradients that were in the view already, and so grow in place.
    """
    view = block.gradient_view
    grown = {slot for slot, tensor in earlier.items() if places[slot].holds(tensor, view)}
    overwritten = [place for slot, place in places.items() if slot not in grown]
    block.make_way(overwritten)
    if block.gradient_view is not view:
        grown = set()
    for slot in earlier.keys() - grown:  # the program has put these gradients elsewhere
        flat = places[slot].flat(block.gradient_view.memory)
        flat.copy_(places[slot].in_order(earlier[slot].detach()))
    return grown


def _leave(blocks: Sequence[Block], parameters: Iterable[torch.Tensor]) -> None:
    """Move parameters that are not shared, but lie in a block's memory, to private memory of this rank.

    `Parameter(shared.data)` makes such a parameter. Each rank steps it whole, and `Settling` would overwrite the steps
    in the block's memory. Parameters that have a common storage get a common storage again.
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
    """Return the address of the parameter's storage; 0 if it is not on the host, not strided, or a tensor subclass."""
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


def _parts(places: dict[int, ParameterPages], earlier: Container[int]) -> list[ByteRange]:
    """Return the byte ranges of a block's memory that are to be summed up, in ascending order, as few as possible.

    The ranges of adjacent parameters are joined if their dtype and `added` are equal. A range ends with the parameter's
    last page; the bytes behind the parameter are zeros on all ranks.
    Args:
        places: the place of each parameter, by slot.
        earlier: slots of the parameters with an earlier gradient. The sum is added to it.
    """
    parts: list[ByteRange] = []
    # The dtype, `added` and first byte of a place that the last range can take in.
    continued: Any = None
    for slot in sorted(places, key=lambda slot: places[slot].first):
        place = places[slot]
        added = slot in earlier
        end = place.pages.stop * PAGE
        if (place.dtype, added, place.first) == continued:
            parts[-1] = parts[-1]._replace(end=end)
        else:
            like = torch.empty(0, dtype=place.dtype, device="cpu")
            parts.append(ByteRange(like, place.first, end, added))
        continued = place.dtype, added, end
    return parts
