"""The samples that ranks have taken and not compared yet. They outlive the strategy, until the end of the program."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from mpistrat.errors import DivergenceError
from mpistrat.liveness.bounded_waits import soon
from mpistrat.liveness.deadlines import RANK_WAITS_TO_COMPARE_AT_ITS_END
from mpistrat.machine.notices import tell
from mpistrat.pytorch.watch import drift
from mpistrat.pytorch.watch.keys import Key
from mpistrat.pytorch.watch.samples import Samples

if TYPE_CHECKING:
    from mpi4py import MPI


class SampledStep(NamedTuple):
    """The evidence of a step on this rank, as samples that may still be on their way from a device."""

    step: int
    names: dict[Key, str]
    values: Samples
    gradients: Samples
    facts: dict[str, str]


class Unproved:
    """The samples of a strategy that the ranks have not compared yet.

    Attributes:
        is_error: whether a drift is an error.
        steps: the sampled steps, in their order.
        equal_after: the last step that left all equal, as far as the ranks have compared.
        last: the values when an optimizer was dropped; {} before.

    Args:
        action: the answer to a drift, from `settings.on_drift`.
        present: a weak reference to a function that returns samples of the present values.
    """

    def __init__(self, action: str, present: Any) -> None:
        self.is_error = action == "raise"
        self.steps: list[SampledStep] = []
        self.equal_after = 0
        self.last: drift.Values = {}
        self._present = present

    def arrived(self) -> int:
        """Return how many of the first samples are on the host. Does not wait."""
        count = 0
        for taken in self.steps:
            if not taken.values.have_arrived():
                break
            count += 1
        return count

    def checksum(self, count: int) -> int:
        """Return a number of 31 bits for the values of the first `count` steps."""
        checksums = [taken.values.checksum() for taken in self.steps[:count]]
        return zlib.crc32(repr(checksums).encode()) >> 1

    def find(self, count: int, gather: Callable[[Any], list[Any]]) -> DivergenceError | None:
        """Look for a drift in the first `count` steps together, and forget these. Collective.

        Args: gather: returns the objects of all ranks, by rank.
        """
        steps = self.steps[:count]
        del self.steps[:count]
        now = dict(self.last)
        present = self._present()
        if present is not None:
            now.update(present().by_key())
        generator = zlib.crc32(torch.get_rng_state().numpy().data)
        evidence = []
        for taken in steps:
            values = taken.values.by_key()
            gradients = taken.gradients.by_key()
            evidence.append(drift.Evidence(taken.step, values, gradients, taken.facts))
        gathered = gather((evidence, now, generator))
        of_ranks, now_of_ranks, generators = zip(*gathered, strict=True)
        found = drift.first_drift(of_ranks, now_of_ranks, self.equal_after, set(generators))
        if found is None:
            return None
        key = found.keys[0]
        shown = steps[found.number]
        described = drift.values_in_words(gather(shown.values.elements(key)))
        name = shown.names[key]
        text = (
            f"the ranks have drifted apart: {name} is {described} (values that differ: {len(found.keys)}). It began "
            f"between optimizer steps {found.before} and {found.step}; the likely cause: {found.cause}. Make the ranks "
            "equal there, or call mpistrat.may_differ(module) if they may differ"
        )
        return DivergenceError(text, name)

    def compare_at_end_of(self, comm: MPI.Intracomm) -> None:
        """Let the ranks of `comm` compare the last samples when all programs have ended. Called by: each rank, once."""
        from mpi4py import MPI

        from mpistrat.liveness.ending.job_end import job_end

        # Without MPI_THREAD_MULTIPLE no rank knows when the programs of the others end.
        if MPI.Query_thread() == MPI.THREAD_MULTIPLE:
            of_comm = _of_communicators.setdefault(id(comm), [])
            if not of_comm:
                job_end().call_last(lambda: _compare_at_end(comm, of_comm))
            of_comm.append(self)


_of_communicators: dict[int, list[Unproved]] = {}  # by the `id` of a communicator, which is kept
_requests: list[MPI.Request] = []  # they may end in MPI_Finalize


def _compare_at_end(comm: MPI.Intracomm, of_comm: list[Unproved]) -> None:
    """Let the ranks compare all samples on one communicator that are left. Called by: `job_end`, on all ranks."""
    from mpi4py import MPI

    from mpistrat.liveness.ending.job_end import job_end

    if job_end().losses.has_lost(comm):
        return
    checksums = [unproved.checksum(len(unproved.steps)) for unproved in of_comm]
    checksum = zlib.crc32(repr(checksums).encode()) >> 1
    words = np.array([checksum, -checksum], np.int32)
    all_have_come = _waits_for(comm.Iallreduce(MPI.IN_PLACE, words, MPI.MAX))
    if not all_have_come or words[0] == -words[1]:
        return

    def gather(value: Any) -> list[Any]:
        if not _waits_for(comm.Ibarrier()):
            raise TimeoutError
        return comm.allgather(value)

    with contextlib.suppress(Exception):  # a rank that fails here does not hang the others
        for unproved in of_comm:
            error = unproved.find(len(unproved.steps), gather)
            if error is not None and comm.rank == 0:
                tell(str(error))
                if unproved.is_error:
                    job_end().end_job("ending the job: its ranks have drifted apart", 1)


def _waits_for(request: MPI.Request) -> bool:
    """Return whether the request ends within some seconds. Else it may end in MPI_Finalize, and so it is kept."""
    _requests.append(request)
    return soon(request.Test, RANK_WAITS_TO_COMPARE_AT_ITS_END)
