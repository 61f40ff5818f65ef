"""The contract check: before bytes move, the ranks agree on what moves."""

from __future__ import annotations

import functools
import hashlib
import os
import sys
import threading
import weakref
from typing import Any, NoReturn

import numpy as np

from mpistrat.arrays import Array, dtype_name
from mpistrat.communicators.call_site import call_site
from mpistrat.communicators.communicator import REDUCTIONS, Communicator
from mpistrat.errors import CollectiveMismatchError


class CheckedCommunicator(Communicator):
    """Wraps a communicator; raises CollectiveMismatchError on all ranks when their calls differ.

    Each call is described by a signature (operation, dtype, shape, label). Its 63-bit digest h goes
    through one 16-byte MAX of (h, -h): equal on all ranks exactly if both halves cancel. Only if they
    do not are the signatures themselves exchanged.

    Attributes:
        name: the same on all ranks of the group, and different from all other groups' names.
        calls: how many collectives this rank has entered.
        waiting_in: the signature of the collective this rank is inside of, else None. Read by the
            watcher of `job_end` on another thread.
        splits: the communicators that were made of this one.
    """

    def __init__(self, inner: Communicator, name: str) -> None:
        self.inner = inner
        self.rank = inner.rank
        self.size = inner.size
        self.name = name
        self.calls = 0
        self.waiting_in: tuple[Any, ...] | None = None
        self.splits: list[CheckedCommunicator] = []
        self._agreement = np.empty(2, np.int64)
        self._thread = 0  # the one that is, or was last, inside a collective
        self._forked = False
        os.register_at_fork(after_in_child=_Forked(self))

    def all_reduce(
        self, buffer: Array, op: str = "sum", *, out: Array | None = None, label: str = ""
    ) -> None:
        if op not in REDUCTIONS:
            self.raise_together(ValueError(f"op must be one of {REDUCTIONS}, got {op!r}"))
        self._agree(("all_reduce", op, dtype_name(buffer), tuple(buffer.shape), label))
        self.inner.all_reduce(buffer, op, out=out)
        self.waiting_in = None

    def broadcast(self, buffer: Array, root: int = 0, *, label: str = "") -> None:
        self._agree(("broadcast", root, dtype_name(buffer), tuple(buffer.shape), label))
        self.inner.broadcast(buffer, root)
        self.waiting_in = None

    def all_gather(self, buffer: Array, *, label: str = "") -> list[Array]:
        self._agree(("all_gather", dtype_name(buffer), f"{buffer.ndim} dimensions", label))
        gathered = self.inner.all_gather(buffer)
        self.waiting_in = None
        return gathered

    def broadcast_object(self, value: Any, root: int = 0, *, label: str = "") -> Any:
        self._agree(("broadcast_object", root, label))
        value = self.inner.broadcast_object(value, root)
        self.waiting_in = None
        return value

    def all_gather_object(self, value: Any, *, label: str = "") -> list[Any]:
        self._agree(("all_gather_object", label))
        values = self.inner.all_gather_object(value)
        self.waiting_in = None
        return values

    def barrier(self, *, label: str = "") -> None:
        self._agree(("barrier", label))
        self.waiting_in = None  # the agreement is a barrier

    def split(self, color: int, key: int = 0) -> CheckedCommunicator:
        self._agree(("split",))
        inner = self.inner.split(color, key)
        self.waiting_in = None
        part = CheckedCommunicator(inner, f"{self.name}/{len(self.splits)}:{color}")
        self.splits.append(part)
        return part

    def abort(self, code: int) -> NoReturn:
        self.inner.abort(code)

    def raise_together(self, error: Exception) -> NoReturn:
        """Raise `error` here; the ranks that wait in a collective get CollectiveMismatchError.

        If all ranks come here with errors of the same class, each raises its own.
        """
        self._agree(("raise", type(error).__name__), cause=error)
        self.waiting_in = None
        raise error

    def _agree(self, signature: tuple[Any, ...], cause: Exception | None = None) -> None:
        if self._forked:
            raise RuntimeError(
                f"{describe(signature)} was called in a forked child of rank {self.rank}; MPI belongs to "
                "the parent: return what the child computed, and call it there"
            )
        thread = threading.get_ident()
        if self.waiting_in is not None and self._thread != thread:
            raise RuntimeError(
                f"rank {self.rank}: {describe(signature)} was called on a second thread while another is in "
                f"{describe(self.waiting_in)}; the ranks could not know which is which. Call collectives on "
                "one thread, or make a strategy of its own (comm=) for each"
            )
        self._thread = thread
        self.calls += 1
        self.waiting_in = signature
        digest = _digest(signature)
        agreement = self._agreement
        agreement[0] = digest
        agreement[1] = -digest
        self.inner.all_reduce(agreement, "max")
        if agreement[0] + agreement[1] != 0:
            told = signature if cause is None else (*signature, str(cause))
            everyone = self.inner.all_gather_object((told, call_site(sys._getframe(1))))
            self.waiting_in = None
            raise CollectiveMismatchError(_explain(everyone, self.rank)) from cause


class _Forked:
    """Marks a communicator in a forked child, without keeping it alive in the parent."""

    def __init__(self, communicator: CheckedCommunicator) -> None:
        self._communicator = weakref.ref(communicator)

    def __call__(self) -> None:
        communicator = self._communicator()
        if communicator is not None:
            communicator._forked = True


@functools.lru_cache(maxsize=4096)
def _digest(signature: tuple[Any, ...]) -> int:
    hashed = hashlib.blake2b(repr(signature).encode(), digest_size=8).digest()
    return int.from_bytes(hashed, "little") >> 1


def describe(signature: tuple[Any, ...]) -> str:
    """A collective as a user would write it."""
    operation, *rest = signature
    if operation == "raise":
        return f"raised {': '.join(rest)}"
    return f"{operation}({', '.join(str(part) for part in rest if part != '')})"


def _explain(everyone: list[tuple[tuple[Any, ...], str]], rank: int) -> str:
    """One line for each group of consecutive ranks that made the same call at the same place."""
    lines = []
    start = 0
    for r in range(1, len(everyone) + 1):
        if r == len(everyone) or everyone[r] != everyone[start]:
            ranks = f"rank {start}" if r == start + 1 else f"ranks {start}-{r - 1}"
            signature, site = everyone[start]
            lines.append(f"  {ranks}: {describe(signature)}\n      at {site}")
            start = r
    return (
        f"the ranks did not call the same collective (this is rank {rank} of {len(everyone)}):\n"
        + "\n".join(lines)
        + "\nEvery rank must make the same calls, in the same order, with the same shapes and dtypes."
    )
