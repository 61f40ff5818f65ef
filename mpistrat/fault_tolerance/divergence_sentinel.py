"""Notices when mirrored parameters, buffers, optimizer states or variables differ between ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mpistrat.communicators import reducing
from mpistrat.communicators.contract.joint_errors import mark_raised_by_all
from mpistrat.context import cross_replica, require_cross_replica
from mpistrat.pytorch.watch.divergence_report import Digested, find_divergence
from mpistrat.pytorch.watch.keys import Key
from mpistrat.pytorch.watch.mirrored_state import mirrored_state

if TYPE_CHECKING:
    from mpistrat.strategy import Strategy

# With this digest from one rank, the MAX over ranks shows a difference, whatever digests the other ranks have.
_DIFFERENT_HERE = (np.iinfo(np.int32).max,) * 4


class DivergenceSentinel:
    """Compares the mirrored state bit for bit, at every `every`-th `backward()` that reduces gradients.

    Made by: every rank, at the same place in the program.
    Context: cross-replica or top level.

    The mirrored state is everything that the strategy keeps equal on all replicas: parameters, buffers, the state and
    hyperparameters of optimizers that step inside `run`, and mirrored variables. Buffers that were written since the
    last reduction of gradients are left out, because the next reduction averages them. A NaN equals a NaN of the same
    bits. A digest of 16 bytes is sent with a message before gradients are reduced; more is sent only if digests differ.
    A program that does not call `backward()` calls `check`.

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
        self._digested: dict[Key, Digested] = {}
        self._last_equal = "this is the first comparison"
        communicator = strategy.extended.communicator
        by_rank = communicator.all_gather_object(every, label="DivergenceSentinel(every=…)")
        if {*map(type, by_rank)} != {int} or len({*by_rank}) > 1 or every < 1:
            error = ValueError(
                f"DivergenceSentinel(every={every!r}) on rank {communicator.rank}: expected the same number, from 1 "
                f"on, on all ranks; by rank they gave {by_rank!r:.200}"
            )
            mark_raised_by_all(error)
            raise error
        if strategy.num_replicas_in_sync > 1:
            strategy.extended.modules.piggybacks.append(self)

    def check(self) -> None:
        """Compare the mirrored state now.

        Called by: every rank.   Context: cross-replica or top level.
        Raises: `errors.DivergenceError` on all ranks, if parameters, buffers, optimizer states or variables differ.
        """
        communicator = self._strategy.extended.communicator
        with cross_replica(self._strategy, "DivergenceSentinel.check"):
            with communicator.raising_together():
                words = self._digest_words()
            communicator.all_reduce(words, reducing("max", "digest of what is mirrored"))
            self._judge(words, f"at a check after {self._calls} calls of backward()")

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
        due = (self._calls + 1) % self._every == 0
        return self._digest_words() if due else np.empty(0, np.int32)

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

    def _digest_words(self) -> np.ndarray:
        """Return the digest of the mirrored state, int32[4]: two words of 31 bits, each followed by its negative.

        A MAX over the ranks gives the largest word, and minus the smallest word. So the two differ only in sign if all
        ranks have the same digest. All four words are the largest int32 if this rank's own replicas differ.
        """
        import hashlib  # imported here, so that `import mpistrat` stays fast

        state = mirrored_state(self._strategy)
        self._digested = {key: Digested.of(thing) for key, thing in state.items()}
        if max((len(set(thing.digests)) for thing in self._digested.values()), default=0) > 1:
            return np.array(_DIFFERENT_HERE, np.int32)
        firsts = [(key, thing.digests[0]) for key, thing in self._digested.items()]
        hashed = hashlib.blake2b(repr(firsts).encode(), digest_size=8).digest()
        first, second = np.frombuffer(hashed, np.int32) & np.int32(0x7FFFFFFF)
        return np.array([first, -first, second, -second], np.int32)

    def _judge(self, greatest: np.ndarray, when: str) -> None:
        digested = self._digested
        self._digested = {}
        if (greatest[::2] != -greatest[1::2]).any():
            error = find_divergence(self._strategy, digested, f"{when}; {self._last_equal}")
            if error is not None:
                mark_raised_by_all(error)
                raise error
        self._last_equal = f"all was equal {when}"
