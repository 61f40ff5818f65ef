"""A strategy's methods about ranks: this rank's number, and collective work of all ranks."""

from __future__ import annotations

import contextlib
import pickle
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from mpistrat.communicators import Communicator
from mpistrat.communicators.contract.joint_errors import is_raised_by_all, mark_raised_by_all
from mpistrat.context import current_local_replica, current_mode, require_cross_replica

if TYPE_CHECKING:
    import torch

    from mpistrat.replicas.strategy_extended import StrategyExtended

# Seconds that ranks wait for one rank's work alone, such as a download, unless MPISTRAT_STALL_SECONDS is set.
_SECONDS_ALONE = 86_400.0


class RankMethods:
    """This process's place among the ranks of its strategy, and collective work of these ranks.

    These are the ranks that the strategy combines: all ranks of the job; with `MirroredStrategy`, the ranks of this
    node; with `OneDeviceStrategy`, this rank alone. With parameter servers, they are the chief and then the workers.
    These do not wait for each other, so methods that every rank must call raise NotImplementedError with servers.
    """

    _extended: StrategyExtended

    @property
    def rank(self) -> int:
        """This process's number among the ranks that the strategy combines, 0 <= rank < world_size.

        With parameter servers it counts the chief and the workers, in this order.

        Example:
            >>> strategy = ms.OneDeviceStrategy("cpu")
            >>> strategy.rank, strategy.world_size, strategy.local_rank, strategy.is_first
            (0, 1, 0, True)
        """
        return self._extended.topology.rank

    @property
    def world_size(self) -> int:
        """The number of ranks. A rank has one replica or several: see `num_replicas_in_sync`."""
        return self._extended.topology.size

    @property
    def local_rank(self) -> int:
        """This rank's number among the ranks of its node, like torchrun's LOCAL_RANK."""
        return self._extended.topology.local_rank

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0. Rank 0 logs, and saves everything that a `Checkpoint` does not save."""
        return self.rank == 0

    @property
    def device(self) -> torch.device | str:
        """This replica's device; outside `run`, the device of this rank's first replica.

        A `torch.device` to use as in `tensor.to(strategy.device)`, or its name if torch is not imported.

        Example:
            >>> strategy = ms.OneDeviceStrategy("cpu")
            >>> torch.zeros(2).to(strategy.device).device
            device(type='cpu')
        """
        name = self._extended.replicas.devices[current_local_replica() or 0]
        torch = sys.modules.get("torch")
        if torch is None:
            return name
        # The number in "cpu:1" is a replica's. A tensor's device is "cpu" without a number.
        return torch.device("cpu" if name.startswith("cpu:") else name)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Call `print(*args, **kwargs)` on rank 0, there for the first replica only; do nothing elsewhere.

        Example:
            >>> strategy = ms.OneDeviceStrategy("cpu")
            >>> strategy.print("loss:", 0.5)
            loss: 0.5
        """
        if self.is_first and not current_local_replica():
            print(*args, **kwargs)

    def barrier(self) -> None:
        """Wait until every rank has called this method. Inside `run`, every replica calls it."""

        def wait(communicator: Communicator) -> None:
            communicator.barrier(label="barrier()")

        self._together("barrier", wait)

    def broadcast_object(self, value: Any = None) -> Any:
        """Return rank 0's `value` on every rank. The `value` of other ranks is ignored.

        Called by: every rank; inside `run`, every replica, and replica 0's value counts.
        Args: value: on rank 0, any object that can be pickled.
        Raises: CollectiveMismatchError, on all ranks, if rank 0's `value` cannot be pickled.

        Example:
            >>> strategy = ms.OneDeviceStrategy("cpu")
            >>> strategy.broadcast_object({"learning rate": 0.1})
            {'learning rate': 0.1}
            >>> strategy.barrier()
        """

        def broadcast(communicator: Communicator) -> Any:
            if communicator.size == 1:
                return value
            with communicator.raising_together():
                pickled = pickle.dumps(value) if communicator.rank == 0 else b""
            pickled = communicator.broadcast_object(pickled, label="broadcast_object()")
            return value if communicator.rank == 0 else pickle.loads(pickled)

        return self._together("broadcast_object", broadcast)

    @contextlib.contextmanager
    def first_rank_first(self, *, per_node: bool = False) -> Iterator[None]:
        """A context whose block rank 0 runs before the other ranks, so that they find the files that it has downloaded.

        The other ranks wait for at most a day, or for `MPISTRAT_STALL_SECONDS` seconds if it is set.

        Called by: every rank; outside `run` where a rank has several replicas. The block must not wait for other ranks.
        Args:
            per_node: let the first rank of each node go before the other ranks of its node: for files on the node's own
                disk.
        Raises:
            RuntimeError: on the other ranks, before their block, if the block fails on a rank that goes first.
            RuntimeError: inside `run`, if this rank has several replicas.

        Example:
            >>> import os
            >>> with ms.OneDeviceStrategy("cpu").first_rank_first():
            ...     if not os.path.exists("data.npy"):  # on rank 0; the other ranks find the file
            ...         np.save("data.npy", np.arange(3))
            >>> np.load("data.npy")
            array([0, 1, 2])
        """
        if self._extended.num_local_replicas > 1 and current_local_replica() is not None:
            raise RuntimeError(
                f"first_rank_first was called inside run on rank {self.rank}, whose replicas take turns: none of them "
                "could wait for the first rank while the others run. Call it outside run"
            )
        goes_first = self.local_rank == 0 if per_node else self.is_first
        if goes_first:
            try:
                yield
            except (Exception, SystemExit) as error:
                if not is_raised_by_all(error):
                    self._hear_of_first(f"{type(error).__name__}: {error}")
                    mark_raised_by_all(error)
                raise
        failures = self._hear_of_first(None)
        for rank, failure in enumerate(failures):
            if failure is not None:
                reaction = "has left" if goes_first else "does not enter"
                raise RuntimeError(
                    f"rank {rank} failed in the block of first_rank_first, which rank {self.rank} "
                    f"{reaction}: {failure}"
                )
        if not goes_first:
            yield

    def _hear_of_first(self, failure: str | None) -> list[str | None]:
        """Wait until every rank has called this. Returns: the argument `failure` of each rank, in rank order.

        Called by: `first_rank_first`, when the ranks that go first have left its block; it waits for at most a day.
        Args: failure: the type and text of the error that has ended this rank's block; None without an error.
        """

        def gather(communicator: Communicator) -> list[str | None]:
            watch = communicator.contract.watch
            time_limit = watch.waiting(_SECONDS_ALONE) if watch else contextlib.nullcontext()
            with time_limit:
                return communicator.all_gather_object(
                    failure,
                    label="the end of first_rank_first's block, which must not wait for other ranks",
                )

        return self._together("first_rank_first", gather)

    def _together(self, call: str, work: Callable[[Communicator], Any]) -> Any:
        """Call `work`, a collective of all ranks, once per rank. Returns: its result, to every replica of the rank.

        Called by: every rank; inside `run`, every replica.
        Args:
            call: name of the method, for messages.
            work: the collective; it gets the communicator of the ranks.
        Raises: NotImplementedError with parameter servers.
        """
        communicator = self._extended.communicator
        if communicator.size < self.world_size:
            raise NotImplementedError(
                f"{call} is for ranks that work in step, and the ranks of a {type(self).__name__} do not wait for each "
                "other. Let the chief do the work before it schedules functions, or let worker 0 do it alone"
            )
        strategy = self._extended.strategy
        mode = current_mode()
        if mode.strategy is not strategy or mode.replica_context is None:
            require_cross_replica(strategy, call)
            return work(communicator)

        def merge(strategy: Any) -> Callable[[], Any]:
            result = work(communicator)
            return lambda: result  # a function is one leaf, whatever the result is

        return mode.replica_context.merge_call(merge)()
