"""The log of the errors that end the ranks of a job: an error that several ranks have in common is printed once.

Each rank writes its error to a file of the job's folder, under a lock. The first rank that gets the lock prints the
error, and then logs that it has printed it. In this order no error is lost, even if the launcher kills the rank between
the two. A rank that raises another rank's error gives that rank time to print it. The nodes send each other their
entries, once they are connected. Ranks of other nodes wait 0.4 s, so that a rank of the first node prints an error that
several nodes have in common.
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

_FAILED = "failed"
_SAID = "said"
_SUMMED_UP = "summed-up"
# Stands for an error that this rank raises because of another rank's error: any printed error explains it.
OF_ANOTHER_RANK = "-"
# "on rank 3", "PMI_RANK=3"
_NUMBER_OF_RANK = re.compile(r"(?i)((?:rank|procid|replica|worker)[ =:#]{0,2})(\d+)\b")


@dataclass(frozen=True)
class NotedFailure:
    """An entry of the log of errors. Ranks also send it to other nodes.

    Attributes:
        kind: "failed": the rank ends with the error; "said": the rank has printed the error; "summed-up": the rank has
            printed the summary of all errors.
        rank: the rank's number in the job.
        error: a word that stands for the error, see `FailureLog.add`; "-" in an entry of the kind "summed-up".
        at: when this node has logged the entry, by `time.monotonic()`; 0.0 in an entry that is not read from the file.
    """

    kind: str
    rank: int
    error: str
    at: float = 0.0


class Nodes(Protocol):
    """The connection of this rank to the other nodes of the job. `OtherNodes` implements it.

    Attributes: is_first_node: whether this rank is on the job's first node.
    """

    is_first_node: bool

    def tell_failure(self, failure: NotedFailure) -> None:
        """Send `failure` to the other nodes, for their logs, without waiting for them."""


class FailureLog:
    """One rank's access to the log of errors, the file `failures` in the job's folder.

    Args:
        folder: the path of the job's folder.
        rank, size: this rank's number, and the number of ranks of the job.
        nodes: the job's other nodes; None if there are none, or this rank is not connected to them yet.
    """

    def __init__(self, folder: str, rank: int, size: int, nodes: Nodes | None = None) -> None:
        self._path = os.path.join(folder, "failures")
        self._rank = rank
        self._size = size
        self._nodes = nodes
        self._patience = 0.0
        self._pause = deadlines.RANK_WAITS_FOR_NEXT_FAILURE
        if nodes is not None:
            self._pause += deadlines.RANK_WAITS_FOR_FAILURES_OF_OTHER_NODES
            if not nodes.is_first_node:
                self._patience = deadlines.RANK_WAITS_FOR_FIRST_NODE_TO_PRINT
                self._pause += self._patience

    def note(self, failure: NotedFailure) -> None:
        """Append `failure`, an entry that another node has sent, to the file.

        Raises: OSError if the file cannot be written.
        """
        with self._locked() as file:
            _write(file, failure)

    def add(self, error: str, say: Callable[[bool], object], patience: float = 0.0) -> None:
        """Log that this rank ends with `error`, and call `say` to print the error unless another rank has printed it.

        Called by: a rank that fails, before it ends the job.
        Args:
            error: a text without blanks that stands for the error: one to three words with dots between, "a.b.c". Two
                errors are alike if they have the same first or second word. OF_ANOTHER_RANK is like every error. The
                third word stands for the frames of the traceback.
            say: prints the error; called at most once, while this rank holds the file's lock. Its argument says whether
                another rank has printed an error with the same third word.
            patience: how many seconds to wait for another rank to print the error first.
        Raises: OSError if the file cannot be used, ValueError if a line of it is damaged; `say` may not have been
            called then.
        """
        with self._locked() as file:
            self._note(file, _FAILED, error)
        patience = max(patience, self._patience)
        soon(functools.partial(self._is_said, error), patience)
        with self._locked() as file:
            if not self._is_said(error):
                frames = error.rpartition(".")[2]
                say(frames in str(self._entries(_SAID)))
                self._note(file, _SAID, error)

    def sum_up(self, last_line: str = "") -> str:
        """Return the summary of the errors: a line for each error that several ranks have in common, with these ranks.

        `last_line` follows these lines. The method waits at most about 2 s for other ranks that are about to fail.

        Returns: "" if another rank has already made the summary.
        Raises: OSError if the file cannot be used; ValueError if a line of it is damaged.
        """
        soon(self._is_complete, max(deadlines.RANK_WAITS_FOR_ALL_FAILURES, 2 * self._pause))
        with self._locked() as file:
            if self._entries(_SUMMED_UP):
                return ""
            self._note(file, _SUMMED_UP, "-")
        said = {entry.error: entry.rank for entry in self._entries(_SAID)}
        failed = self._entries(_FAILED)
        lines = []
        for error, first in said.items():
            ranks = {entry.rank for entry in failed if _are_alike(entry.error, error)}
            if len(ranks) > 1:
                which = "the same error" if len(said) == 1 else f"the error of rank {first}:"
                lines.append(f"mpistrat: {which} on {ranks_in_words(ranks)}\n")
        return "".join([*lines, last_line])

    def _is_complete(self) -> bool:
        """Whether the summary can be made now.

        True if all ranks have failed, or none has failed lately; if every error has been printed; and if the launcher
        has had 0.1 s to pass on the other ranks' output. Ranks of nodes other than the first always wait a while for
        further failures.
        """
        failed = self._entries(_FAILED)
        now = time.monotonic()
        ranks = {entry.rank for entry in failed}
        all_failed = len(ranks) == self._size and not self._patience
        last = max((entry.at for entry in failed), default=0.0)
        if not all_failed and now - last <= self._pause:
            return False
        if not all(self._is_said(entry.error) for entry in failed):
            return False
        # The launcher must have had time to pass on the output of other ranks.
        said = self._entries(_SAID)
        by_others = (entry.at for entry in said if entry.rank != self._rank)
        last_said = max(by_others, default=0.0)
        return now - last_said > deadlines.RANK_WAITS_FOR_LAUNCHER_TO_PASS_ON

    def _is_said(self, error: str) -> bool:
        said = self._entries(_SAID)
        if error == OF_ANOTHER_RANK:
            return bool(said)
        return any(_are_alike(error, entry.error) for entry in said)

    def _entries(self, wanted: str) -> list[NotedFailure]:
        """Return the entries of the kind `wanted` from the last 5 s, in the order of the file."""
        with open(self._path, encoding="utf-8") as file:
            # The last line may be half written.
            lines = file.read().rpartition("\n")[0].splitlines()
        since = time.monotonic() - deadlines.NOTED_FAILURE_COUNTS
        entries = []
        for line in lines:
            kind, at, rank, error = line.split()
            entry = NotedFailure(kind, int(rank), error, float(at))
            if entry.kind == wanted and entry.at > since:
                entries.append(entry)
        return entries

    def _note(self, file: Any, kind: str, error: str) -> None:
        failure = NotedFailure(kind, self._rank, error)
        nodes = self._nodes
        _write(file, failure)
        if nodes is not None:

            def tell() -> None:
                nodes.tell_failure(failure)

            within(deadlines.RANK_WAITS_FOR_SENDING_OF_FAILURE, tell)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[Any]:
        """Hold the lock of the log file in the block, and yield the file, open for appending.

        If another rank holds the lock for more than 0.5 s, the block runs without the lock.
        """
        with open(self._path, "a", encoding="utf-8", opener=private) as file:
            soon(functools.partial(lock, file), deadlines.RANK_WAITS_FOR_LOCK_OF_FAILURES)
            yield file


def _are_alike(first: str, second: str) -> bool:
    words = enumerate(first.split(".")[:2])
    others = enumerate(second.split(".")[:2])
    return not set(words).isdisjoint(others)


def _write(file: Any, failure: NotedFailure) -> None:
    now = time.monotonic()
    file.write(f"{failure.kind} {now} {failure.rank} {failure.error}\n")
    file.flush()


def as_of_any_rank(traceback: str, rank: int) -> str:
    """Return a hash of the traceback without its memory addresses, and without the number `rank` in its messages.

    So ranks get equal hashes if their messages differ only in each rank's own number. If the messages name another
    rank, too, all numbers count. For `rank` -1 all numbers count.
    """
    import hashlib  # imported here, so that `import mpistrat` stays fast

    text = re.sub(r"(?m)^\[rank\d+\]: ?", "", traceback)  # torch's prefix of each line
    lines = re.sub(r"\b0x[0-9a-f]+", "0x", text).splitlines()
    # Indented lines are code, the same on all ranks. A number in them stays.
    messages = []
    numbers: set[str] = set()
    for i, line in enumerate(lines):
        if not line[:1].isspace():
            messages.append(i)
            found = _NUMBER_OF_RANK.findall(line)
            numbers.update(number for _, number in found)
    if numbers == {str(rank)}:
        for i in messages:
            lines[i] = _NUMBER_OF_RANK.sub(r"\1#", lines[i])
    content = "\n".join(lines).encode(errors="replace")
    return hashlib.blake2b(content, digest_size=16).hexdigest()
