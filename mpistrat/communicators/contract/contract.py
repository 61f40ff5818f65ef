"""The contract of a communicator: its ranks agree on each call before bytes move, and record it."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import weakref
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from mpistrat.communicators.contract.agreement import MessageAgreement, SharedMemoryAgreement
from mpistrat.communicators.contract.call_signature import CallSignature, mismatch, signature_of
from mpistrat.communicators.contract.joint_errors import is_raised_by_all, mark_raised_by_all
from mpistrat.communicators.contract.unchecked import Unchecked
from mpistrat.errors import CollectiveMismatchError
from mpistrat.liveness.call_site import SourceLine, call_site, message_of, outside, raised_at
from mpistrat.liveness.records.record import ABORT, GROUP, SINCE
from mpistrat.liveness.records.watch import CommunicatorWatch
from mpistrat.liveness.waiting import raise_if_stalled

if TYPE_CHECKING:
    from mpistrat.communicators.contract.collective_spans import CollectiveSpans
    from mpistrat.communicators.node.slots import Slot
    from mpistrat.communicators.transports.mpi import MpiTransport
    from mpistrat.trace.timeline import Timeline


# Contracts of communicators whose collective this rank has left by an error. They must stay alive, because MPI may
# still write to the numbers of their agreement, and mpi4py's requests do not keep these numbers alive.
_given_up: list[Contract] = []


class Contract(Unchecked):
    """Records the calls of a communicator, and raises CollectiveMismatchError on all ranks when their calls differ.

    A signature describes each call (operation, dtype, shape, label). The ranks compare its digest, a hash: in shared
    memory if all of them are on one node, else by an MPI message. They exchange signatures only if digests differ, for
    the error's text. The object is also the context of the call that `enter` has begun.

    Args:
        mpi: the MPI transport over the communicator's ranks.
        name: the communicator's name, the same on all ranks, and different from all other names.
        watch: the rank's record, in shared memory, of its calls, and the records of its peers; None: a record that no
            other process sees.
        check: "always": the ranks compare their calls; "never": they do not.
        timeline: the trace to which calls are added; None where no trace is written.
    """

    watch: CommunicatorWatch

    def __init__(
        self,
        mpi: MpiTransport,
        name: str,
        watch: CommunicatorWatch | None = None,
        check: str = "always",
        timeline: Timeline | None = None,
    ) -> None:
        self.rank = mpi.rank
        self.size = mpi.size
        self.name = name
        self.watch = watch or CommunicatorWatch()
        self.check = check
        self.timeline = timeline
        self.parts: list[Contract] = []
        self._mpi = mpi
        self._record = self.watch.record
        self._record_slot = self.watch.slot
        if check == "always":
            if self.watch.peers is None:
                self.agreement = MessageAgreement(mpi, self.watch)
            else:
                self.agreement = SharedMemoryAgreement(self.watch)
        self._spans: CollectiveSpans | None = None
        if timeline is not None:
            from mpistrat.communicators.contract.collective_spans import CollectiveSpans

            self._spans = CollectiveSpans(timeline, name, self.size)
        self._called_at: tuple[CodeType, int] | None = None
        # How ranks agree on a call, indexed by its `follows`. Inside `following` entry 1 is None: they do not agree
        # again.
        self._agreements = self.agreement, self.agreement
        self._thread = 0  # the thread that is inside a collective, or was last
        self._abandoned: BaseException | None = None  # the error that made this rank leave a call
        self._is_forked = False
        self._is_closed = False  # whether calls are errors, after a fork or an abandoned call
        _contracts.add(self)

    @property
    def called_at(self) -> str:  # type: ignore[override]
        if self._called_at is None:
            return Unchecked.called_at
        code, line = self._called_at
        return f"{code.co_filename}:{line} in {code.co_name}"

    def raise_together(self, error: Exception) -> NoReturn:
        self.raising = error
        try:
            with self.enter(signature_of(("raise", type(error).__name__)), cause=error):
                mark_raised_by_all(error)
                raise error
        finally:
            self.raising = None
            del error  # it refers to this frame, and so keeps the program's objects alive

    def of_part(self, mpi: MpiTransport, name: str, watch: CommunicatorWatch | None) -> Contract:
        part = Contract(mpi, name, watch, self.check, self.timeline)
        self.parts.append(part)
        return part

    def enter(
        self,
        signature: CallSignature,
        cause: Exception | None = None,
        slot: Slot | None = None,
        payload: Any = None,
        follows: bool = False,
    ) -> Contract:
        thread = threading.get_ident()
        if self._is_closed or self.waiting_in is not None:
            self._check_usable(signature, thread)
        self._thread = thread
        self.calls = calls = self.calls + 1
        self.waiting_in = signature
        frame = outside(sys._getframe(1))
        code = frame.f_code
        line = frame.f_lineno
        self._called_at = code, line
        site = (code.co_filename, code.co_name, line)
        text, call_bytes, stamp = self.recorded = signature.texts[site]
        record = self._record
        spans = self._spans
        agreement = self._agreements[follows]
        record.enter(self._record_slot, calls, text, call_bytes)
        if spans is not None:
            spans.begin(signature, code, line)
        try:
            if slot is not None:
                slot.own[(self.agreed + 1) & 1][...] = payload
            agreed = True
            if agreement is not None:
                self.agreed += 1
                agreed = agreement.agree(self.agreed, stamp)
            if record.words[ABORT]:
                raise_if_stalled(self.watch)  # other ranks may have left this call, for a stall
            if agreement is not None:
                record.waited(self._record_slot)
                if spans is not None:
                    spans.together()
            if not agreed:
                self._raise_mismatch(signature, cause, frame)
        except BaseException as error:
            self._leave(error)
            raise
        return self

    def _leave(self, error: BaseException) -> None:
        """End the current call on this rank because of `error`, though other ranks may still enter the call.

        Later calls raise RuntimeError, except after CollectiveMismatchError, because all ranks raise that.
        """
        if not isinstance(error, CollectiveMismatchError):
            self._abandon(error)
            _given_up.append(self)
        self.__exit__()

    def _abandon(self, error: BaseException) -> None:
        self._abandoned = error
        self.is_abandoned = self._is_closed = True

    def _check_usable(self, signature: CallSignature, thread: int) -> None:
        """Check that this rank can enter the call `signature`, and that the thread with the id `thread` can.

        Raises: RuntimeError in a forked child, after a call that this rank has left, or during another thread's call.
        """
        if self._is_forked:
            raise RuntimeError(
                f"{signature} was called in a forked child of rank {self.rank}; MPI belongs to "
                "the parent: return the child's result to the parent, and call it there"
            )
        if self._abandoned is not None:
            raise RuntimeError(
                f"rank {self.rank}: {signature} cannot be called any more: this rank left its collective "
                f"number {self.calls} while others may still be in it, for {type(self._abandoned).__name__}. Save the "
                "results that you need and end the program"
            ) from self._abandoned
        if self._thread != thread:
            raise RuntimeError(
                f"rank {self.rank}: {signature} was called on a second thread while another is in "
                f"{self.waiting_in}; the ranks could not match their calls. Call collectives on "
                "one thread, or make a strategy of its own (comm=) for each"
            )

    def _raise_mismatch(
        self, signature: CallSignature, cause: Exception | None, frame: FrameType | SourceLine
    ) -> NoReturn:
        words = signature.words
        place = call_site(frame)
        if cause is not None:
            words = (*words, message_of(cause))
            place = raised_at(cause, place)
        raise mismatch(self._mpi.comm.allgather((words, place)), self.rank) from cause

    def __enter__(self) -> None:
        """Do nothing: `enter` has entered the call, and this context lasts until the call ends."""

    def __exit__(self, kind: object = None, error: object = None, trace: object = None) -> None:
        signature = self.waiting_in
        self.waiting_in = None
        if self._spans is not None:
            self._spans.end(self.calls)
        self._record.words[self._record_slot + SINCE] = 0
        if isinstance(error, Exception) and not is_raised_by_all(error):
            self._tell_others(f"{signature}", error)

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        # If this rank could not tell the other ranks of an error in the block, the ranks agree on each call as usual.
        can_tell = self._mpi.thread_multiple and self.watch.revocable_group is None
        may_follow = can_tell and self.agreement is not None
        if may_follow:
            self._agreements = self.agreement, None
        try:
            yield
        except Exception as error:
            if may_follow and not is_raised_by_all(error):
                self.calls += 1
                self._tell_others("which follows another", error)
            raise
        finally:
            self._agreements = self.agreement, self.agreement

    def _tell_others(self, call: str, error: Exception) -> None:
        """Tell the other ranks that this rank leaves `call` because of `error`, so that ranks that wait for it raise.

        It does nothing if a revocable group tells the other ranks. Unless ranks agree through shared memory, this
        rank's later calls raise RuntimeError, because other ranks would take its next message for a part of this call.

        Called by: a rank alone, when all ranks have agreed on the call.

        Args: call: words for the call, for the message.
        """
        watch = self.watch
        if watch.revocable_group is not None:
            return  # the group tells the other ranks
        if watch.peers is None or self.agreement is None:
            self._abandon(error)
        text = " ".join(str(error).split())  # in one line
        watch.tell_others(
            f"rank {self.rank} of {self.size} left collective number {self.calls}, {call}, for "
            f"{type(error).__name__}: {text}\n      at {self.called_at}\nThe others cannot go on without its part: "
            "fix the error of that rank",
            self._record.words[self._record_slot + GROUP],
            self.calls,
        )
        mark_raised_by_all(error)


# All contracts of this process. In a forked child, calls on them raise RuntimeError.
_contracts: weakref.WeakSet[Contract] = weakref.WeakSet()


def _forbid_all() -> None:
    for contract in _contracts:
        contract._is_closed = contract._is_forked = True


os.register_at_fork(after_in_child=_forbid_all)
