"""What a program asks its strategy: which rank this is, and what the ranks do together."""

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

# Others wait so long for what one rank does alone, such as a download, unless MPISTRAT_STALL_SECONDS is set.
_SECONDS_ALONE = 86_400.0


class RankMethods:
    """This process's place among the ranks of its strategy, and what they do together.

    The ranks are those that the strategy combines: all of the job, those of a node with `MirroredStrategy`, this one
    alone with `OneDeviceStrategy`. With parameter servers they are the chief, then the workers. These do not wait for
    each other, so methods that every rank must call raise NotImplementedError there.
    """

    _extended: StrategyExtended

    @property
    def rank(self) -> int:
        """This process's number among the ranks that the strategy combines, 0 <= rank < world_size.

        With parameter servers it counts the chief and the workers, in this order.
        """
        return self._extended.topology.rank

    @property
    def world_size(self) -> int:
        """How many ranks there are; each has one replica or several: see `num_replicas_in_sync`."""
        return self._extended.topology.size

    @property
    def local_rank(self) -> int:
        """This rank's number among those of its node, as torchrun's LOCAL_RANK."""
        return self._extended.topology.local_rank

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0: the one that logs, and that saves what a `Checkpoint` does not."""
        return self.rank == 0

    @property
    def device(self) -> torch.device | str:
        """The device of this replica; outside `run`, of this rank's first: `tensor.to(strategy.device)`.

        A `torch.device`, or its name where torch is not imported.
        """
        name = self._extended.replicas.devices[current_local_replica() or 0]
        torch = sys.modules.get("torch")
        if torch is None:
            return name
        # Tensors have no numbers of CPUs, which are those of replicas.
        return torch.device("cpu" if name.startswith("cpu:") else name)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """`print(*args, **kwargs)` on rank 0, of the replicas that run there the first; nothing elsewhere."""
        if self.is_first and not current_local_replica():
            print(*args, **kwargs)

    def barrier(self) -> None:
        """Return once every rank has called it. Inside `run`, every replica calls it."""
        self._together("barrier", lambda communicator: communicator.barrier(label="barrier()"))

    def broadcast_object(self, value: Any = None) -> Any:
        """Rank 0's `value`, any picklable object, on every rank; the others' does not matter.

        Called by: every rank; inside `run`, by every replica, and replica 0's value counts.
        Raises: CollectiveMismatchError: on all ranks, when rank 0's cannot be pickled.
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
        """Rank 0 runs the block before the others do: they find what it has downloaded or prepared.

        They wait for a day at most, or as long as `MPISTRAT_STALL_SECONDS` says, if it is set.

        Called by: every rank; outside `run` where a rank has several replicas. The block must not wait for other ranks.
        Args:
            per_node: the first rank of each node goes before the others of its node: for files on the node's own disk.
        Raises:
            RuntimeError: on the other ranks, before their block, where it fails on a rank that goes first.
        """
        if self._extended.num_local_replicas > 1 and current_local_replica() is not None:
            raise RuntimeError(
                f"first_rank_first was called inside run on rank {self.rank}, whose replicas take turns: none of them "
                "could wait for the first rank while the others run. Call it outside run"
            )
        goes_first = (self.local_rank if per_node else self.rank) == 0
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
                raise RuntimeError(
                    f"rank {rank} failed in the block of first_rank_first, which rank {self.rank} "
                    f"{'has left' if goes_first else 'does not enter'}: {failure}"
                )
        if not goes_first:
            yield

    def _hear_of_first(self, failure: str | None) -> list[str | None]:
        """What went wrong in the block on the ranks that go first, in rank order. Called by: every rank."""

        def gather(communicator: Communicator) -> list[str | None]:
            watch = communicator.contract.watch
            with watch.waiting(_SECONDS_ALONE) if watch else contextlib.nullcontext():
                return communicator.all_gather_object(
                    failure,
                    label="the end of first_rank_first's block, which must not wait for other ranks",
                )

        gathered: list[str | None] = self._together("first_rank_first", gather)
        return gathered

    def _together(self, call: str, work: Callable[[Communicator], Any]) -> Any:
        """What `work` gives, which all ranks do together; once for the replicas of a rank that come here."""
        communicator = self._extended.communicator
        if communicator.size < self.world_size:
            raise NotImplementedError(
                f"{call} is for ranks that work in step, and those of a {type(self).__name__} do not wait for each "
                "other: what is to be done once, the chief does before it schedules functions, or worker 0 alone"
            )
        strategy = self._extended.strategy
        mode = current_mode()
        if mode.strategy is not strategy or mode.replica_context is None:
            require_cross_replica(strategy, call)
            return work(communicator)

        def merge(strategy: Any) -> Callable[[], Any]:
            result = work(communicator)
            return lambda: result  # one leaf, whatever it is

        return mode.replica_context.merge_call(merge)()
