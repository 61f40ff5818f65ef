"""Finds the copies of a mirrored value that differ, and describes them in words."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mpistrat import arrays
from mpistrat.arrays import Array
from mpistrat.errors import DivergenceError
from mpistrat.fault_tolerance.digests import bits, describe, digest
from mpistrat.fault_tolerance.mirrored_state import Key, MirroredThing, mirrored_state
from mpistrat.strategy import Strategy

_MOST_TOLD = 8  # copies or names in a message
_MOST_CHARACTERS = 80  # of a value in a message

_WHAT_TO_DO = """\
Restore an earlier checkpoint, or, if rank 0's values are right, call strategy.mirror(module) on every rank. If only one
node's ranks ever differ, its memory or processor may be at fault. Look for a load or a write that one rank alone makes:
under `if rank == 0:`, to a tensor's .data, or to an optimizer's state."""


class Digested(NamedTuple):
    """Digests of one mirrored value on this rank, taken when it was compared.

    Attributes:
        name: name of the value.
        descriptions: dtype and shape of each of this rank's copies, as a text; the `repr` of a copy that is no array.
        digests: digest of each copy, 8 bytes.
    """

    name: str
    descriptions: tuple[str, ...]
    digests: tuple[bytes, ...]

    @classmethod
    def of(cls, thing: MirroredThing) -> Digested:
        descriptions = (
            describe(copy) if arrays.is_array(copy) else repr(copy) for copy in thing.copies
        )
        return cls(thing.name, tuple(descriptions), tuple(map(digest, thing.copies)))


def find_divergence(
    strategy: Strategy, digested: dict[Key, Digested], when: str
) -> DivergenceError | None:
    """Return the error for the first mirrored value, in the order of keys, whose copies differ between replicas.

    Called by: every rank, when the ranks' digests of the whole state differ.
    Args:
        digested: this rank's digests, by key.
        when: when the values were compared, for the message.
    Returns: the error, equal on all ranks, for the caller to raise; None if all values that every rank has are equal,
        and the ranks only differ in values that some ranks have dropped.
    """
    communicator = strategy.extended.communicator
    by_rank = communicator.all_gather_object(digested, label="digests of what is mirrored")
    common = set.intersection(*map(set, by_rank))
    differing = {
        key: copies
        for key in sorted(common)
        if not (copies := Copies([things[key] for things in by_rank])).are_equal
    }
    if not differing:
        return None
    key, copies = next(iter(differing.items()))
    names = [digested[differing_key].name for differing_key in differing]
    lines = copies.descriptions() or _differences(strategy, key, copies)
    if len(lines) > _MOST_TOLD:
        lines[_MOST_TOLD:] = [f"and {len(lines) - _MOST_TOLD} more"]
    nodes = communicator.all_gather_object(os.uname().nodename, label="names of the nodes")
    text = "\n  ".join([f"{names[0]} is not the same any more on all ranks ({when}):", *lines])
    return DivergenceError(
        f"{text}\n{copies.verdict(nodes)}\n{len(differing)} of {len(common)} tensors and numbers differ: "
        f"{_some(names)}.\n{_WHAT_TO_DO}",
        names[0],
        copies.suspects,
    )


def _some(names: list[str]) -> str:
    return ", ".join(names[:_MOST_TOLD] + ["…"] * (len(names) > _MOST_TOLD))


class Copies:
    """All ranks' copies of one mirrored value, grouped by their digests. Copies with the same bits are in one group.

    Attributes:
        are_equal: whether all copies are in one group.
        reference: (rank, index of the copy on that rank) of the first copy in the largest group.
        suspects: ranks with a copy outside of the largest group; empty if another group is as large.
    """

    def __init__(self, by_rank: list[Digested]) -> None:
        self._by_rank = by_rank
        groups: dict[bytes, list[tuple[int, int]]] = {}
        for rank, thing in enumerate(by_rank):
            for copy, found in enumerate(thing.digests):
                groups.setdefault(found, []).append((rank, copy))
        largest, *smaller = sorted(groups.values(), key=len, reverse=True)
        self.reference = largest[0]
        self.are_equal = not smaller
        suspects = {rank for group in smaller for rank, _ in group}
        has_majority = len(largest) > max(map(len, smaller), default=0)
        self.suspects = tuple(sorted(suspects)) if has_majority else ()

    def verdict(self, nodes: Sequence[str]) -> str:
        """Return a sentence that names the ranks outside the majority, or says that no value has the majority.

        Args: nodes: the node name of each rank, by rank.
        """
        if not self.suspects:
            return "Which copy is wrong cannot be known: no value has the majority."
        suspects = [f"rank {rank} (node {nodes[rank]})" for rank in self.suspects]
        return f"Most copies are equal, so what is wrong is probably {_some(suspects)}."

    def name_of(self, rank: int, copy: int) -> str:
        if len(self._by_rank[rank].digests) == 1:
            return f"rank {rank}"
        replica = sum(len(thing.digests) for thing in self._by_rank[:rank]) + copy
        return f"replica {replica} (rank {rank})"

    def descriptions(self) -> list[str]:
        """Return a line for each copy, if the copies are different numbers, or arrays of different shapes or dtypes.

        Returns: an empty list if all descriptions are equal. Then `_differences` compares the elements.
        """
        different = set().union(*(thing.descriptions for thing in self._by_rank))
        if len(different) == 1:
            return []
        shared = os.path.commonprefix(list(different))  # noqa: RUF071 - a prefix by characters is meant
        begin = max(0, len(shared) - _MOST_CHARACTERS // 2)
        return [
            f"{self.name_of(rank, copy)}: {'…' * (begin > 0)}{described[begin:][:_MOST_CHARACTERS]}"
            for rank, thing in enumerate(self._by_rank)
            for copy, described in enumerate(thing.descriptions)
        ]


def _differences(strategy: Strategy, key: Key, copies: Copies) -> list[str]:
    """Return a line for each copy of any rank that differs from `copies.reference`: how many elements, and where most.

    The reference copy is broadcast to all ranks. Called by: every rank.
    """
    communicator = strategy.extended.communicator
    things = mirrored_state(strategy)[key].copies
    flats = [arrays.to_host(bits(thing)) for thing in things]
    root, copy = copies.reference
    reference = flats[copy].copy() if communicator.rank == root else np.empty_like(flats[0])
    communicator.broadcast(reference.view(np.uint8), root, label="one copy of what differs")
    found = [difference(flat, reference, like) for flat, like in zip(flats, things, strict=True)]
    by_rank = communicator.all_gather_object(found, label="differences from it")
    kind = copies._by_rank[root].descriptions[copy]
    return [
        f"{copies.name_of(rank, i)}: {each} on {copies.name_of(root, copy)} ({kind})"
        for rank, differences in enumerate(by_rank)
        for i, each in enumerate(differences)
        if each is not None
    ]


class Difference(NamedTuple):
    """How an array differs from a reference array. `str()` gives a text for messages."""

    differing: int  # elements whose bits differ
    elements: int
    place: tuple[int, ...]  # index of the largest difference; a NaN differs more than any number
    value: float
    reference: float

    def __str__(self) -> str:
        at = f" at {list(self.place)}" if self.place else ""
        return (
            f"{self.differing} of {self.elements} elements, most{at}: {self.value:.9g} instead of "
            f"{self.reference:.9g}"
        )


def difference(found: np.ndarray, reference: np.ndarray, like: Array) -> Difference | None:
    """Return how many elements of `found` differ from `reference`, and the element with the largest difference.

    Args:
        found, reference: bits of arrays as `digests.bits` returns them, 1-D integers on the host.
        like: an array with the shape and dtype of both. A complex number counts as two elements.
    Returns: a `Difference`; None if all bits are equal.
    """
    different = np.flatnonzero(found != reference)
    if not len(different):
        return None
    values, references = (_values(flat, like)[different] for flat in (found, reference))
    with np.errstate(all="ignore"):
        sizes = np.abs(values - references)
    most = int(np.argmax(np.where(np.isnan(sizes), np.inf, sizes)))
    is_complex = arrays.dtype_name(like).startswith("complex")
    shape = (*like.shape, 2) if is_complex else tuple(like.shape)
    index = tuple(map(int, np.unravel_index(int(different[most]), shape)))
    return Difference(
        len(different), found.size, index, float(values[most]), float(references[most])
    )


def _values(flat: np.ndarray, like: Array) -> np.ndarray:
    if arrays.is_torch(like):
        import torch

        return torch.from_numpy(flat).view(like.real.dtype).double().numpy()
    return flat.view(str(like.real.dtype)).astype(np.float64)
