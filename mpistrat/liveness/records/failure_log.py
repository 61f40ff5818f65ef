"""The errors that the ranks of a job end with: one that several ranks have in common is printed once.

Each rank notes its error in a file of the job's folder, under a lock. The first rank prints the error before it notes
that, so that no error is lost, whatever ends the ranks meanwhile. A rank that only hears of another rank's error leaves
that rank time to print it. Nodes tell each other what they note, once they can; the others leave the first node time to
speak for all.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from mpistrat.liveness import deadlines
from mpistrat.liveness.bounded_waits import soon, within
from mpistrat.liveness.records.job_folder import lock
from mpistrat.machine.notices import ranks_in_words
from mpistrat.machine.private_files import private

_FAILED, _SAID, _SUMMED_UP = "failed", "said", "summed-up"
OF_ANOTHER_RANK = "-"  # in place of an error: any that was said explains it
# "on rank 3", "PMI_RANK=3"
_NUMBER_OF_RANK = re.compile(r"(?i)((?:rank|procid|replica|worker)[ =:#]{0,2})(\d+)\b")


@dataclass(frozen=True)
class NotedFailure:
    """What a rank notes, as other nodes are told."""

    kind: str
    rank: int
    error: str
    at: float = 0.0  # time.monotonic() of this node, once it is read here


class Nodes(Protocol):
    """The other nodes of the job."""

    is_first_node: bool

    def tell_failure(self, failure: NotedFailure) -> None:
        """Have them note it, too. Does not wait for them."""


class FailureLog:
    """This rank's view of the errors.

    Args:
        folder: of the job, on this node.
        rank: this one's, of the `size` ranks of the job.
        nodes: None where nothing but this node is known.
    """

    def __init__(self, folder: str, rank: int, size: int, nodes: Nodes | None = None) -> None:
        self._path = os.path.join(folder, "failures")
        self._rank, self._size, self._nodes = rank, size, nodes
        follows = nodes is not None and not nodes.is_first_node
        self._patience = deadlines.RANK_WAITS_FOR_FIRST_NODE_TO_PRINT if follows else 0.0
        self._pause = deadlines.RANK_WAITS_FOR_NEXT_FAILURE + self._patience
        self._pause += 0.0 if nodes is None else deadlines.RANK_WAITS_FOR_FAILURES_OF_OTHER_NODES

    def note(self, failure: NotedFailure) -> None:
        """Note what another node tells. Raises: OSError."""
        with self._locked() as file:
            _write(file, failure)

    def add(self, error: str, say: Callable[[], object], patience: float = 0.0) -> None:
        """Note that this rank ends with `error`, and call `say` unless another rank has said it.

        Args:
            error: what errors are compared by, in one word, or in parts, "a.b", of which one has to be equal; or
                OF_ANOTHER_RANK.
            patience: how many seconds to leave to another rank to say it.
        Raises: OSError, before `say` is called.
        """
        with self._locked() as file:
            self._note(file, _FAILED, error)
        soon(functools.partial(self._is_said, error), max(patience, self._patience))
        with self._locked() as file:
            if not self._is_said(error):
                say()
                self._note(file, _SAID, error)

    def sum_up(self, last_line: str = "") -> str:
        """In lines, which ranks have an error in common, then `last_line`; "" if another rank says so.

        Waits a moment for ranks that are about to fail. Raises: OSError.
        """
        soon(self._is_complete, max(deadlines.RANK_WAITS_FOR_ALL_FAILURES, 2 * self._pause))
        with self._locked() as file:
            if self._entries(_SUMMED_UP):
                return ""
            self._note(file, _SUMMED_UP, "-")
        said = {entry.error: entry.rank for entry in self._entries(_SAID)}
        failed, lines = self._entries(_FAILED), []
        for error, first in said.items():
            ranks = {entry.rank for entry in failed if _are_alike(entry.error, error)}
            if len(ranks) > 1:
                which = "the same error" if len(said) == 1 else f"the error of rank {first}:"
                lines.append(f"mpistrat: {which} on {ranks_in_words(ranks)}\n")
        return "".join([*lines, last_line])

    def _is_complete(self) -> bool:
        """Whether all ranks of the job have failed, or no other does; and all errors have been said."""
        failed, now = self._entries(_FAILED), time.monotonic()
        all_failed = len({entry.rank for entry in failed}) == self._size and not self._patience
        if not all_failed and now - max((entry.at for entry in failed), default=0.0) <= self._pause:
            return False
        if not all(self._is_said(entry.error) for entry in failed):
            return False
        # Launchers must have had the time to pass on all that other ranks have said.
        others = (entry.at for entry in self._entries(_SAID) if entry.rank != self._rank)
        return now - max(others, default=0.0) > deadlines.RANK_WAITS_FOR_LAUNCHER_TO_PASS_ON

    def _is_said(self, error: str) -> bool:
        said = (entry.error for entry in self._entries(_SAID))
        return any(error == OF_ANOTHER_RANK or _are_alike(error, other) for other in said)

    def _entries(self, wanted: str) -> list[NotedFailure]:
        """The entries of this kind from the last seconds, in their order."""
        with open(self._path, encoding="utf-8") as file:
            lines = file.read().rpartition("\n")[0].splitlines()  # the last may be half written
        found = (line.split() for line in lines)
        entries = [NotedFailure(kind, int(rank), e, float(at)) for kind, at, rank, e in found]
        since = time.monotonic() - deadlines.NOTED_FAILURE_COUNTS
        return [entry for entry in entries if entry.kind == wanted and entry.at > since]

    def _note(self, file: Any, kind: str, error: str) -> None:
        failure, nodes = NotedFailure(kind, self._rank, error), self._nodes
        _write(file, failure)
        if nodes is not None:
            tell = functools.partial(nodes.tell_failure, failure)
            within(deadlines.RANK_WAITS_FOR_SENDING_OF_FAILURE, tell)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[Any]:
        """The file, to append to. A rank that holds the lock for long is not waited for."""
        with open(self._path, "a", encoding="utf-8", opener=private) as file:
            soon(functools.partial(lock, file), deadlines.RANK_WAITS_FOR_LOCK_OF_FAILURES)
            yield file


def _are_alike(first: str, second: str) -> bool:
    return any(map(str.__eq__, first.split("."), second.split(".")))


def _write(file: Any, failure: NotedFailure) -> None:
    file.write(f"{failure.kind} {time.monotonic()} {failure.rank} {failure.error}\n")
    file.flush()


def as_of_any_rank(traceback: str, rank: int) -> str:
    """A word for the traceback: the same on ranks whose messages differ only in their own number, or in addresses."""
    import hashlib  # here, because it makes importing mpistrat slower

    text = re.sub(r"(?m)^\[rank\d+\]: ?", "", traceback)  # torch writes it before each line
    lines = re.sub(r"\b0x[0-9a-f]+", "0x", text).splitlines()
    # Lines of code are the same on all ranks, whatever number they have.
    messages = [i for i, line in enumerate(lines) if not line[:1].isspace()]
    if {n for i in messages for _, n in _NUMBER_OF_RANK.findall(lines[i])} == {str(rank)}:
        for i in messages:
            lines[i] = _NUMBER_OF_RANK.sub(r"\1#", lines[i])
    return hashlib.blake2b("\n".join(lines).encode(errors="replace"), digest_size=16).hexdigest()
