"""`Checkpoint`: the objects that are saved together, by name, and their states in memory."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from mpistrat.checkpoint.lazy_mapping import LazyMapping
from mpistrat.checkpoint.object_states import (
    check_array,
    has_common_state,
    has_state_of_rank,
    stateful,
)
from mpistrat.checkpoint.random_states import RandomStates
from mpistrat.checkpoint.replica_states import state_of_some_rank
from mpistrat.checkpoint.schema import COUNT, Schema
from mpistrat.cluster_resolver.launcher import read_claim
from mpistrat.context import get_strategy, outside_replica_block
from mpistrat.input.distributed_dataset import DistributedDataset, DistributedIterator
from mpistrat.machine.notices import tell
from mpistrat.settings import rank_pid
from mpistrat.strategy import Strategy
from mpistrat.variables.variable import Variable

_STRATEGY = "strategy"
RANDOM = "random"
_RESIDUALS = "residuals"
STEPS_OF_HANDLER = "total_run_calls"  # of a PreemptionCheckpointHandler
DIFFERING = "ranks differ"  # in a state's classes: the name of a value that differed between the ranks that saved
_NOT_OF_PROGRAM = {_STRATEGY, RANDOM, _RESIDUALS, STEPS_OF_HANDLER}


class Checkpoint:
    """The objects of a checkpoint: their states are saved and restored together.

    In a job of several ranks it is made in a strategy's `scope()`, or from at least one object of a strategy: a
    mirrored module, an optimizer of its parameters, a distributed dataset, or a variable. Rank 0 saves its value of a
    variable that was made outside any scope, and all ranks restore that value.

    Made by: every rank.
    Args:
        objects: by names of your choice, objects with `state_dict()` and `load_state_dict(state)` (torch modules,
            optimizers, schedulers, gradient scalers, distributed datasets, your own), and `mpistrat.Variable`s.
    Raises:
        TypeError: an object has no state.
        ValueError: a name is taken, or objects are of several strategies.
        RuntimeError: the job has several ranks, and no object belongs to a strategy.

    Attributes:
        objects: the objects of Args; "random", the generators of torch, Python and NumPy; "strategy", the settings of a
            deterministic job; and, with a wire format, "residuals", the parts of gradients that it holds back. A
            program may add objects, on all ranks, and may delete any.
        strategy: the strategy of the objects.

    Example:
        >>> model = ms.OneDeviceStrategy("cpu").prepare(torch.nn.Linear(2, 1))
        >>> checkpoint = ms.checkpoint.Checkpoint(model=model)
        >>> state = checkpoint.state_dict()
        >>> checkpoint.load_state_dict(state)  # without files
        >>> sorted(checkpoint.stateful_objects())
        ['model', 'random', 'strategy']

    Example:
        >>> checkpoint = ms.checkpoint.Checkpoint(counts=ms.Variable([1, 2]))
        >>> checkpoint.check_alike("save")  # raises if optimizers differ between ranks
        >>> [name for name, state in checkpoint.common_states()]
        ['strategy', 'counts']
        >>> [list(states) for states in checkpoint.rank_states()]  # the names of exchanged and of local states
        [['random'], []]
    """

    def __init__(self, **objects: Any) -> None:
        taken = objects.keys() & {_STRATEGY, RANDOM, _RESIDUALS}
        if taken:
            raise ValueError(f"Checkpoint({min(taken)}=…): that name is taken; choose another")
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
        """Return the objects by name, in a new dict. A wrapper with the methods of a state replaces each variable.

        Raises: TypeError for an object without a state; ValueError for a name that is no identifier.
        """
        found: dict[str, Any] = {}
        for name, value in self.objects.items():
            if not (isinstance(name, str) and name.isidentifier()):
                raise ValueError(
                    f"objects of a checkpoint have names such as 'model', got {name!r}"
                )
            found[name] = stateful(name, value)
        return found

    def common_states(self) -> Iterator[tuple[str, Any]]:
        """Yield (name, state) for each object with a common state: a state that is equal on all ranks.

        Called by: every rank, because some objects compute their state by a collective.
        """
        for name, value in self.stateful_objects().items():
            if has_common_state(value):
                yield name, value.state_dict()

    def rank_states(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return (exchanged, local): two dicts of this rank's own states, by object name.

        `run_elastic` sends exchanged states to other ranks. Objects with `stays_with_rank = True` have local states,
        because these are too large to be sent.
        """
        exchanged: dict[str, Any] = {}
        local: dict[str, Any] = {}
        for name, value in self.stateful_objects().items():
            if has_state_of_rank(value):
                stays = getattr(value, "stays_with_rank", False) is True
                states = local if stays else exchanged
                states[name] = value.rank_state_dict()
        return exchanged, local

    def check_alike(self, purpose: Literal["save", "restore"]) -> None:
        """Check that optimizers, schedulers and gradient scalers are alike on all ranks.

        Called by: every rank.
        Args:
            purpose: "save" or "restore"; before a "restore" only the parameters of optimizers are compared.
        Raises: ValueError on all ranks if objects differ between ranks.
        """
        if "torch" in sys.modules:
            from mpistrat.pytorch.modules.preparing import check_alike

            check_alike(self.strategy.extended, self.objects, purpose)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all objects, in memory. Arrays are not copied, unless an object's `state_dict()` does.

        Called by: every rank.
        Returns: {"common": {name: state}, "ranks": {this rank: {name: state}}, "local": {name: state}, "classes":
            {name: class}}. "common" has the states that are equal on all ranks. "ranks" has this rank's exchanged
            states, and "local" its local states; see `rank_states`. The caller may add other ranks' states to "ranks".
            "classes" has the names of the classes of optimizers, schedulers and gradient scalers.
        """
        with outside_replica_block(self.strategy):
            exchanged, local = self.rank_states()
            common = dict(self.common_states())
        rank = self.strategy.extended.communicator.rank
        classes = self._classes()
        return {"common": common, "ranks": {rank: exchanged}, "local": local, "classes": classes}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state of `state_dict`, on the same or on another number of ranks.

        Rank 0 prints the names of saved objects that the Checkpoint has not, unless the Checkpoint has no optimizer,
        scheduler, gradient scaler or distributed dataset. Rank 0 also prints both classes if an optimizer or a
        scheduler goes on from the state of another class.

        An object with the attribute `may_be_absent = True` is left alone if the checkpoint has no state of it. An
        earlier version of the program may have saved such a checkpoint. An object with `either_state_suffices = True`
        gets only its common state if the checkpoint has no state of ranks for it.

        If `state["local"]` has a state of an object, the object gets this state as this rank's, and no state from
        `state["ranks"]`.

        Called by: every rank.
        Raises: before anything is loaded, KeyError if the state of an object is missing, and ValueError on all ranks if
            an optimizer has other parameters on another rank, or if an optimizer or a scheduler cannot go on from the
            state of another class. Later, the errors of the objects. On another number of ranks, also the errors of
            `CheckpointManager.restore`.
        """
        with outside_replica_block(self.strategy):
            self.check_alike("restore")
            common = state["common"]
            ranks = state["ranks"]
            local = state.get("local", {})
            rank = self.strategy.extended.communicator.rank
            of_rank = {**state_of_some_rank(ranks, rank), **local}
            objects = self._objects_of(common, of_rank)
            for notice in self._notices(state, {*common, *of_rank}):
                if rank == 0:
                    tell(notice)
            for name, value in objects.items():
                if has_common_state(value):
                    value.load_state_dict(common[name])
            for name, value in objects.items():
                if name not in of_rank and getattr(value, "either_state_suffices", False):
                    continue
                if has_state_of_rank(value):
                    states = _of_object(ranks, name)
                    if name in local:
                        states = {rank: local[name]}
                    value.load_rank_state_dicts(states)

    def _classes(self) -> dict[str, str]:
        """Return the names of the classes of optimizers, schedulers and gradient scalers, by object name."""
        if "torch" not in sys.modules:
            return {}
        from mpistrat.pytorch.other_classes import classes_of

        return classes_of(self.objects)

    def _notices(self, state: Mapping[str, Any], saved: set[str]) -> Iterator[str]:
        """Yield a notice for each state that goes on in another class, and for a restore that leaves objects out.

        A restore for evaluation may leave objects out: it has no optimizer, scheduler, scaler or dataset.

        Args: saved: the names of the saved objects.
        Raises: ValueError for an optimizer or a scheduler that cannot go on from the state of another class.
        """
        classes = self._classes()
        for name, before in state.get("classes", {}).items():  # earlier versions saved none
            now = classes.get(name, before)
            if now == before:
                continue
            from mpistrat.pytorch.other_classes import fits

            text = f"{name!r} was saved from the class {before}, and has the class {now} now"
            if not fits(self.objects[name], before, state["common"][name]):
                raise ValueError(
                    f"{text}, which cannot go on from that state. Make it {before} again, or leave it out of the "
                    "Checkpoint"
                )
            yield f"{text}, which goes on from that state. If you do not want that, make it {before} again"
        differing = state.get("classes", {}).get(DIFFERING)
        if differing:
            yield f"the ranks differed in {differing} when they saved this checkpoint; it has rank 0's values"
        left = saved - self.objects.keys() - _NOT_OF_PROGRAM
        inputs = (DistributedDataset, DistributedIterator)
        has_input = any(isinstance(value, inputs) for value in self.objects.values())
        if left and (classes or has_input):
            yield (
                f"this restore leaves out {', '.join(sorted(left))} of the checkpoint. To go on from there, give the "
                "Checkpoint objects of these names, too"
            )

    def _objects_of(self, common: Mapping[str, Any], of_rank: Mapping[str, Any]) -> dict[str, Any]:
        """Return the objects that have a state in the checkpoint, by name. Called by: `load_state_dict`.

        Args:
            common: the saved states that are equal on all ranks, by object name.
            of_rank: the saved states of one rank, by object name: of this rank, or of the lowest rank that saved.
        Raises: KeyError for an object without a saved state, unless it has `may_be_absent = True`.
        """
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
    """Return a mapping from each rank that saved to its state of the object `name`. A look-up may read a file."""
    return LazyMapping(ranks, lambda rank: ranks[rank][name])


def _strategy_of(objects: Mapping[str, Any]) -> Strategy:
    """Return the strategy of the objects and of the scope in force; the default strategy if none has one.

    Raises: ValueError if they are of several strategies; RuntimeError if none has one and the job has several ranks.
    """
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
    if rank_pid():  # a child process: the launcher's claim is for the rank that has started it
        return 1
    return getattr(read_claim(), "size", None) or 1


def _known_strategy(value: Any) -> Any:
    if isinstance(value, (Variable, DistributedDataset, DistributedIterator)):
        return getattr(value, "strategy", None)
    if "torch" not in sys.modules:
        return None
    from mpistrat.pytorch.modules.strategy_modules import strategy_of

    return strategy_of(value)


class Residuals:
    """The state of a strategy's wire format in a checkpoint: residuals, and the buckets in which gradients are sent.

    Residuals are the values that a wire format leaves out of a message and adds to the next one. A restart without them
    would lose these parts of the gradients.

    On the same number of ranks, each rank goes on with its own residuals. On another number, rank 0 also adds the
    residuals of ranks that are gone, if residuals are of whole buffers. If a rank had residuals of a slice, or if other
    parameters are mirrored, all residuals begin at zero, and a warning says so.
    """

    may_be_absent = True  # jobs without a wire format save none
    # They are as large as the gradients: too large to be sent to other ranks after each step.
    stays_with_rank = True

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy

    def rank_state_dict(self) -> dict[str, Any]:
        """Return this rank's residuals; an empty dict if the strategy has mirrored no module."""
        mirroring = self._strategy.extended.modules.made
        return {} if mirroring is None else mirroring.reducer.held_back()

    def rank_state_schema(self, state: Mapping[str, Any]) -> Schema:
        """Return the schema of a rank's state."""
        if not state:
            return {}
        parameters = state.get("parameters")
        slot = range(len(parameters) if isinstance(parameters, list) else 0)
        return {
            "ranks": COUNT,
            "parameters": [str],
            "held_back": [{"slots": [slot], "residual": check_array}],
            "most": COUNT,
            "overlap": {"last": tuple, "expected": (tuple, None)},
        }

    def load_rank_state_dicts(self, states: Mapping[int, Any]) -> None:
        """Go on with this rank's saved residuals; rank 0 also adds the residuals of ranks that are gone.

        This does nothing if the strategy has mirrored no module, or had mirrored none when the checkpoint was saved.

        Called by: every rank.
        """
        extended = self._strategy.extended
        mirroring = extended.modules.made
        communicator = extended.communicator
        rank = communicator.rank
        size = communicator.size
        some = state_of_some_rank(states, rank)
        if mirroring is None or not some:
            return
        savers = [saver for saver in states if saver == rank or (rank == 0 and saver >= size)]
        mirroring.reducer.hold_back(some, [states[saver] for saver in savers])
