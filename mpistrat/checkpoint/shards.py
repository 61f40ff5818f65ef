"""Sharded tensors (torch's DTensors) in checkpoints: each rank has a part of each.

A part has a region of the tensor, and its values. Each rank saves its parts, in files of its own; if several ranks have
copies of a part, one of them saves it. `state.json` has a `ShardedArray` in the place of the tensor. Each rank that
restores reads the saved parts that overlap its own: on any number of ranks, in any mesh, or whole where the tensor is a
plain one now.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from mpistrat import arrays
from mpistrat.checkpoint.schema import COUNT, check

Path = tuple[Any, ...]  # the names and numbers that lead to a place in a state
SavedParts = Mapping[str, Mapping[str, Any]]  # of one rank, by object and name


@dataclasses.dataclass(frozen=True)
class ShardedArray:
    """A sharded tensor in a state that is read: the ranks have saved its parts.

    Attributes:
        name: the name of its parts in the ranks' files.
        shape: the whole tensor's.
        dtype: as torch spells it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclasses.dataclass(frozen=True)
class TensorRegion:
    """Where a part lies in its tensor."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> TensorRegion:
        return cls((0,) * len(shape), tuple(shape))

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def end(self) -> tuple[int, ...]:
        return tuple(map(operator.add, self.offset, self.shape))

    def within(self, other: TensorRegion) -> tuple[slice, ...]:
        """Where it is in `other`. `other` contains it."""
        begins = np.subtract(self.offset, other.offset)
        return tuple(map(slice, begins.tolist(), (begins + self.shape).tolist()))

    def overlap(self, other: TensorRegion) -> TensorRegion:
        """The region in both; of size 0 if there is none."""
        begins = np.maximum(self.offset, other.offset)
        ends = np.minimum(self.end, other.end)
        shape = np.maximum(0, ends - begins)
        return TensorRegion(tuple(begins.tolist()), tuple(shape.tolist()))


def sharded_tensors(state: Any) -> Iterator[tuple[str, Any]]:
    """Name and DTensor of each that is in `state`, as `state_tree.Encoder` names them."""
    taken: set[str] = set()
    for path, value in leaves(state):
        if arrays.is_sharded(value):
            name = unused(".".join(map(str, path)), taken)
            taken.add(name)
            yield name, value


def check_whole(states: Mapping[str, Any], call: str) -> None:
    """Raises: ValueError, with the name `call`, for a state with a DTensor: its parts are lost with their ranks."""
    for name, state in states.items():
        for tensor, _ in sharded_tensors(state):
            raise ValueError(
                f"{call}: {tensor} of {name} is sharded over ranks, and a part of it is lost with its rank. Leave "
                f"{call} out, and save checkpoints to go on from"
            )


def leaves(state: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """The values in dictionaries, lists and tuples, each with the way there."""
    if isinstance(state, Mapping):
        for key, value in state.items():
            yield from leaves(value, (*path, key))
    elif isinstance(state, (list, tuple)):
        for i, value in enumerate(state):
            yield from leaves(value, (*path, i))
    else:
        yield path, state


def unused(name: str, taken: Iterable[str]) -> str:
    """`name`, or one like it that is not in `taken`: there may be {"a.b": …} beside {"a": {"b": …}}."""
    while name in taken or name == "__metadata__":
        name += "_"
    return name


def parts_to_save(states: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The parts of the DTensors in `states` that this rank saves, by object and name: their offsets and values."""
    found: dict[str, dict[str, Any]] = {}
    for object_name, state in states.items():
        for name, tensor in sharded_tensors(state):
            region = _region(tensor)
            if region.size and _is_saved_here(tensor):
                part = {"offset": list(region.offset), "values": tensor.detach().to_local()}
                found.setdefault(object_name, {})[name] = part
    return found


def sharded_arrays(state: Any) -> dict[str, ShardedArray]:
    """The sharded arrays in a stored state, by name."""
    return {value.name: value for _, value in leaves(state) if isinstance(value, ShardedArray)}


def check_parts(parts: Any, known: Mapping[str, Mapping[str, ShardedArray]]) -> None:
    """Raises: ValueError unless `parts` are of `known` sharded arrays; parts of other objects may be any."""
    check(parts, {str: {str: {"offset": [COUNT], "values": _check_tensor}}}, "it")
    for name in parts.keys() & known.keys():
        for key, part in parts[name].items():
            offset, values, whole = part["offset"], part["values"], known[name].get(key)
            end = TensorRegion(offset, values.shape).end
            if (
                whole is None
                or not len(offset) == values.ndim == len(whole.shape)
                or np.greater(end, whole.shape).any()
                or arrays.dtype_name(values) != whole.dtype
            ):
                raise ValueError(
                    f"{name}.{key!r:.80}: {arrays.described(values)} at {offset} is no part of {whole}"
                )


def _check_tensor(value: Any) -> None:
    if not arrays.is_torch(value):
        raise TypeError(f"it is a {type(value).__name__}, and no tensor")


def _region(tensor: Any) -> TensorRegion:
    """The part of a DTensor that is here; of size 0 on a rank that has none."""
    if tensor.device_mesh.get_coordinate() is None:  # this rank is not in the mesh
        return TensorRegion((0,) * tensor.ndim, (0,) * tensor.ndim)
    (chunk,) = tensor.__create_chunk_list__()
    return TensorRegion(tuple(chunk.offsets), tuple(chunk.sizes))


def _is_saved_here(tensor: Any) -> bool:
    """Whether this rank is in the mesh, and the first rank there with this part."""
    places = tensor.device_mesh.get_coordinate()
    if places is None:
        return False
    pairs = zip(places, tensor.placements, strict=True)
    return {place for place, placement in pairs if placement.is_replicate()} <= {0}


class Assembly:
    """Assembles this rank's parts of sharded tensors, as the objects have them now, from the parts that were saved.

    Args:
        objects: all that are restored, by name; perhaps others.
        rank, size: this rank, and the number of ranks that restore.
    """

    def __init__(self, objects: Mapping[str, Any], rank: int, size: int) -> None:
        self._objects, self._rank, self._size = objects, rank, size
        self._wanted: dict[tuple[str, str], list[_Wanted]] = {}

    def assembled(
        self, states: Mapping[str, Any], read_parts: Callable[[int], SavedParts], ranks: int
    ) -> dict[str, Any]:
        """The states, of `states`, with sharded tensors, in the checkpoint or now. Their contents may be changed.

        Called by: every rank, for the objects' own `state_dict()` may be collective.
        Args:
            states: by object, in the same order on all ranks.
            read_parts: reads the parts that one rank has saved, of `ranks` ranks.
        Raises: ValueError when no rank has saved a part that is wanted.
        """
        found = {}
        for name, state in states.items():
            was_sharded = bool(sharded_arrays(state))
            layout = _layout(self._objects[name], was_sharded)
            if layout is not _nowhere or was_sharded:
                found[name] = self._replaced(name, state, (), layout)
        self._read(read_parts, ranks)
        return found

    def _replaced(self, name: str, value: Any, path: Path, layout: Layout) -> Any:
        """`value` with tensors as they are here. A tensor that was saved in parts gets its values later."""
        if isinstance(value, dict):
            for key in value:
                value[key] = self._replaced(name, value[key], (*path, key), layout)
            return value
        if isinstance(value, (list, tuple)):
            return type(value)(
                self._replaced(name, each, (*path, i), layout) for i, each in enumerate(value)
            )
        if isinstance(value, ShardedArray):
            return self._want(name, value, layout(path, value.shape, True))
        if arrays.is_torch(value) and (like := layout(path, tuple(value.shape), False)) is not None:
            local = value[_region(like).within(TensorRegion.whole(value.shape))]
            return _spread_like(local.to(like.device, copy=True), like)
        return value

    def _want(self, name: str, stored: ShardedArray, like: Any) -> Any:
        if like is None:
            return self._values_of(name, stored, TensorRegion.whole(stored.shape), "cpu")
        return _spread_like(self._values_of(name, stored, _region(like), like.device), like)

    def _values_of(self, name: str, stored: ShardedArray, region: TensorRegion, device: Any) -> Any:
        """A tensor that is filled later."""
        import torch

        values = torch.empty(region.shape, dtype=getattr(torch, stored.dtype), device=device)
        wanted = _Wanted(region, values, region.size)
        self._wanted.setdefault((name, stored.name), []).append(wanted)
        return values

    def _read(self, read_parts: Callable[[int], SavedParts], ranks: int) -> None:
        """Read ranks' files, the likeliest first, until all is there."""
        away = np.abs(np.arange(ranks) * self._size - self._rank * ranks)
        savers = iter(np.argsort(away, kind="stable").tolist())
        # Until no tensor has values that are not there yet.
        while missing := [
            key for key, wanted in self._wanted.items() if sum(w.missing for w in wanted)
        ]:
            saver = next(savers, None)
            if saver is None:
                name, key = min(missing)
                raise ValueError(f"no rank has saved all of {name}'s {key}")
            self._fill(missing, read_parts(saver))

    def _fill(self, missing: Iterable[tuple[str, str]], parts: SavedParts) -> None:
        for name, key in missing:
            part = parts.get(name, {}).get(key)
            if part is not None:
                region = TensorRegion(tuple(part["offset"]), tuple(part["values"].shape))
                for wanted in self._wanted[name, key]:
                    wanted.take(region, part["values"])


@dataclasses.dataclass
class _Wanted:
    """A part that this rank is to have, and fills from the parts that were saved.

    Attributes: missing: how many of its values are not there yet.
    """

    region: TensorRegion
    values: Any
    missing: int
    taken: set[TensorRegion] = dataclasses.field(default_factory=set)

    def take(self, region: TensorRegion, values: Any) -> None:
        """`values` of `region` are stored."""
        overlap = self.region.overlap(region)
        if region in self.taken or not overlap.size:
            return
        self.taken.add(region)
        self.values[overlap.within(self.region)].copy_(values[overlap.within(region)])
        self.missing -= overlap.size


# The DTensor like which a state's tensor is to be; None: as a plain one. Args: the way to it, its shape, and whether it
# was sharded when it was saved.
Layout = Callable[[Path, Sequence[int], bool], Any]


def _nowhere(path: Path, shape: Sequence[int], was_sharded: bool) -> Any:
    return None


def _layout(value: Any, was_sharded: bool) -> Layout:
    """Where an object has DTensors now; `_nowhere` if it has none.

    Args: was_sharded: whether it had some when it was saved. If not, only torch's own objects are asked.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return _nowhere
    import torch

    if isinstance(value, torch.optim.Optimizer):
        return _layout_of_optimizer(value)
    if not (was_sharded or isinstance(value, torch.nn.Module)):
        return _nowhere
    # A tensor of another shape is for `load_state_dict` to refuse.
    sharded = {
        (path, tuple(tensor.shape)): tensor
        for path, tensor in leaves(value.state_dict())
        if arrays.is_sharded(tensor)
    }

    def layout(path: Path, shape: Sequence[int], was_sharded: bool) -> Any:
        return sharded.get((path, tuple(shape)))

    return layout if sharded else _nowhere


def _layout_of_optimizer(optimizer: Any) -> Layout:
    """The layout of an optimizer. It may have no state yet: a tensor in its parameter's shape is spread like it."""
    in_order = itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)
    parameters = dict(enumerate(in_order))
    if not any(map(arrays.is_sharded, parameters.values())):
        return _nowhere

    def layout(path: Path, shape: Sequence[int], was_sharded: bool) -> Any:
        parameter: Any = parameters.get(path[1]) if len(path) > 2 and path[0] == "state" else None
        if not arrays.is_sharded(parameter):
            return None
        if tuple(parameter.shape) == tuple(shape):
            return parameter.detach()
        return _replicated(parameter, shape) if was_sharded else None

    return layout


def _replicated(parameter: Any, shape: Sequence[int]) -> Any:
    """A DTensor that each rank of the parameter's mesh has whole; its values are any."""
    import torch
    from torch.distributed.tensor import DTensor, Replicate

    mesh = parameter.device_mesh
    local = torch.empty(tuple(shape), device=parameter.device)
    return DTensor.from_local(local, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _spread_like(local: Any, like: Any) -> Any:
    """A DTensor spread as `like`. `local` is this rank's part of it, and shares its memory."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=tuple(math.prod(like.shape[i + 1 :]) for i in range(like.ndim)),  # contiguous
    )
