"""Finds the copies of a mirrored value that differ, and describes them in words."""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mpistrat import arrays
from mpistrat.communicators import Communicator, reducing
from mpistrat.communicators.contract.joint_errors import mark_raised_by_all
from mpistrat.errors import DivergenceError
from mpistrat.pytorch.watch.digests import bits, describe, difference, digest
from mpistrat.pytorch.watch.keys import Key
from mpistrat.pytorch.watch.mirrored_state import MirroredThing, State

_MOST_TOLD = 8  # copies or names in a message
_MOST_CHARACTERS = 80  # of a value in a message

_WHAT_TO_DO = """\
Restore an earlier checkpoint, or, if rank 0's values are right, call strategy.mirror(module) on every rank. If only one
node's ranks ever differ, its memory or processor may be at fault. Look for a load or a write that one rank alone makes:
under `if rank == 0:`, to a tensor's .data, or to an optimizer's state."""


class Digested(NamedTuple):
    """Digests of one mirrored value on this rank, taken when it was compared.

    Attributes:
        descriptions: dtype and shape of each of this rank's copies, as a text; the `repr` of a copy that is no array.
        digests: digest of each copy, 8 bytes.
    """

    descriptions: tuple[str, ...]
    digests: tuple[bytes, ...]

    @classmethod
    def of(cls, thing: MirroredThing) -> Digested:
        descriptions = tuple(describe(copy) for copy in thing.copies)
        digests = tuple(digest(copy) for copy in thing.copies)
        return cls(descriptions, digests)


class StateComparison:
    """One comparison of all ranks' copies of mirrored values, bit for bit.

    Args:
        communicator: the ranks.
        state: this rank's values, by key. Their digests are taken at once.

    Attributes:
        words: a checksum of all values, int32[4]: two words, each followed by its negative. A MAX over the ranks gives
            the largest word, and minus the smallest word. So the two differ only in sign if all ranks have the same
            checksum. All four words are the largest int32 if this rank's own replicas differ.
        names: the names of the values that differ, once `divergence` has found them.
    """

    def __init__(self, communicator: Communicator, state: State) -> None:
        self._communicator = communicator
        self._state = state
        self._digested: dict[Key, Digested] = {}
        self.names: list[str] = []
        firsts = []
        alike = True
        for key, thing in state.items():
            digested = Digested.of(thing)
            self._digested[key] = digested
            firsts.append((key, digested.digests[0]))
            alike &= len(set(digested.digests)) == 1
        checksum = zlib.crc32(repr(firsts).encode())
        high, low = divmod(checksum, 1 << 16)
        words = [low, -low, high, -high]
        self.words = np.array(words, np.int32)
        if not alike:
            self.words[:] = np.iinfo(np.int32).max

    def exchange(self) -> np.ndarray:
        """Return the maxima of all ranks' words, int32[4]. Collective."""
        greatest = self.words.copy()
        self._communicator.all_reduce(greatest, reducing("max", "digest of what is mirrored"))
        return greatest

    def divergence(
        self, greatest: np.ndarray, when: str, most: float = -1.0
    ) -> DivergenceError | None:
        """Return the error for the first value, in the order of keys, whose copies differ. Collective if words differ.

        Args:
            greatest: the maxima of all ranks' words, int32[4].
            when: when the values were compared, for the message.
            most: of arrays of floats a larger difference is an error, as `Difference.roundings` has it.
        Returns: the error, equal on all ranks, for all ranks to raise; None if all values that every rank has are
            equal. Then the ranks only differ in values that some ranks have dropped.
        """
        if (greatest[::2] == -greatest[1::2]).all():
            return None
        by_rank = self._communicator.all_gather_object(
            self._digested, label="digests of what is mirrored"
        )
        common = sorted(set(self._digested).intersection(*by_rank))
        differing = {}
        for key in common:
            copies = Copies([things[key] for things in by_rank])
            if not copies.are_equal:
                differing[key] = copies
                self.names.append(self._state[key].name)
        for name, (key, copies) in zip(self.names, differing.items(), strict=True):
            lines = copies.descriptions() or self._differences(key, copies, most)
            if not lines:
                continue
            if len(lines) > _MOST_TOLD:
                lines[_MOST_TOLD:] = [f"and {len(lines) - _MOST_TOLD} more"]
            nodes = self._communicator.all_gather_object(
                os.uname().nodename, label="names of the nodes"
            )
            text = "\n  ".join([f"{name} is not the same any more on all ranks ({when}):", *lines])
            verdict = copies.verdict(nodes)
            others = (
                f"{len(self.names)} of {len(common)} tensors and numbers differ: "
                f"{_some(self.names)}."
            )
            message = f"{text}\n{verdict}\n{others}\n{_WHAT_TO_DO}"
            error = DivergenceError(message, name, copies.suspects)
            mark_raised_by_all(error)
            return error
        return None

    def _differences(self, key: Key, copies: Copies, most: float) -> list[str]:
        """Return a line for each copy of any rank that differs from `copies.reference`: how many elements, and where.

        The reference copy is broadcast to all ranks. Called by: every rank.
        Returns: [] if no difference is larger than `most` roundings.
        """
        things = self._state[key].copies
        flats = [arrays.to_host(bits(thing)) for thing in things]
        root, copy = copies.reference
        is_root = self._communicator.rank == root
        reference = flats[copy].copy() if is_root else np.empty_like(flats[0])
        self._communicator.broadcast(
            reference.view(np.uint8), root, label="one copy of what differs"
        )
        found = [difference(flat, reference, things[0]) for flat in flats]
        by_rank = self._communicator.all_gather_object(found, label="differences from it")
        described = copies.by_rank[root].descriptions[copy]
        of_reference = f"{copies.name_of(root, copy)} ({described})"
        lines = []
        is_large = False
        for rank, differences in enumerate(by_rank):
            for i, each in enumerate(differences):
                if each is not None:
                    is_large |= not each.roundings <= most
                    lines.append(f"{copies.name_of(rank, i)}: {each} on {of_reference}")
        if is_large:
            return lines
        return []


def _some(names: list[str]) -> str:
    shown = names[:_MOST_TOLD]
    if len(names) > _MOST_TOLD:
        shown.append("…")
    return ", ".join(shown)


class Copies:
    """All ranks' copies of one mirrored value, grouped by their digests. Copies with the same bits are in one group.

    Attributes:
        by_rank: the digests of each rank, by rank.
        are_equal: whether all copies are in one group.
        reference: (rank, index of the copy on that rank) of the first copy in the largest group.
        suspects: ranks with a copy outside of the largest group; empty if another group is as large.
    """

    def __init__(self, by_rank: list[Digested]) -> None:
        self.by_rank = by_rank
        groups: dict[bytes, list[tuple[int, int]]] = {}
        for rank, thing in enumerate(by_rank):
            for copy, found in enumerate(thing.digests):
                groups.setdefault(found, []).append((rank, copy))
        largest, *smaller = sorted(groups.values(), key=len, reverse=True)
        self.reference = largest[0]
        self.are_equal = not smaller
        suspects = {rank for group in smaller for rank, _ in group}
        has_majority = not smaller or len(largest) > len(smaller[0])
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
        if len(self.by_rank[rank].digests) == 1:
            return f"rank {rank}"
        first = sum(len(thing.digests) for thing in self.by_rank[:rank])
        return f"replica {first + copy} (rank {rank})"

    def descriptions(self) -> list[str]:
        """Return a line for each copy, if the copies are different numbers, or arrays of different shapes or dtypes.

        Returns: an empty list if all descriptions are equal. Then `_differences` compares the elements.
        """
        different = set().union(*(thing.descriptions for thing in self.by_rank))
        if len(different) == 1:
            return []
        shared = os.path.commonprefix(list(different))  # noqa: RUF071 - a prefix by characters is meant
        begin = max(0, len(shared) - _MOST_CHARACTERS // 2)
        end = begin + _MOST_CHARACTERS
        cut = "…" if begin else ""
        lines = []
        for rank, thing in enumerate(self.by_rank):
            for copy, described in enumerate(thing.descriptions):
                shown = described[begin:end]
                lines.append(f"{self.name_of(rank, copy)}: {cut}{shown}")
        return lines
