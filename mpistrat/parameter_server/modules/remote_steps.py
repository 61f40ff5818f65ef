"""Optimizers of parameters that are on servers: a step sends the gradients there, with the numbers of the param groups.

The optimizer's state is on the servers, too: `state_dict()` reads it there.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from mpistrat.communicators.host_views import as_buffer_of, view_of
from mpistrat.context import current_mode
from mpistrat.indexed_slices import IndexedSlices
from mpistrat.parameter_server.client import Change, Client
from mpistrat.parameter_server.modules.remote_tensor import RemoteTensor
from mpistrat.parameter_server.optimizer_steps import Step
from mpistrat.parameter_server.server_optimizers import (
    OptimizerRecipe,
    State,
    hyperparameters,
    join_states,
    split_state,
)
from mpistrat.parameter_server.staleness import WorkerClock
from mpistrat.pytorch import optimizers

_installed = False
_remote: WeakIdKeyDictionary = WeakIdKeyDictionary()  # by parameter: (RemoteTensor, RemoteSteps)


def install() -> None:
    """Register the hook, once per process."""
    global _installed
    if not _installed:
        _installed = True
        optimizers.install()  # whose hook comes first: it hides the gradients of all replicas but the first
        register_optimizer_step_pre_hook(_before_step)


def serve(parameter: torch.Tensor, remote: RemoteTensor, steps: RemoteSteps) -> None:
    """From now on steps of `parameter` are the servers'."""
    _remote[parameter] = remote, steps


def has_remote_parameters(optimizer: Optimizer) -> bool:
    return any(p in _remote for group in optimizer.param_groups for p in group["params"])


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    """What to call `step` with instead, or None. `args` begin with the optimizer itself."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    elsewhere = [p for p in parameters if p not in _remote]
    if len(elsewhere) == len(parameters) and not _inside_run():
        return None
    for parameter in elsewhere:
        if parameter.requires_grad:
            raise RuntimeError(
                f"optimizer.step(): a parameter of shape {list(parameter.shape)} is not on the servers. Build the "
                "module inside strategy.scope(), or call strategy.mirror(module); a lazy module needs one run of its "
                "forward before the first step"
            )
    remote = next((_remote[p] for p in parameters if p in _remote), None)
    if remote is None:
        return None
    if kwargs.get("closure") is not None or any(callable(one) for one in args[1:]):
        raise RuntimeError(
            "optimizer.step(closure): servers step with a gradient alone; call backward() and then step()"
        )
    remote[1].step(optimizer)
    return (_with_nothing_to_step(optimizer), *args[1:]), kwargs


def _inside_run() -> bool:
    mode = current_mode()
    mirroring = mode.strategy.extended.modules.made
    return mode.replica_context is not None and mirroring is not None and mirroring.serves


def _with_nothing_to_step(optimizer: Optimizer) -> Optimizer:
    """A twin without parameters: what else `step` does to the optimizer, it does."""
    twin: Optimizer = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    twin.param_groups = [{**group, "params": []} for group in optimizer.param_groups]
    return twin


class RemoteSteps:
    """The steps of all optimizers over the parameters that one strategy has on servers.

    Args:
        client, owns, clock: as of `RemoteModules`.
        rule: tells whether the gradients of workers are combined to their "sum" or "mean".
    """

    def __init__(
        self,
        client: Client,
        owns: bool,
        clock: WorkerClock | None,
        rule: Callable[[], str] = lambda: "sum",
    ) -> None:
        self.client, self.owns = client, owns
        self._clock, self._rule = clock, rule
        self._numbers = itertools.count()  # equal on all workers, whose programs are the same
        self._optimizers: weakref.WeakKeyDictionary[Optimizer, RemoteOptimizer] = (
            weakref.WeakKeyDictionary()
        )

    def step(self, optimizer: Optimizer) -> None:
        """Have the servers step by the gradients that are there."""
        mean = self._rule() == "mean"
        remote = self.of(optimizer)
        now = None if self._clock is None else self._clock.round_to_send_in()
        changes = []
        for group in optimizer.param_groups:
            step = Step(remote.number, hyperparameters(group), now, mean)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    changes += _changes(parameter, step)
        if changes:
            self.client.change(changes)

    def of(self, optimizer: Optimizer) -> RemoteOptimizer:
        """The optimizer's like on the servers: it is made, and given the state that was loaded here, if need be."""
        remote = self._optimizers.get(optimizer)
        if remote is None:
            remote = self._optimizers[optimizer] = self._new(optimizer)
        remote.make_sure(optimizer)
        return remote

    def _new(self, optimizer: Optimizer) -> RemoteOptimizer:
        return RemoteOptimizer(optimizer, next(self._numbers), self)


def _changes(parameter: torch.Tensor, step: Step) -> list[Change]:
    gradient = parameter.grad
    assert gradient is not None
    remote: RemoteTensor = _remote[parameter][0]
    if not gradient.is_sparse:
        return [Change(address, step, part) for address, part in remote.pieces(gradient.detach())]
    gradient = gradient.detach().coalesce()
    indices, values = gradient.indices()[0], gradient.values()
    # Parts without any of the rows get a step, too: all count the same steps.
    return [
        Change(address, step, IndexedSlices(values[part], indices[part] - first))
        for address, first, part in remote.by_part(indices)
    ]


class RemoteOptimizer:
    """One optimizer of this rank, and its like on the servers."""

    def __init__(self, optimizer: Optimizer, number: int, steps: RemoteSteps) -> None:
        self.number = number
        self._client, self._owns = steps.client, steps.owns
        self._made: WeakIdKeyDictionary = WeakIdKeyDictionary()
        fetch, drop = _hooks(weakref.ref(self))
        optimizer.register_state_dict_pre_hook(fetch)
        optimizer.register_state_dict_post_hook(drop)

    def make_sure(self, optimizer: Optimizer) -> None:
        """The servers keep state for all parameters, the state that was loaded here if there is some."""
        for group in optimizer.param_groups:
            new = [p for p in group["params"] if p in _remote and p not in self._made]
            if not new:
                continue
            recipe = OptimizerRecipe.of(optimizer, group)
            remote: list[RemoteTensor] = [_remote[p][0] for p in new]
            arrays = [(address, one.split) for one in remote for address in one.addresses]
            self._client.make_optimizer(self.number, recipe, arrays)
            for parameter, one in zip(new, remote, strict=True):
                self._made[parameter] = one
        if optimizer.state:
            for parameter, state in list(optimizer.state.items()):
                if parameter in self._made:
                    if self._owns:
                        self._load(parameter, state)
                    del optimizer.state[parameter]

    def made_by_another(self, optimizer: Optimizer) -> None:
        """Another rank has had the servers make it for all parameters."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter in _remote:
                    self._made[parameter] = _remote[parameter][0]

    def _load(self, parameter: torch.Tensor, state: dict[str, Any]) -> None:
        given: State = {
            name: view_of(value.detach().cpu()) if isinstance(value, torch.Tensor) else value
            for name, value in state.items()
        }
        remote: RemoteTensor = self._made[parameter]
        parts = split_state(given, remote.rows) if remote.split else [given]
        for address, part in zip(remote.addresses, parts, strict=True):
            self._client.load_optimizer_state(self.number, address, part)

    def fetch(self, optimizer: Optimizer) -> None:
        """Put the servers' state into the optimizer's."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                remote: RemoteTensor | None = self._made.get(parameter)
                if remote is None or parameter in optimizer.state:
                    continue
                states = [
                    self._client.optimizer_state(self.number, one) for one in remote.addresses
                ]
                state = join_states(states) if remote.split else states[0]
                if state:
                    layout = view_of(torch.empty(0, dtype=parameter.dtype)).dtype
                    optimizer.state[parameter] = {
                        name: _as_torch(value, parameter, layout) for name, value in state.items()
                    }

    def drop(self, optimizer: Optimizer) -> None:
        """The servers have it."""
        for parameter in self._made:
            optimizer.state.pop(parameter, None)


def _as_torch(value: Any, parameter: torch.Tensor, layout: np.dtype[Any]) -> Any:
    if not isinstance(value, np.ndarray):
        return value
    if value.dtype == layout:
        return as_buffer_of(parameter, value).to(parameter.device)
    tensor = torch.from_numpy(value)
    return tensor.to(parameter.device) if value.ndim else tensor


def _hooks(remote: weakref.ref[RemoteOptimizer]) -> Any:
    def fetch(optimizer: Optimizer) -> None:
        target = remote()
        if target is not None:
            target.fetch(optimizer)

    def drop(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        target = remote()
        if target is not None:
            target.drop(optimizer)

    return fetch, drop
