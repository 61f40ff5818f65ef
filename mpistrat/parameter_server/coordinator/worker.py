"""A worker: it executes the closures that the chief sends."""

from __future__ import annotations

import collections
import contextlib
import contextvars
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from mpistrat.parameter_server.coordinator.failures import SentError, pack_error
from mpistrat.parameter_server.coordinator.per_worker import ResourceCache
from mpistrat.parameter_server.coordinator.pickling import References, dumps, loads, raise_explained
from mpistrat.parameter_server.rpc.endpoint import RpcEndpoint

# Notices: CLOSURES from the chief, OUTCOMES and RETURNED to the chief. Their bodies:
CLOSURES = "closures"  # new resources by id, ids of dropped resources, [(id, name, payload)]
OUTCOMES = "outcomes of closures"  # [(id, pickled result, error)], the seconds that all closures took together
RETURNED = "closures not begun"  # ids

_MOST_OUTCOMES = 16  # in a message
_SECONDS_TO_COLLECT_OUTCOMES = 1e-3
_SECONDS_TO_READ = 1e-3
SECONDS_TO_KEEP = 0.05  # the longest wait of a closure behind a running closure

_Arrived = tuple[int, str, bytes]  # a closure's id, name and payload
Outcome = tuple[int, bytes | None, SentError | None]


class Worker:
    """Executes closures (scheduled functions) one after the other, in the thread that calls `serve`.

    Args:
        chief: the chief's rank.
        index: this worker's index, from 0.
        in_closure: returns, for a closure's id, the context to execute the closure in. The servers make updates inside
            it once, also if another worker repeats the closure, and its exit sends the changes of modules' buffers. It
            yields a function to call between unpickling the closure and executing it.
    """

    def __init__(
        self,
        rpc: RpcEndpoint,
        chief: int,
        index: int,
        references: References,
        in_closure: Callable[[int], AbstractContextManager[Callable[[], None]]],
    ) -> None:
        self._rpc = rpc
        self._chief = chief
        self._index = index
        self._in_closure = in_closure
        self._references = references
        self._resources = ResourceCache(references)
        self._waiting: collections.deque[_Arrived] = collections.deque()
        self._begun = 0.0  # time when the running closure began
        self._busy = threading.Event()
        self._ending = False
        self._outcomes: list[Outcome] = []
        self._seconds = 0.0  # spent on the closures in `_outcomes`
        self._sent = 0.0  # time when outcomes were last sent
        self._sending = threading.Lock()
        rpc.handle(CLOSURES, self._receive)

    def serve(self, until: Callable[[], bool]) -> None:
        """Receive and execute closures, and return when `until()` is true.

        All closures that wait are executed before `until` is checked again. Closures that arrive together with the
        reason for `until()` to be true are not executed.
        """
        watch = threading.Thread(target=self._keep_returning, name="mpistrat closures", daemon=True)
        watch.start()
        try:
            while not until():
                self._rpc.run_until(lambda: bool(self._waiting) or until())
                if not until():
                    self._begun = time.perf_counter()
                    self._busy.set()
                    while closure := _try(self._waiting.popleft):
                        self._execute(*closure)
                    self._busy.clear()
        finally:
            self._ending = True
            self._busy.set()

    def _receive(self, source: int, body: Any) -> None:
        resources, dropped, closures = body
        self._resources.update(resources, dropped)
        self._waiting.extend(closures)

    def _execute(self, closure: int, name: str, payload: bytes) -> None:
        outcome = self._outcome(closure, name, payload)
        now = time.perf_counter()
        with self._sending:
            self._outcomes.append(outcome)
            self._seconds += now - self._begun
            if (
                len(self._outcomes) >= _MOST_OUTCOMES
                or now - self._sent > _SECONDS_TO_COLLECT_OUTCOMES
                or not self._waiting
            ):
                self._send_outcomes(now)
        self._begun = now

    def _outcome(self, closure: int, name: str, payload: bytes) -> Outcome:
        reference_of = self._references.reference_of
        try:
            with executing(self._index), self._in_closure(closure) as begin:
                function, args, kwargs = loads(payload, self._resources.resolve)
                begin()
                value = function(*args, **kwargs)

                def pack(part: Any) -> bytes:
                    return dumps(part, reference_of)

                try:
                    packed = NONE if value is None else pack(value)
                    return closure, packed, None
                except Exception as error:
                    raise_explained({f"what {name} returned": value}, pack, error)
        except KeyboardInterrupt:  # ends the job, and is no error of the closure
            raise
        except BaseException as error:
            return closure, None, pack_error(error, reference_of)

    def _send_outcomes(self, now: float) -> None:
        """Send the collected outcomes to the chief. Called by: a thread that holds `_sending`.

        Args: now: the time, in seconds of `time.perf_counter`.
        """
        if self._outcomes:
            self._rpc.notify(self._chief, OUTCOMES, (self._outcomes, self._seconds))
        self._outcomes = []
        self._seconds = 0.0
        self._sent = now

    def _keep_returning(self) -> None:
        try:
            self._return_what_waits()
        except Exception as error:  # no other code would report it, and closures may be lost
            from mpistrat.liveness.ending.job_end import job_end  # here, because it starts MPI

            who = self._rpc.name_of(self._rpc.rank)
            what = f"{type(error).__name__}: {error}"
            job_end().end_job(f"ending the job: {who} cannot take closures any more: {what}", 1)

    def _return_what_waits(self) -> None:
        """When a closure has run for 50 ms, send earlier results, and give waiting closures back to the chief.

        Other workers then execute the closures that the chief has got back. Called by: the worker's own second thread,
        until the worker ends.
        """
        while True:
            self._busy.wait()
            if self._is_sent():
                time.sleep(SECONDS_TO_KEEP)
            else:  # a full pipe takes the rest of a message only while a thread of this rank reads
                self._rpc.run_until(self._is_sent, SECONDS_TO_KEEP)
            if self._ending:
                return
            now = time.perf_counter()
            if not self._busy.is_set() or now - self._begun < SECONDS_TO_KEEP:
                continue
            # The chief may have sent more closures that no thread has read.
            self._rpc.run_until(lambda: False, _SECONDS_TO_READ)
            back: list[int] = []
            while closure := _try(self._waiting.pop):
                back.append(closure[0])
            with self._sending:
                self._send_outcomes(now)
            if back:
                self._rpc.notify(self._chief, RETURNED, back[::-1])

    def _is_sent(self) -> bool:
        return not self._rpc.channel.unsent((self._chief,))


def _try(pop: Callable[[], _Arrived]) -> _Arrived | None:
    """Return the result of `pop`; None if the other thread has taken the last closure."""
    try:
        return pop()
    except IndexError:
        return None


NONE = dumps(None, lambda value: None)


_worker: contextvars.ContextVar[int | None] = contextvars.ContextVar("worker", default=None)


@contextlib.contextmanager
def executing(worker: int) -> Iterator[None]:
    """Inside, `experimental_get_current_worker_index()` returns this worker's index.

    Called by: the worker, around each closure.
    """
    token = _worker.set(worker)
    try:
        yield
    finally:
        _worker.reset(token)


def experimental_get_current_worker_index() -> int:
    """Return the index, from 0, of the worker that executes the calling function.

    Raises: RuntimeError outside scheduled functions and dataset functions.

    Example, on several ranks::

        def make_loader():  # each worker calls it
            seed = ms.coordinator.experimental_get_current_worker_index()
            generator = torch.Generator().manual_seed(seed)
            return torch.utils.data.DataLoader(dataset, shuffle=True, generator=generator)
        per_worker = coordinator.create_per_worker_dataset(make_loader)
    """
    worker = _worker.get()
    if worker is None:
        raise RuntimeError(
            "experimental_get_current_worker_index was called outside a function that ClusterCoordinator.schedule sent "
            "to a worker, and outside a dataset function of create_per_worker_dataset"
        )
    return worker


def seed_for_worker(worker: int) -> None:
    """Seed the random generators of Python, NumPy and torch with their own next number and the worker's index.

    So a script that seeds them draws the same numbers in each run, and different numbers on each worker, like the
    workers of a DataLoader. Torch is seeded only if the program has imported it.
    """
    random.seed(random.getrandbits(64) + worker)
    np.random.seed([np.random.randint(1 << 31), worker])
    if "torch" in sys.modules:
        import torch

        drawn = torch.empty((), dtype=torch.int64, device="cpu").random_()
        torch.manual_seed(int(drawn) + worker)
