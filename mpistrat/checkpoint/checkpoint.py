"""The objects of a checkpoint, by name, and their states."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from mpistrat.checkpoint.lazy_mapping import LazyMapping
from mpistrat.checkpoint.object_states import has_common_state, has_state_of_rank, stateful
from mpistrat.checkpoint.random_states import RandomStates
from mpistrat.checkpoint.replica_states import state_of_some_rank
from mpistrat.checkpoint.residuals import Residuals
from mpistrat.cluster_resolver.launcher import read_claim
from mpistrat.context import get_strategy, outside_replica_block
from mpistrat.input.distributed_dataset import DistributedDataset, DistributedIterator
from mpistrat.settings import rank_pid
from mpistrat.variables.variable import Variable

if TYPE_CHECKING:
    from mpistrat.strategy import Strategy

_STRATEGY, RANDOM, _RESIDUALS = "strategy", "random", "residuals"


class Checkpoint:
    """The objects of a checkpoint: their states are saved and restored together.

    Made in a strategy's `scope()`, or of at least one object that is a strategy's: a mirrored module, an optimizer of
    its parameters, a distributed dataset, a variable. Rank 0 then saves variables that were made outside any scope,
    like other objects, and all ranks restore them.

    Args:
        objects: by names of your choice, objects with `state_dict()` and `load_state_dict(state)` (torch modules,
            optimizers, schedulers, gradient scalers, distributed datasets, your own), and `mpistrat.Variable`s.
    Raises:
        TypeError: an object has no state. ValueError: a name is taken, or objects are of several strategies.
        RuntimeError: the job has several ranks, and none of the objects is a strategy's.

    Attributes:
        objects: the objects of Args; "random", the generators of torch, Python and NumPy; "strategy", the settings of a
            deterministic job; and, with a wire format, "residuals", the rests that it holds back. Others may be added,
            on all ranks, and any may be deleted.
        strategy: the strategy of the objects.
    """

    def __init__(self, **objects: Any) -> None:
        for name in (_STRATEGY, RANDOM, _RESIDUALS):
            if name in objects:
                raise ValueError(f"Checkpoint({name}=…): that name is taken; choose another")
        self.strategy = _strategy_of(objects)
        self.objects: dict[str, Any] = {
            _STRATEGY: self.strategy.extended,
            **objects,
            RANDOM: RandomStates(self.strategy),
        }
        options = self.strategy.extended.cross_replica_ops.options
        if options.wire_format is not None or options.wire_dtype is not None:
            self.objects[_RESIDUALS] = Residuals(self.strategy)
        self.stateful_objects()

    def stateful_objects(self) -> dict[str, Any]:
        """`objects`, checked; an object with a state stands for each variable.

        Raises: TypeError or ValueError for objects that cannot be saved.
        """
        for name in self.objects:
            if not (isinstance(name, str) and name.isidentifier()):
                raise ValueError(
                    f"objects of a checkpoint have names such as 'model', got {name!r}"
                )
        return {name: stateful(name, value) for name, value in self.objects.items()}

    def common_states(self) -> Iterator[tuple[str, Any]]:
        """Name and common state of each object that has one. Called by: every rank."""
        for name, value in self.stateful_objects().items():
            if has_common_state(value):
                yield name, value.state_dict()

    def rank_states(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """This rank's own states, in two dictionaries by object: exchanged states, and local states.

        `run_elastic` sends the exchanged states to other ranks. Local states are too large for that: their objects have
        `stays_with_rank = True`.
        """
        exchanged: dict[str, Any] = {}
        local: dict[str, Any] = {}
        for name, value in self.stateful_objects().items():
            if has_state_of_rank(value):
                stays = getattr(value, "stays_with_rank", False) is True
                (local if stays else exchanged)[name] = value.rank_state_dict()
        return exchanged, local

    def check_alike(self, purpose: Literal["save", "restore"]) -> None:
        """Raise ValueError on all ranks where optimizers, schedulers or gradient scalers differ between ranks.

        Called by: every rank. Args: purpose: before a "restore" only the parameters of optimizers are compared.
        """
        if "torch" in sys.modules:
            from mpistrat.pytorch.modules.preparing import check_alike

            check_alike(self.strategy.extended, self.objects, purpose)

    def state_dict(self) -> dict[str, Any]:
        """The state of all objects, in memory: it shares the arrays that the objects' own `state_dict()`s share.

        Called by: every rank.
        Returns: {"common": {name: state}, "ranks": {this rank: {name: state}}, "local": {name: state}}. "common" has
            the states that are the same on all ranks. "ranks" has this rank's exchanged states, and "local" its local
            ones, as of `rank_states`. The caller may add other ranks' states to "ranks".
        """
        with outside_replica_block(self.strategy):
            exchanged, local = self.rank_states()
            common = dict(self.common_states())
        rank = self.strategy.extended.communicator.rank
        return {"common": common, "ranks": {rank: exchanged}, "local": local}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state of `state_dict`, on this or on another number of ranks. Called by: every rank.

        An object with the attribute `may_be_absent = True` is left alone where there is no state of it, as in a
        checkpoint that an earlier version of the program has saved.
        Raises: before anything is loaded, KeyError when the state of an object is missing, and ValueError on all ranks
            where an optimizer has other parameters on another rank; then the errors of the objects. On another number
            of ranks the errors are as of `CheckpointManager.restore`.
        """
        with outside_replica_block(self.strategy):
            self.check_alike("restore")
            common, ranks, local = state["common"], state["ranks"], state.get("local", {})
            rank = self.strategy.extended.communicator.rank
            objects = self._objects_of(common, {**state_of_some_rank(ranks, rank), **local})
            for name, value in objects.items():
                if has_common_state(value):
                    value.load_state_dict(common[name])
            for name, value in objects.items():
                if has_state_of_rank(value):
                    states = {rank: local[name]} if name in local else _of_object(ranks, name)
                    value.load_rank_state_dicts(states)

    def _objects_of(self, common: Mapping[str, Any], of_rank: Mapping[str, Any]) -> dict[str, Any]:
        """The objects with a state. Raises: KeyError for another object, unless it has `may_be_absent = True`."""
        found = {}
        for name, value in self.stateful_objects().items():
            known = common if has_common_state(value) else of_rank
            if name in known:
                found[name] = value
            elif getattr(self.objects[name], "may_be_absent", False) is not True:
                raise KeyError(
                    f"the checkpoint has no state of {name!r}, only of {', '.join(known)}"
                )
        return found


def _of_object(ranks: Mapping[int, Mapping[str, Any]], name: str) -> Mapping[int, Any]:
    """The states of one object, by the ranks that saved."""
    return LazyMapping(ranks, lambda rank: ranks[rank][name])


def _strategy_of(objects: Mapping[str, Any]) -> Strategy:
    """The strategy of the objects: its ranks save together. Objects made outside any strategy have none."""
    found = {name: _known_strategy(value) for name, value in objects.items()}
    found["the scope"] = get_strategy()
    known = {
        name: strategy for name, strategy in found.items() if strategy and not strategy.is_default
    }
    if len(set(known.values())) > 1:
        raise ValueError(
            "the objects of a checkpoint must be of one strategy, these are of several: "
            + ", ".join(f"{name} is of {strategy}" for name, strategy in known.items())
        )
    if known:
        return next(iter(known.values()))
    ranks = _ranks_of_job()
    if ranks > 1:
        raise RuntimeError(
            f"this job has {ranks} ranks, and the objects of this checkpoint ({', '.join(objects)}) are of no strategy "
            "that could tell which rank writes them: make the Checkpoint, or one of these, inside strategy.scope()"
        )
    return get_strategy()


def _ranks_of_job() -> int:
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized():
        return mpi.COMM_WORLD.size
    if rank_pid():  # a child: the claim is of the rank that has started it
        return 1
    return getattr(read_claim(), "size", None) or 1


def _known_strategy(value: Any) -> Any:
    if isinstance(value, (Variable, DistributedDataset, DistributedIterator)):
        return getattr(value, "strategy", None)
    if "torch" not in sys.modules:
        return None
    from mpistrat.pytorch.modules.strategy_modules import strategy_of

    return strategy_of(value)
