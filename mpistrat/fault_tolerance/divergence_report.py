"""Which copy of what is mirrored differs from which, in words."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mpistrat import arrays
from mpistrat.errors import DivergenceError
from mpistrat.fault_tolerance.difference import Difference, difference
from mpistrat.fault_tolerance.digests import bits, describe, digest
from mpistrat.fault_tolerance.mirrored_state import Key, MirroredThing, mirrored_state

if TYPE_CHECKING:
    from mpistrat.strategy import Strategy

_MOST_TOLD = 8  # copies, or names
_MOST_CHARACTERS = 80  # of a value

_WHAT_TO_DO = """\
Go on from a checkpoint of before, or, if rank 0's values will do, call strategy.mirror(module) on every rank. To find
the cause: does one rank alone load or write it (`if rank == 0:`, a tensor's .data, an optimizer's state)? If it comes
back on one node without that, suspect the node's memory or processor."""


class Digested(NamedTuple):
    """One mirrored thing, as it was when it was compared: for each of this rank's copies, what it is and its digest."""

    name: str
    descriptions: tuple[str, ...]  # dtype and shape; the value of what is no array
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
    """The first thing whose copies differ; None if ranks only have dropped different things. Collective."""
    communicator = strategy.extended.communicator
    everyone = communicator.all_gather_object(digested, label="digests of what is mirrored")
    common = sorted(set.intersection(*(set(theirs) for theirs in everyone)))
    differing = [
        key for key in common if len({d for theirs in everyone for d in theirs[key].digests}) > 1
    ]
    if not differing:
        return None
    key = differing[0]
    names = [digested[differing_key].name for differing_key in differing]
    copies = Copies([theirs[key] for theirs in everyone])
    lines = copies.descriptions() or _differences(strategy, key, copies)
    if len(lines) > _MOST_TOLD:
        lines[_MOST_TOLD:] = [f"and {len(lines) - _MOST_TOLD} more"]
    nodes = communicator.all_gather_object(os.uname().nodename, label="names of the nodes")
    suspects = [f"rank {rank} (node {nodes[rank]})" for rank in copies.suspects]
    verdict = "Which copy is wrong cannot be known: no value has the majority."
    if suspects:
        verdict = f"Most copies are equal, so what is wrong is probably {_some(suspects)}."
    return DivergenceError(
        f"{names[0]} is not the same any more on all ranks ({when}):\n"
        + "".join(f"  {line}\n" for line in lines)
        + f"{verdict}\n{len(differing)} of {len(common)} tensors and numbers differ: {_some(names)}.\n{_WHAT_TO_DO}",
        names[0],
        copies.suspects,
    )


def _some(names: list[str]) -> str:
    return ", ".join(names[:_MOST_TOLD] + ["…"] * (len(names) > _MOST_TOLD))


class Copies:
    """All ranks' copies of one thing, grouped by their digests.

    Attributes:
        reference: (rank, copy) of the first copy in the largest group.
        suspects: ranks with a copy outside of that group; empty where another group is as large.
    """

    def __init__(self, by_rank: list[Digested]) -> None:
        self._by_rank = by_rank
        groups: dict[bytes, list[tuple[int, int]]] = {}
        for rank, thing in enumerate(by_rank):
            for copy, found in enumerate(thing.digests):
                groups.setdefault(found, []).append((rank, copy))
        largest, *others = sorted(groups.values(), key=len, reverse=True)
        self.reference = largest[0]
        suspects = {rank for group in others for rank, _ in group}
        self.suspects = () if len(largest) == len(others[0]) else tuple(sorted(suspects))

    def name_of(self, rank: int, copy: int) -> str:
        if len(self._by_rank[rank].digests) == 1:
            return f"rank {rank}"
        replica = sum(len(thing.digests) for thing in self._by_rank[:rank]) + copy
        return f"replica {replica} (rank {rank})"

    def descriptions(self) -> list[str]:
        """A line for each copy, where what they are already says how they differ: a number, or another shape."""
        different = {d for thing in self._by_rank for d in thing.descriptions}
        if len(different) == 1:
            return []
        shared = os.path.commonprefix(list(different))  # noqa: RUF071 - by characters, as is meant
        begin = max(0, len(shared) - _MOST_CHARACTERS // 2)
        return [
            f"{self.name_of(rank, copy)}: {'…' * (begin > 0)}{described[begin:][:_MOST_CHARACTERS]}"
            for rank, thing in enumerate(self._by_rank)
            for copy, described in enumerate(thing.descriptions)
        ]


def _differences(strategy: Strategy, key: Key, copies: Copies) -> list[str]:
    """A line for each copy that differs from the reference, which is sent to all."""
    communicator = strategy.extended.communicator
    own = mirrored_state(strategy)[key].copies
    flats = [arrays.to_host(bits(copy)) for copy in own]
    root, copy = copies.reference
    reference = flats[copy].copy() if communicator.rank == root else np.empty_like(flats[0])
    communicator.broadcast(reference.view(np.uint8), root, label="one copy of what differs")
    found = [difference(flat, reference, like) for flat, like in zip(flats, own, strict=True)]
    everyone: list[list[Difference | None]] = communicator.all_gather_object(
        found, label="differences from it"
    )
    kind = copies._by_rank[root].descriptions[copy]
    return [
        f"{copies.name_of(rank, i)}: {each} on {copies.name_of(root, copy)} ({kind})"
        for rank, theirs in enumerate(everyone)
        for i, each in enumerate(theirs)
        if each is not None
    ]
