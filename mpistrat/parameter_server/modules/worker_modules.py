"""Torch modules in the functions that a chief has its workers execute.

What a module has on servers travels as its place there, and everything else of it by value, with each function, as what
a function captures does: also the numbers of an optimizer's param groups. A worker has a tensor of its own for each
parameter and buffer, which begins each function, and each run in it, with what the servers have. The modules are made
anew for each function, without gradients: none depends on what the worker has executed before.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from mpistrat.parameter_server.modules import remote_rows, remote_steps
from mpistrat.parameter_server.modules.remote_modules import RemoteModules
from mpistrat.parameter_server.modules.remote_steps import RemoteOptimizer, RemoteSteps
from mpistrat.parameter_server.modules.remote_tensor import RemoteTensor
from mpistrat.pytorch.modules.registry import Registry, version

if TYPE_CHECKING:
    from mpistrat.strategy import Strategy

_PARAMETER, _ROWS, _BUFFER = "parameter", "rows of a parameter", "buffer"
_SCHEDULER = "scheduler"

# Of a tensor's parts, in order: the server's rank, and the array's number there.
Places = tuple[tuple[int, int], ...]


class ReferencedModules(RemoteModules):
    """What a strategy with a coordinator keeps for PyTorch, on the chief or on a worker."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._by_place: weakref.WeakValueDictionary[Places, torch.Tensor] = (
            weakref.WeakValueDictionary()
        )

    def reference_of(self, value: Any) -> Any | None:
        """The key of a tensor that is on servers; None for what is copied."""
        if not isinstance(value, torch.Tensor):
            return None
        remote = self._remote.get(value)
        if remote is None:
            return None
        places = tuple((address.server, address.key) for address in remote.addresses)
        self._by_place[places] = value
        kind = _BUFFER
        if isinstance(value, torch.nn.Parameter):
            kind = _ROWS if isinstance(value, remote_rows.RemoteRows) else _PARAMETER
        return kind, places, value.device.type, value.requires_grad

    def resolve(self, key: Any) -> Any:
        """This rank's form of what has this key on the other."""
        return self._by_place[key[1]]

    def reduction_of(self, value: Any) -> tuple[Any, ...] | None:
        """How modules and optimizers are copied of which the worker takes note; None for all others."""
        return None

    def have_loaded(self, objects: Iterable[Any]) -> None:
        """What the chief has loaded goes to the servers with the functions that use it."""

    def clear(self) -> None:
        """A function comes."""

    def begin(self) -> None:
        """The function is unpacked."""


class ChiefModules(ReferencedModules):
    """Modules that the chief makes, and what it writes to them.

    What the chief writes in place (`load_state_dict`, not `.data`) is sent with the next function that needs it.
    """

    def reference_of(self, value: Any) -> Any | None:
        if isinstance(value, LRScheduler):
            return (_SCHEDULER,) if remote_steps.has_remote_parameters(value.optimizer) else None
        if isinstance(value, (torch.nn.Module, torch.Tensor)) and self._recorder.changed:
            super(RemoteModules, self).before_run()
        key = super().reference_of(value)
        if key is None:
            if isinstance(value, torch.Tensor) and is_lazy(value):
                raise RuntimeError(
                    f"parameter {self._name_of(value)} of a lazy module has no shape yet: call its forward once, on "
                    "the chief, before a function that uses it is scheduled"
                )
            return None
        if value._backward_hooks or value._post_accumulate_grad_hooks:
            raise RuntimeError(
                f"parameter {self._name_of(value)} has a hook, which does not travel: register it in the scheduled "
                "function, or on its module"
            )
        remote = self._remote[value]
        if version(value) != remote.version and not isinstance(value, remote_rows.RemoteRows):
            self._assign([(remote, value.detach())])
            remote.version = version(value)
        return key

    def reduction_of(self, value: Any) -> tuple[Any, ...] | None:
        number = None
        if isinstance(value, torch.nn.Module):
            if not self._recorder.knows(value):
                return None
        elif isinstance(value, Optimizer) and remote_steps.has_remote_parameters(value):
            number = self._steps.of(value).number
            value._opt_called = True  # type: ignore[attr-defined]  # else schedulers say that they step too early
        else:
            return None
        reduced = value.__reduce_ex__(4)  # as pickle's protocols do from this one on
        if len(reduced) < 3 or any(reduced[3:]):
            return None
        make, args, state = reduced[:3]
        return make, args, state, None, None, functools.partial(_arrive, self.strategy, number)

    def _mirror_tensors(self, parameters: Any, slots: Any) -> None:
        if self._extended.num_local_replicas > 1:
            raise NotImplementedError(
                "torch modules in the scope of a ParameterServerStrategy whose workers have several devices each: "
                "give each device a worker of its own"
            )
        super()._mirror_tensors(parameters, slots)

    def _name_of(self, tensor: torch.Tensor) -> str:
        for root in self._recorder.roots():
            for name, one in root.named_parameters():
                if one is tensor:
                    return f"{type(root).__name__}.{name}"
        return f"of shape {list(tensor.shape)}" if not is_lazy(tensor) else ""


def _arrive(strategy: Strategy, number: int | None, value: Any, state: Any) -> None:
    """Give `value` its state, and have the worker take note of it. Args: number: an optimizer's."""
    value.__setstate__(state)
    modules = strategy.extended.modules.get()
    assert isinstance(modules, WorkerModules)
    modules.arrived(value, number)


class WorkerModules(ReferencedModules):
    """Modules in the function that this worker executes."""

    _steps: _KnownSteps

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._steps = _KnownSteps(self._client, False, None)
        self._tensors: dict[Places, torch.Tensor] = {}
        self._modules: list[torch.nn.Module] = []

    def resolve(self, key: Any) -> Any:
        if key[0] == _SCHEDULER:
            return _Scheduler()
        kind, places, device, requires_grad = key
        tensor = self._tensors.get(places)
        if tensor is None:
            tensor = self._tensors[places] = self._make(kind, places, device)
        if kind != _BUFFER and tensor not in self.registry:
            tensor.requires_grad_(requires_grad)
            tensor.grad = None
            self.registry.add_parameter(self._remote[tensor].addresses[0].name, tensor)
        return tensor

    def _make(self, kind: str, places: Places, device: str) -> torch.Tensor:
        remote = RemoteTensor([self._client.find(server, key) for server, key in places])
        parts = [address.spec.empty() for address in remote.addresses]
        shape = (sum(remote.rows), *parts[0].shape[1:]) if remote.split else parts[0].shape
        if kind == _ROWS:
            nothing = torch.zeros((), dtype=parts[0].dtype, device=device)
            tensor: torch.Tensor = torch.nn.Parameter(nothing.expand(shape), False)
            remote_rows.leave_on_servers(tensor, remote, self._client, False)
        else:
            tensor = torch.empty(shape, dtype=parts[0].dtype, device=device)
            if kind == _PARAMETER:
                tensor = torch.nn.Parameter(tensor, False)
        self._remote[tensor] = remote
        if kind != _BUFFER:
            remote_steps.serve(tensor, remote, self._steps)
        return tensor

    def arrived(self, value: Any, number: int | None) -> None:
        if number is None:
            self._modules.append(value)
        else:
            self._steps.know(value, number)

    def clear(self) -> None:
        self.registry = Registry()
        self._modules.clear()
        self._pulled = []

    def begin(self) -> None:
        for module in self._modules:
            for key, buffer in module._buffers.items():
                if buffer is not None and buffer in self._remote:
                    self.registry.add_buffer(key, module, key)
        super().before_run()

    def before_run(self) -> None:
        self.after_run()
        super().before_run()

    def after_run(self) -> None:
        for remote, parameter in self._known(self.registry.parameters()):
            if version(parameter) != remote.version:
                raise RuntimeError(
                    f"parameter {remote.addresses[0].name} was written in a scheduled function, by something else than "
                    "an optimizer's step: that is not sent to the servers. Write it on the chief"
                )
        super().after_run()

    def stop_recording(self, failed: bool) -> None:
        """What a function makes is its own."""

    def _mirror_tensors(self, parameters: Any, slots: Any) -> None:
        """What a function makes is its own."""


class _KnownSteps(RemoteSteps):
    """Steps of optimizers that the chief has made."""

    def know(self, optimizer: Optimizer, number: int) -> None:
        remote = self._optimizers[optimizer] = RemoteOptimizer(optimizer, number, self)
        remote.made_by_another(optimizer)

    def _new(self, optimizer: Optimizer) -> NoReturn:
        raise RuntimeError(
            "optimizer.step(): a scheduled function has made this optimizer, and its state would be lost with it. Make "
            "it on the chief, where its parameters are made"
        )


class _Scheduler:
    """What a scheduled function finds in place of a learning-rate scheduler."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        raise RuntimeError(
            f"{name} of a learning-rate scheduler was asked for on a worker: step it on the chief, whose optimizer's "
            "numbers come with each function"
        )
