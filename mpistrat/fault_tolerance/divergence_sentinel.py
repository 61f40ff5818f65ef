"""Notices when mirrored parameters, buffers, optimizer states or variables differ between ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mpistrat.communicators.contract.joint_errors import mark_raised_by_all
from mpistrat.context import cross_replica, require_cross_replica
from mpistrat.pytorch.watch.divergence_report import StateComparison
from mpistrat.pytorch.watch.mirrored_state import mirrored_state

if TYPE_CHECKING:
    from mpistrat.strategy import Strategy


class DivergenceSentinel:
    """Compares the mirrored state bit for bit, at every `every`-th `backward()` that reduces gradients.

    Made by: every rank, at the same place in the program.
    Context: cross-replica or top level.

    The mirrored state is everything that the strategy keeps equal on all replicas: parameters, buffers, the state and
    hyperparameters of optimizers that step inside `run`, the state of schedulers and gradient scalers that have stepped
    there, and mirrored variables. Buffers that were written since the last reduction of gradients are left out, because
    the next reduction averages them. A NaN equals a NaN of the same bits. A digest of 16 bytes is sent with a message
    before gradients are reduced; more is sent only if digests differ. A program that does not call `backward()` calls
    `check`.

    Args:
        strategy: the strategy whose mirrored state is compared.
        every: number of calls of `backward()` from one comparison to the next; the same on all ranks.
    Raises:
        ValueError: on all ranks, if `every` is no int from 1 on, or differs between ranks.
        DivergenceError: on all ranks, by a later `backward()` that finds a difference; it leaves `.grad` as it was.

    Example:
        >>> with ms.MirroredStrategy(["cpu:0", "cpu:1"]).scope() as strategy:
        ...     count, sentinel = ms.Variable(0), ms.fault_tolerance.DivergenceSentinel(strategy, every=100)
        >>> ids = strategy.run(lambda: count.assign(ms.get_replica_context().replica_id_in_sync_group))
        >>> sentinel.check()  # the replicas have set their copies to 0 and to 1
        Traceback (most recent call last):
        mpistrat.errors.DivergenceError: variable 'Variable' is not the same any more on all ranks ...
    """

    def __init__(self, strategy: Strategy, every: int = 100) -> None:
        require_cross_replica(strategy, "DivergenceSentinel")
        self._strategy = strategy
        self._every = every
        self._calls = 0  # number of calls of backward()
        self._comparison: StateComparison | None = None
        self._last_equal = "this is the first comparison"
        communicator = strategy.extended.communicator
        by_rank = communicator.all_gather_object(every, label="DivergenceSentinel(every=…)")
        kinds = {type(number) for number in by_rank}
        if kinds != {int} or len({*by_rank}) > 1 or every < 1:
            error = ValueError(
                f"DivergenceSentinel(every={every!r}) on rank {communicator.rank}: expected the same number, from 1 "
                f"on, on all ranks; by rank they gave {by_rank!r:.200}"
            )
            mark_raised_by_all(error)
            raise error
        if strategy.num_replicas_in_sync > 1:
            strategy.extended.modules.parts.piggybacks.append(self)

    def check(self) -> None:
        """Compare the mirrored state now.

        Called by: every rank.   Context: cross-replica or top level.
        Raises: `errors.DivergenceError` on all ranks, if parameters, buffers, optimizer states or variables differ.
        """
        communicator = self._strategy.extended.communicator
        with cross_replica(self._strategy, "DivergenceSentinel.check"):
            with communicator.raising_together():
                comparison = self._compare()
            self._judge(
                comparison.exchange(), f"at a check after {self._calls} calls of backward()"
            )

    def words(self) -> np.ndarray:
        """Return the digest, int32[4], at every `every`-th `backward()`; at other calls an empty array, int32[0].

        Called by: each reduction of gradients, which sends the words along and takes their maxima over all ranks.

        Example:
            >>> sentinel = ms.fault_tolerance.DivergenceSentinel(ms.OneDeviceStrategy("cpu"), every=2)
            >>> sentinel.words()  # the first backward() compares nothing
            array([], dtype=int32)
            >>> sentinel.received(sentinel.words())
            >>> sentinel.words().shape  # the second backward() sends the digest
            (4,)
        """
        if (self._calls + 1) % self._every == 0:
            return self._compare().words
        return np.empty(0, np.int32)

    def received(self, greatest: np.ndarray) -> None:
        """Count a call of `backward()`, and compare the digests if `words` has given one.

        Called by: the end of each reduction of gradients. Calls are counted here, because all ranks come here or none.
        Args:
            greatest: maxima of all ranks' words, int32[4] or int32[0].
        Raises: `errors.DivergenceError` on all ranks, if the digests differ.
        """
        self._calls += 1
        if len(greatest):
            self._judge(greatest, f"in call {self._calls} of backward()")

    def _compare(self) -> StateComparison:
        communicator = self._strategy.extended.communicator
        comparison = StateComparison(communicator, mirrored_state(self._strategy))
        self._comparison = comparison
        return comparison

    def _judge(self, greatest: np.ndarray, when: str) -> None:
        comparison = self._comparison
        self._comparison = None
        if comparison is not None:
            error = comparison.divergence(greatest, f"{when}; {self._last_equal}")
            if error is not None:
                raise error
        self._last_equal = f"all was equal {when}"
