"""Optimizers of parameters on servers: a step sends the gradients and the hyperparameters, and the servers step.

The optimizer's state is on the servers, too, and `state_dict()` pulls it.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from mpistrat.communicators.host_views import as_buffer_of, view_of
from mpistrat.context import current_mode
from mpistrat.indexed_slices import IndexedSlices
from mpistrat.parameter_server.client.client import Change
from mpistrat.parameter_server.client.variables_on_servers import VariablesOnServers
from mpistrat.parameter_server.modules.remote_tensors import RemoteTensor, RemoteTensors
from mpistrat.parameter_server.protocol.messages import GradientMethod
from mpistrat.parameter_server.protocol.staleness import WorkerClock
from mpistrat.parameter_server.server import server_optimizers
from mpistrat.pytorch import hooks, optimizers

_remote: WeakIdKeyDictionary = WeakIdKeyDictionary()  # by parameter: (RemoteTensor, RemoteSteps)


def has_remote_parameters(optimizer: Optimizer) -> bool:
    return any(parameter in _remote for parameter in hooks.parameters_of(optimizer))


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    """Have the servers step an optimizer's parameters in place of this rank.

    Called by: torch, before `optimizer.step()`; `args` begin with the optimizer itself.
    Returns: arguments for `step`, with a copy of the optimizer without parameters in its place; None if no parameter is
        on servers: then the optimizer steps here.
    Raises: RuntimeError for a closure, if a parameter is on servers; RuntimeError for a trainable parameter that is not
        on servers, if `step` is called in a run, or other parameters of the optimizer are on servers.
    """
    parameters = hooks.parameters_of(optimizer)
    remote = [parameter for parameter in parameters if parameter in _remote]
    if not remote and not _inside_run():
        return None
    for parameter in parameters:
        if parameter not in _remote and parameter.requires_grad:
            raise RuntimeError(
                f"optimizer.step(): a parameter of shape {list(parameter.shape)} is not on the servers. Build the "
                "module inside strategy.scope(), or call strategy.mirror(module); a lazy module needs one run of its "
                "forward before the first step"
            )
    if not remote:
        return None
    if hooks.has_closure(args, kwargs):
        raise RuntimeError(
            "optimizer.step(closure): servers step with a gradient alone; call backward() and then step()"
        )
    steps: RemoteSteps
    _, steps = _remote[remote[0]]
    steps.step(optimizer)
    # The twin has no parameters to step; other effects of `step` still happen.
    twin = hooks.twin_of(optimizer, lambda _: [])
    return (twin, *args[1:]), kwargs


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    hooks.dismiss_twin(optimizer, args[0])


def _inside_run() -> bool:
    """Whether this thread runs a replica of a strategy that has its variables on servers."""
    mode = current_mode()
    if mode.replica_context is None:
        return False
    return isinstance(mode.strategy.extended.variables, VariablesOnServers)


class RemoteSteps:
    """Sends the steps of all optimizers of one strategy's parameters to the servers.

    Args:
        clock: this worker's clock; None in a job with a coordinator.
        rule: returns "sum" or "mean": how the servers combine the gradients of workers.
        next_number: returns a new optimizer's number, equal on all workers, because all run the same program.
    """

    def __init__(
        self,
        tensors: RemoteTensors,
        clock: WorkerClock | None,
        rule: Callable[[], str],
        next_number: Callable[[], int],
    ) -> None:
        self._tensors = tensors
        self._clock = clock
        self._rule = rule
        self._next_number = next_number
        self._optimizers: weakref.WeakKeyDictionary[Optimizer, RemoteOptimizer] = (
            weakref.WeakKeyDictionary()
        )
        optimizers.install()  # its hook must run first: it hides the gradients of all replicas but the first
        hooks.watch_steps(_before_step, _after_step)

    def add(self, parameter: Tensor, remote: RemoteTensor) -> None:
        """Have the servers step `parameter` from now on."""
        _remote[parameter] = remote, self

    def step(self, optimizer: Optimizer) -> None:
        """Send the gradients in `.grad` to the servers, and wait until the servers have applied them.

        With a clock that combines the gradients of all workers, wait only until the servers have stored them.
        Parameters without a gradient get no step. `.grad` stays as it is.
        """
        mean = self._rule() == "mean"
        remote = self.of(optimizer)
        now = None
        if self._clock is not None:
            now = self._clock.round_to_send_in()
        changes: list[Change] = []
        for group in optimizer.param_groups:
            numbers = server_optimizers.hyperparameters(group)
            step = GradientMethod(remote.number, numbers, now, mean)
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is not None:
                    tensor, _ = _remote[parameter]
                    changes += _changes(tensor, gradient.detach(), step)
        self._tensors.client.change(changes)

    def of(self, optimizer: Optimizer) -> RemoteOptimizer:
        """Return the optimizer's `RemoteOptimizer`, and have the servers make the optimizer for its new parameters.

        On the first call, the optimizer gets its number.
        """
        remote = self._optimizers.get(optimizer)
        if remote is None:
            number = self._next_number()
            remote = self.know(optimizer, number)
        remote.make(optimizer)
        return remote

    def know(self, optimizer: Optimizer, number: int) -> RemoteOptimizer:
        """Register the optimizer under its number on the servers, and return its `RemoteOptimizer`."""
        remote = RemoteOptimizer(optimizer, number, self._tensors)
        self._optimizers[optimizer] = remote
        return remote


def _changes(remote: RemoteTensor, gradient: Tensor, step: GradientMethod) -> list[Change]:
    if not gradient.is_sparse:
        return remote.changes(step, gradient)
    gradient = gradient.coalesce()
    indices = gradient.indices()[0]
    values = gradient.values()
    # Parts without any of the rows get a step, too, so that all parts count the same steps.
    changes = []
    for address, first, part in remote.by_part(indices):
        rows = indices[part] - first
        changes.append(Change(address, step, IndexedSlices(values[part], rows)))
    return changes


class RemoteOptimizer:
    """An optimizer of this rank that has its state on the servers.

    Attributes: number: the optimizer's number on the servers, equal on all ranks.
    """

    def __init__(self, optimizer: Optimizer, number: int, tensors: RemoteTensors) -> None:
        self.number = number
        self._optimizers = tensors.client.optimizers
        self._owns = tensors.owns
        self._made: WeakIdKeyDictionary = WeakIdKeyDictionary()
        optimizer.register_state_dict_pre_hook(_while_alive(self._fetch))
        optimizer.register_state_dict_post_hook(_while_alive(self._drop))
        hooks.state_of_copies(optimizer, self._state)

    def make(self, optimizer: Optimizer) -> None:
        """Have the servers make the optimizer for new remote parameters.

        State that `load_state_dict` has put into `optimizer.state` moves to the servers; only the owner sends it.

        Raises: TypeError if the servers cannot make or step this class of optimizer.
        """
        for group in optimizer.param_groups:
            new: dict[Tensor, RemoteTensor] = {}
            for parameter in group["params"]:
                if parameter in _remote and parameter not in self._made:
                    new[parameter], _ = _remote[parameter]
            if new:
                definition = server_optimizers.OptimizerDefinition.of(optimizer, group)
                arrays = []
                for tensor in new.values():
                    arrays += [(address, tensor.split) for address in tensor.addresses]
                self._optimizers.make(self.number, definition, arrays)
                self._made.update(new)
        self._move_loaded_state(optimizer)

    def _move_loaded_state(self, optimizer: Optimizer) -> None:
        """Remove state that the program has loaded into `optimizer.state`; first send it, if this rank is the owner."""
        for parameter in [p for p in optimizer.state if p in self._made]:
            if self._owns:
                self._load(self._made[parameter], optimizer.state[parameter])
            del optimizer.state[parameter]

    def made_elsewhere(self, optimizer: Optimizer) -> None:
        """Register the remote parameters as made: another rank (the chief) has had the servers make the optimizer."""
        for parameter in hooks.parameters_of(optimizer):
            if parameter in _remote:
                self._made[parameter], _ = _remote[parameter]

    def _load(self, remote: RemoteTensor, state: dict[str, Any]) -> None:
        whole = {}
        for name, value in state.items():
            if isinstance(value, Tensor):
                whole[name] = view_of(value.detach().cpu())
            else:
                whole[name] = value
        parts = [whole]
        if remote.split:
            parts = server_optimizers.split_state(whole, remote.rows)
        for address, part in zip(remote.addresses, parts, strict=True):
            self._optimizers.load_state(self.number, address, part)

    def _fetch(self, optimizer: Optimizer) -> None:
        """Pull the servers' optimizer state into `optimizer.state`. Called by: torch, before `state_dict()`."""
        for parameter in hooks.parameters_of(optimizer):
            remote: RemoteTensor | None = self._made.get(parameter)
            if remote is None or parameter in optimizer.state:
                continue
            states = [self._optimizers.state(self.number, a) for a in remote.addresses]
            state = states[0]
            if remote.split:
                state = server_optimizers.join_states(states)
            if state:
                like = torch.empty(0, dtype=parameter.dtype, device="cpu")
                layout = view_of(like).dtype
                optimizer.state[parameter] = {
                    name: _as_torch(value, parameter, layout) for name, value in state.items()
                }

    def _state(self, optimizer: Optimizer) -> Any:
        self._fetch(optimizer)
        state = copy.copy(optimizer.state)
        self._drop(optimizer)
        return state

    def _drop(self, optimizer: Optimizer, state_dict: Any = None) -> None:
        """Remove the state of remote parameters from `optimizer.state`. Called by: torch, after `state_dict()`."""
        for parameter in self._made:
            optimizer.state.pop(parameter, None)


def _as_torch(value: Any, parameter: Tensor, layout: np.dtype[Any]) -> Any:
    if not isinstance(value, np.ndarray):
        return value
    if value.dtype == layout:
        return as_buffer_of(parameter, value).to(parameter.device)
    tensor = torch.from_numpy(value)
    if value.ndim:
        return tensor.to(parameter.device)
    return tensor


def _while_alive(method: Callable[..., None]) -> Callable[..., None]:
    """Return a hook that calls `method` while its object lives, and does not keep the object alive."""
    reference = weakref.WeakMethod(method)

    def hook(*args: Any) -> None:
        target = reference()
        if target is not None:
            target(*args)

    return hook
