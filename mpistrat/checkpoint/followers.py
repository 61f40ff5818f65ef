"""Restores a checkpoint on followers: with parameter servers, workers that do not read the checkpoint files.

One worker reads the files, and writes the values of variables to the servers. All other states, such as a scheduler's,
exist on each worker. The reader sends them to the followers, and each follower loads a copy.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping
from typing import Any

from mpistrat.arrays import is_module
from mpistrat.checkpoint.checkpoint import RANDOM, Checkpoint
from mpistrat.checkpoint.object_states import has_common_state
from mpistrat.checkpoint.random_states import RandomStates
from mpistrat.checkpoint.replica_states import state_of_some_rank
from mpistrat.variables.variable import Variable


def states_for_followers(checkpoint: Checkpoint, stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return a deep copy of the states that followers load, by object name, without the values that servers keep.

    The result includes one rank's random states. Followers derive their own seeds from these.

    Called by: the worker that reads, before it loads `stored`, because objects may change the states that they load.
    Args:
        stored: a state as `Checkpoint.load_state_dict` takes it.
    """
    states = {}
    common = stored["common"]
    for name, value in checkpoint.objects.items():
        if has_common_state(value) and name in common:
            rest = _beside_servers(value, common[name])
            if rest is not None:
                states[name] = rest
    rank = checkpoint.strategy.extended.communicator.rank
    of_rank = state_of_some_rank(stored["ranks"], rank)
    if RANDOM in checkpoint.objects and RANDOM in of_rank:
        states[RANDOM] = of_rank[RANDOM]
    return copy.deepcopy(states)  # objects may take their states apart


def load_as_follower(checkpoint: Checkpoint, states: Mapping[str, Any]) -> None:
    """Load `states` on a worker that follows. Objects that are not in `states` stay as they are.

    The worker's random generators get seeds of their own, derived from the saved states and its number.

    Args:
        states: the result of `states_for_followers`, by object name.
    """
    extended = checkpoint.strategy.extended
    with extended.checkpoints.already_written():
        for name, value in checkpoint.objects.items():
            if name not in states:
                continue
            if isinstance(value, RandomStates):
                _, worker = extended.input.pipelines
                value.draw_anew(states[name], worker * extended.num_local_replicas)
            elif is_module(value):
                value.load_state_dict(states[name], strict=False)
            else:
                value.load_state_dict(states[name])
    after_restore(checkpoint)


def after_restore(checkpoint: Checkpoint) -> None:
    """Tell the strategy's modules that the checkpoint's objects have been restored.

    With parameter servers, the rank that makes variables then sends the loaded values to the servers, and other workers
    read them from there. Other strategies do nothing.
    """
    mirroring = checkpoint.strategy.extended.modules.made
    if mirroring is not None:
        mirroring.after_restore(checkpoint.objects.values())


def _beside_servers(value: Any, state: Any) -> Any:
    """Return an object's state without the entries that parameter servers keep; None if nothing is left."""
    if isinstance(value, Variable):
        return None
    if is_module(value):
        on_servers = dict(value.named_parameters(remove_duplicate=False))
        on_servers |= value.named_buffers(remove_duplicate=False)
        return {name: entry for name, entry in state.items() if name not in on_servers} or None
    if "torch" in sys.modules:
        from torch.optim import Optimizer

        from mpistrat.pytorch.modules.strategy_modules import strategy_of

        if isinstance(value, Optimizer) and strategy_of(value) is not None:
            return {**state, "state": {}}
    return state
