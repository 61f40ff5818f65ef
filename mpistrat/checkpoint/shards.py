"""Sharded tensors (torch's DTensors) in checkpoints: each rank has a part of each tensor.

A part has a region of the tensor, and its values. Each rank saves its parts in files of its own. If several ranks have
copies of a part, one of them saves it. `state.json` has a `ShardedArray` in place of the tensor. Each rank that
restores reads the saved parts that overlap its own parts. So the number of ranks and the mesh may change, and a tensor
that is not sharded any more is assembled as a whole.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from mpistrat import arrays
from mpistrat.checkpoint.schema import COUNT, check

Path = tuple[Any, ...]  # the keys and indices that lead to a value in a state
SavedParts = Mapping[str, Mapping[str, Any]]  # a rank's parts, by object and name


@dataclasses.dataclass(frozen=True)
class ShardedArray:
    """Stands for a sharded tensor in a state that is read from disk. The tensor's values are in the ranks' files.

    Attributes:
        name: name of its parts in the ranks' files.
        shape: shape of the whole tensor.
        dtype: torch's name of the dtype, such as "float32".
    """

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclasses.dataclass(frozen=True)
class TensorRegion:
    """A box of elements of a tensor, such as a rank's part.

    Attributes: offset: index of the first element, by dimension. shape: number of elements, by dimension.
    """

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
        """The index after the last element, for each dimension."""
        pairs = zip(self.offset, self.shape, strict=False)
        return tuple(begin + length for begin, length in pairs)

    def within(self, other: TensorRegion) -> tuple[slice, ...]:
        """Return the slices of this region in `other`, a region that contains it."""
        begins = np.subtract(self.offset, other.offset)
        ends = np.add(begins, self.shape)
        pairs = zip(begins.tolist(), ends.tolist(), strict=True)
        return tuple(slice(begin, end) for begin, end in pairs)

    def overlap(self, other: TensorRegion) -> TensorRegion:
        """Return the region of the elements in both regions; its size is 0 if they share no element."""
        begins = np.maximum(self.offset, other.offset)
        ends = np.minimum(self.end, other.end)
        shape = np.maximum(0, ends - begins)
        return TensorRegion(tuple(begins.tolist()), tuple(shape.tolist()))


def sharded_tensors(state: Any) -> Iterator[tuple[str, Any]]:
    """Yield (name, DTensor) for each DTensor in `state`. The name is its path in `state`, such as "state.0.exp_avg"."""
    taken: set[str] = set()
    for path, value in leaves(state):
        if arrays.is_sharded(value):
            joined = ".".join(str(key) for key in path)
            name = unused(joined, taken)
            taken.add(name)
            yield name, value


def check_whole(states: Mapping[str, Any]) -> None:
    """Raise ValueError if a state has a DTensor, because its parts are lost with their ranks.

    Called by: `run_elastic`.
    Args: states: states by object name.
    """
    for name, state in states.items():
        for tensor, _ in sharded_tensors(state):
            raise ValueError(
                f"run_elastic: {tensor} of {name} is sharded over ranks, and a part of it is lost with its rank. Leave "
                "run_elastic out, and save checkpoints to restore from"
            )


def leaves(state: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield (path, value) for each value at any depth of `state` that is no dict, list or tuple.

    A path is the tuple of keys and indices that lead to the value.
    """
    if isinstance(state, Mapping):
        for key, value in state.items():
            yield from leaves(value, (*path, key))
    elif isinstance(state, (list, tuple)):
        for i, value in enumerate(state):
            yield from leaves(value, (*path, i))
    else:
        yield path, state


def unused(name: str, taken: Iterable[str]) -> str:
    """Return `name`, with "_" added until it is not in `taken`: {"a.b": …} and {"a": {"b": …}} both give "a.b"."""
    while name in taken or name == "__metadata__":
        name += "_"
    return name


def parts_to_save(states: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the parts of DTensors that this rank saves. Values are not copied.

    Args: states: states by object name.
    Returns: {object: {name: {"offset": list, "values": tensor}}}; objects without such parts are absent.
    """
    found: dict[str, dict[str, Any]] = {}
    for object_name, state in states.items():
        for name, tensor in sharded_tensors(state):
            region = _region(tensor)
            if region.size and _is_saved_here(tensor):
                part = {"offset": list(region.offset), "values": tensor.detach().to_local()}
                found.setdefault(object_name, {})[name] = part
    return found


def sharded_arrays(state: Any) -> dict[str, ShardedArray]:
    """Return the `ShardedArray`s (they stand for sharded tensors) in a stored state, by name; empty without any."""
    found: dict[str, ShardedArray] = {}
    for _, value in leaves(state):
        if isinstance(value, ShardedArray):
            found[value.name] = value
    return found


def check_parts(parts: Any, known: Mapping[str, Mapping[str, ShardedArray]]) -> None:
    """Raise ValueError unless the parts of a rank's file fit the `known` sharded arrays in offset, shape and dtype.

    Args:
        parts: content of the file: {object: {name: {"offset": list, "values": tensor}}}.
        known: sharded arrays by object and name. Parts of objects that are not in `known` are not compared.
    """
    check(parts, {str: {str: {"offset": [COUNT], "values": _check_tensor}}}, "it")
    for name in parts.keys() & known.keys():
        for key, part in parts[name].items():
            offset = part["offset"]
            values = part["values"]
            whole = known[name].get(key)
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
    """Return the region of a DTensor whose values this rank has; a region of size 0 if the rank has no values."""
    if tensor.device_mesh.get_coordinate() is None:  # this rank is not in the mesh
        return TensorRegion((0,) * tensor.ndim, (0,) * tensor.ndim)
    (chunk,) = tensor.__create_chunk_list__()
    return TensorRegion(tuple(chunk.offsets), tuple(chunk.sizes))


def _is_saved_here(tensor: Any) -> bool:
    """Whether this rank saves its part. If several ranks of the mesh have copies of it, the first one saves it."""
    places = tensor.device_mesh.get_coordinate()
    if places is None:
        return False
    pairs = zip(places, tensor.placements, strict=True)
    return {place for place, placement in pairs if placement.is_replicate()} <= {0}


class Assembly:
    """Builds this rank's parts of sharded tensors, in their present layout, from the parts that were saved.

    Args:
        objects: the objects that are restored, by name, and perhaps others.
        rank: this rank.
        size: number of ranks that restore.
    """

    def __init__(self, objects: Mapping[str, Any], rank: int, size: int) -> None:
        self._objects = objects
        self._rank = rank
        self._size = size
        self._wanted: list[_Wanted] = []

    def assembled(
        self, states: Mapping[str, Any], read_parts: Callable[[int], SavedParts], ranks: int
    ) -> dict[str, Any]:
        """Return the states with sharded tensors by object name, with tensors in their present layout.

        States without sharded tensors, in the checkpoint and now, are absent from the result. Dicts in `states` are
        changed in place.

        Called by: every rank, because the objects' own `state_dict()` may be collective.
        Args:
            states: states by object name, in the same order on all ranks.
            read_parts: reads the parts that one rank has saved; its argument is the rank.
            ranks: number of ranks that have saved.
        Raises: ValueError if no rank has saved a part that is needed.
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
        """Return `value`, a saved state or a part of it, with its tensors in the layout that the object has now.

        `_read` fills tensors that were saved in parts. Dicts are changed in place; lists and tuples are made anew.

        Args:
            name: name of the object.
            path: the keys that lead to `value` in the object's state.
            layout: gives the layout of a tensor; see `Layout`.
        """
        if isinstance(value, dict):
            for key, inner in value.items():
                value[key] = self._replaced(name, inner, (*path, key), layout)
            return value
        if isinstance(value, (list, tuple)):
            replaced = [
                self._replaced(name, inner, (*path, i), layout) for i, inner in enumerate(value)
            ]
            return type(value)(replaced)
        if isinstance(value, ShardedArray):
            return self._want(name, value, layout(path, value.shape, True))
        if not arrays.is_torch(value):
            return value
        like = layout(path, tuple(value.shape), False)
        if like is None:
            return value
        whole = TensorRegion.whole(value.shape)
        part = _region(like).within(whole)
        local = value[part].to(like.device, copy=True)
        return _spread_like(local, like)

    def _want(self, name: str, stored: ShardedArray, like: Any) -> Any:
        """Return an uninitialized tensor in the layout of `like`, or, for None, a whole one. `_read` fills it later."""
        import torch

        region = TensorRegion.whole(stored.shape)
        device = "cpu"
        if like is not None:
            region = _region(like)
            device = like.device
        dtype = getattr(torch, stored.dtype)
        values = torch.empty(region.shape, dtype=dtype, device=device)
        wanted = _Wanted((name, stored.name), region, values, region.size)
        self._wanted.append(wanted)
        return values if like is None else _spread_like(values, like)

    def _read(self, read_parts: Callable[[int], SavedParts], ranks: int) -> None:
        """Read one saver's parts after another until all tensors have their values.

        The saver at this rank's relative place comes first, because it is likely to have the parts: of 4 savers and 2
        ranks, rank 1 begins with saver 2. That saver's neighbours come next.

        Raises: ValueError if values are missing after all files.
        """
        places = np.arange(ranks) * self._size
        away = np.abs(places - self._rank * ranks)
        nearest = np.argsort(away, kind="stable")
        savers = iter(nearest.tolist())
        while incomplete := [wanted for wanted in self._wanted if wanted.missing]:
            saver = next(savers, None)
            if saver is None:
                of_object, name = min(wanted.key for wanted in incomplete)
                raise ValueError(f"no rank has saved all of {of_object}'s {name}")
            parts = read_parts(saver)
            for wanted in incomplete:
                of_object, name = wanted.key
                part = parts.get(of_object, {}).get(name)
                if part is not None:
                    values = part["values"]
                    region = TensorRegion(tuple(part["offset"]), tuple(values.shape))
                    wanted.take(region, values)


@dataclasses.dataclass
class _Wanted:
    """A part that this rank needs. `take` fills it from saved parts.

    Attributes:
        key: names of the object with the tensor, and of the tensor's parts in the ranks' files.
        region: the part's region of the whole tensor.
        values: tensor of the region's shape. It may be read when `missing` is 0.
        missing: number of elements of `values` without a value.
        taken: regions that were copied.
    """

    key: tuple[str, str]
    region: TensorRegion
    values: Any
    missing: int
    taken: set[TensorRegion] = dataclasses.field(default_factory=set)

    def take(self, region: TensorRegion, values: Any) -> None:
        """Copy from a saved part, `values` of `region`, the elements that lie in this part's region.

        Nothing is copied if the regions share no element, or if a saved part of the same region was copied before.
        """
        overlap = self.region.overlap(region)
        if region in self.taken or not overlap.size:
            return
        self.taken.add(region)
        target = self.values[overlap.within(self.region)]
        source = values[overlap.within(region)]
        target.copy_(source)
        self.missing -= overlap.size


# Returns the DTensor whose layout a state's tensor gets; None for a plain tensor. Args: the tensor's path in the state,
# its shape, and whether it was sharded when it was saved.
Layout = Callable[[Path, Sequence[int], bool], Any]


def _nowhere(path: Path, shape: Sequence[int], was_sharded: bool) -> Any:
    return None


def _layout(value: Any, was_sharded: bool) -> Layout:
    """Return the `Layout` of an object: a function that gives the present DTensor for a tensor of its saved state.

    Returns: `_nowhere` if the object has no DTensors now.

    Args:
        value: the object.
        was_sharded: whether the saved state has sharded tensors. If not, only modules and optimizers are looked at.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return _nowhere
    import torch

    if isinstance(value, torch.optim.Optimizer):
        return _layout_of_optimizer(value)
    if not (was_sharded or isinstance(value, torch.nn.Module)):
        return _nowhere
    # A tensor of another shape gets no layout: `load_state_dict` of the object refuses it.
    sharded = {
        (path, tuple(tensor.shape)): tensor
        for path, tensor in leaves(value.state_dict())
        if arrays.is_sharded(tensor)
    }

    def layout(path: Path, shape: Sequence[int], was_sharded: bool) -> Any:
        return sharded.get((path, tuple(shape)))

    return layout if sharded else _nowhere


def _layout_of_optimizer(optimizer: Any) -> Layout:
    """Return the `Layout` of an optimizer, from its parameters, because its state may be empty yet.

    A state tensor of a sharded parameter's shape is sharded like the parameter. A sharded state tensor of another shape
    becomes a DTensor with a whole copy on each rank. Other tensors stay plain.
    """
    parameters: dict[Path, Any] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameters["state", len(parameters)] = parameter
    if not any(arrays.is_sharded(parameter) for parameter in parameters.values()):
        return _nowhere

    def layout(path: Path, shape: Sequence[int], was_sharded: bool) -> Any:
        parameter: Any = parameters.get(path[:2])
        if not arrays.is_sharded(parameter):
            return None
        if tuple(parameter.shape) == tuple(shape):
            return parameter.detach()
        return _replicated(parameter, shape) if was_sharded else None

    return layout


def _replicated(parameter: Any, shape: Sequence[int]) -> Any:
    """Return a DTensor of this shape, with undefined values and a whole copy on each rank of the parameter's mesh."""
    import torch
    from torch.distributed.tensor import DTensor, Replicate

    mesh = parameter.device_mesh
    local = torch.empty(tuple(shape), device=parameter.device)
    return DTensor.from_local(local, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _spread_like(local: Any, like: Any) -> Any:
    """Return a DTensor with the mesh, placements and shape of `like`, in the memory of `local`, this rank's part."""
    from torch.distributed.tensor import DTensor

    contiguous = tuple(math.prod(like.shape[i + 1 :]) for i in range(like.ndim))
    return DTensor.from_local(
        local,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=contiguous,
    )
