"""Torch modules in the functions that a chief schedules on its workers.

The chief sends a tensor on servers as the servers and numbers of its arrays. It sends everything else of a module by
value with each function, also the hyperparameters of an optimizer's param groups.

A worker has a tensor of its own for each parameter and buffer. Each function, and each run in it, begins by pulling the
servers' values into the tensor. The worker unpickles the modules anew for each function, without gradients, so no
function depends on earlier ones.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from mpistrat.context import AnyStrategy, require_cross_replica
from mpistrat.parameter_server.client.client import Client
from mpistrat.parameter_server.modules.remote_modules import RemoteModules
from mpistrat.parameter_server.modules.remote_rows import leave_on_servers
from mpistrat.parameter_server.modules.remote_steps import RemoteSteps, has_remote_parameters
from mpistrat.parameter_server.modules.remote_tensors import (
    BUFFER,
    ROWS,
    Places,
    RemoteTensors,
    TensorKey,
)
from mpistrat.pytorch import hooks
from mpistrat.pytorch.gradients.reducer import GradientReducer
from mpistrat.pytorch.modules.placing import compute_there
from mpistrat.pytorch.modules.registry import Registry, version
from mpistrat.pytorch.modules.strategy_modules import StrategyModules
from mpistrat.replicas.torch_modules import ModuleParts

SCHEDULER = "scheduler"  # the key of each learning-rate scheduler


class WorkerModules(StrategyModules):
    """The chief's torch modules in the function that this worker executes.

    A module that the function itself makes is not on servers. The object also finds or makes this worker's tensor for a
    key in a pickled function (`pickling.References`).
    """

    def __init__(self, parts: ModuleParts, client: Client) -> None:
        registry = Registry()
        super().__init__(parts, registry, GradientReducer(parts, registry))
        self._tensors = RemoteTensors(client, owns=False)
        self._steps = RemoteSteps(self._tensors, None, lambda: "sum", _refuse_new_optimizer)
        self._by_place: dict[Places, Tensor] = {}
        self._modules: list[Module] = []

    def reference_of(self, value: Any) -> TensorKey | None:
        return self._tensors.key_of(value)

    def resolve(self, key: Any) -> Any:
        if key == SCHEDULER:
            return _Scheduler()
        kind, places, device, requires_grad = key
        tensor = self._by_place.get(places)
        if tensor is None:
            tensor = self._make(kind, places, device)
            self._by_place[places] = tensor
        if kind != BUFFER and tensor not in self.registry:
            tensor.requires_grad_(requires_grad)
            tensor.grad = None
            first = self._tensors[tensor].addresses[0]
            self.registry.add_parameter(first.name, tensor)
        return tensor

    def reduction_of(self, value: Any) -> None:
        return None

    def _make(self, kind: str, places: Places, device: str) -> Tensor:
        find = self._tensors.client.find
        addresses = [find(server, number) for server, number in places]
        spec = addresses[0].spec
        shape = spec.shape
        dtype = spec.native_dtype
        if len(addresses) > 1:
            rows = sum(address.spec.shape[0] for address in addresses)
            shape = (rows, *shape[1:])
        device = self.parts.replicas.device_of_modules or device  # the key has the chief's device
        if kind == ROWS:
            zero = torch.zeros((), dtype=dtype, device=device)
            tensor = zero.expand(shape)
        else:
            tensor = torch.empty(shape, dtype=dtype, device=device)
        if kind != BUFFER:
            tensor = Parameter(tensor, False)
        remote = self._tensors.add(tensor, addresses)
        if kind == ROWS:
            leave_on_servers(tensor, remote)
        if kind != BUFFER:
            self._steps.add(tensor, remote)
        return tensor

    def clear(self) -> None:
        """Forget the modules of the previous function. Called by: the worker, before it unpickles the next one."""
        self.registry.clear()
        self._modules.clear()
        self._tensors.drop_run()

    def arrived(self, value: Module | Optimizer, number: int | None) -> None:
        """Register a module or an optimizer of the function: `begin` places modules, and servers step for optimizers.

        Args: number: an optimizer's number on the servers; None for a module.
        """
        if isinstance(value, Optimizer) and number is not None:
            remote = self._steps.know(value, number)
            remote.made_elsewhere(value)
        elif isinstance(value, Module):
            self._modules.append(value)

    def begin(self) -> None:
        """Place the function's modules on the worker's device, and pull the servers' values into their tensors.

        Called by: the worker, between unpickling the function and calling it.
        """
        device = self.parts.replicas.device_of_modules
        inside = {id(child) for module in self._modules for child in module.children()}
        for module in self._modules:
            if device is not None and id(module) not in inside:
                compute_there(module, torch.device(device))  # arguments are in host memory
            for key, buffer in module._buffers.items():
                if buffer in self._tensors:
                    self.registry.add_buffer(key, module, key, "mean")
        self._tensors.begin_run(self.registry)

    def before_run(self) -> None:
        self.after_run()
        self._tensors.begin_run(self.registry)

    def after_run(self) -> None:
        for remote, parameter in self._tensors.held(self.registry.parameters()):
            if version(parameter) != remote.version:
                raise RuntimeError(
                    f"parameter {remote.addresses[0].name} was written in a scheduled function, but not by an "
                    "optimizer's step: the servers do not get the new values. Write the parameter on the chief"
                )
        self._tensors.end_run()

    def mirror(self, module: Any) -> None:
        require_cross_replica(self.parts.strategy, "mirror")
        self.before_run()

    def stop_recording(self, failed: bool) -> None:
        """Do nothing: a worker records no modules."""


def arrive(strategy: AnyStrategy, number: int | None, value: Any, state: dict[str, Any]) -> None:
    """Set the state of an unpickled module or optimizer, and register it with this worker's modules.

    Called by: pickle, on the worker, while it unpickles a function.
    Args: number: an optimizer's number on the servers; None for a module.
    """
    value.__setstate__(state)
    modules: WorkerModules = strategy.extended.torch_references()
    modules.arrived(value, number)


def _refuse_new_optimizer() -> NoReturn:
    raise RuntimeError(
        "optimizer.step(): a scheduled function has made this optimizer, and the optimizer's state would be lost when "
        "the function ends. Make the optimizer on the chief, as its parameters"
    )


class _Scheduler:
    """Takes the place of a learning-rate scheduler in a scheduled function: each use raises RuntimeError."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        raise RuntimeError(
            f"{name} of a learning-rate scheduler was used on a worker. Step the scheduler on the chief: each function "
            "gets the optimizer's current learning rate from there"
        )


class ChiefReferences:
    """Pickles the chief's torch objects for scheduled functions (`coordinator.pickling.References`).

    It first sends the servers each needed tensor that the chief has written in place, such as by `load_state_dict`. It
    does not notice a write through `.data`, because torch does not count that as a write.
    """

    def __init__(self, strategy: AnyStrategy, modules: RemoteModules) -> None:
        self._strategy = strategy
        self._modules = modules

    def reference_of(self, value: Any) -> Any | None:
        """Return the key of a tensor on servers or of a learning-rate scheduler; None for a value to be copied.

        Raises: RuntimeError for a lazy parameter without a shape, and for a parameter with hooks.
        """
        if isinstance(value, LRScheduler):
            if has_remote_parameters(value.optimizer):
                return SCHEDULER
            return None
        if not isinstance(value, (Module, Tensor)):
            return None
        modules = self._modules
        if modules.recorder.changed:
            modules.mirror_new()
        if isinstance(value, Module):
            return None
        tensors = modules.tensors
        key = tensors.key_of(value)
        if key is None:
            if is_lazy(value):
                raise RuntimeError(
                    f"parameter {self._name_of(value)} of a lazy module has no shape yet: call its forward once, on "
                    "the chief, before a function that uses it is scheduled"
                )
            return None
        if value._backward_hooks or value._post_accumulate_grad_hooks:
            raise RuntimeError(
                f"parameter {self._name_of(value)} has a hook, and workers do not get hooks of parameters. Register it "
                "in the scheduled function, or on the parameter's module"
            )
        tensors.send_written(tensors.held([value]))
        return key

    def resolve(self, key: Any) -> Any:
        return self._modules.tensors.find(key)

    def reduction_of(self, value: Any) -> tuple[Any, ...] | None:
        """Return the reduction of a recorded module, or of an optimizer with remote parameters; None for other values.

        Unpickling it makes the worker call `arrive`. Also None if the object's own `__reduce_ex__` gives no state, or
        gives list or dict items besides.
        """
        number = None
        if isinstance(value, Module):
            if not self._modules.recorder.knows(value):
                return None
        elif isinstance(value, Optimizer) and has_remote_parameters(value):
            number = self._modules.steps.of(value).number
            value._opt_called = True  # type: ignore[attr-defined]  # else schedulers warn that they step too early
        else:
            return None
        with hooks.copied_as_it_is():  # tensors on servers are sent as places: pull nothing
            reduced = value.__reduce_ex__(4)  # the lowest protocol that keeps the state apart
        if len(reduced) < 3 or any(reduced[3:]):
            return None
        make, args, state = reduced[:3]
        set_state = functools.partial(arrive, self._strategy, number)
        return make, args, state, None, None, set_state

    def _name_of(self, tensor: Tensor) -> str:
        for root in self._modules.recorder.roots():
            for name, parameter in root.named_parameters():
                if parameter is tensor:
                    return f"{type(root).__name__}.{name}"
        if is_lazy(tensor):
            return ""
        return f"of shape {list(tensor.shape)}"
