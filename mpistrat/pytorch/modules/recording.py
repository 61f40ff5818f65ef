"""Records the torch modules that are built inside `scope()`, and the parameters and buffers that they get later.

It uses torch's three global registration hooks: of parameters, buffers and submodules. The parameter hook alone misses
modules that are deep-copied, such as the layers of `nn.TransformerEncoder`.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, MutableMapping
from typing import Any

import torch
from torch.nn import Module
from torch.nn.modules import module as hooks
from torch.utils.weak import WeakIdKeyDictionary

from mpistrat.context import AnyStrategy, per_thread
from mpistrat.pytorch.hooks import before_data_parallel
from mpistrat.pytorch.modules.data_parallel import refuse_wrapping, wrapper_of

_recorders: weakref.WeakSet[Recorder] = weakref.WeakSet()


@functools.cache
def _watch_registrations() -> None:
    """Have all recorders hear of each parameter, buffer and submodule that any module of the process gets.

    Torch's three global registration hooks tell them. The constructor of `DistributedDataParallel` looks for a process
    group before it registers its module, so a fourth hook tells them of that module before the constructor.
    Nothing of this is removed. Torch iterates over its hooks, and the garbage collector may free a strategy meanwhile.
    """
    hooks.register_module_parameter_registration_hook(_see)
    hooks.register_module_buffer_registration_hook(_see)
    hooks.register_module_module_registration_hook(_see)
    before_data_parallel(_see)


def _see(module: Module, name: str, value: Any) -> None:
    for recorder in tuple(_recorders):
        recorder.see(module, name, value)


class Recorder:
    """The list of modules that this rank builds in a strategy's scope, in the order of their first registration.

    References to modules are weak.
    Args:
        strategy: modules are recorded in the scope of this strategy.
        is_mirrored: returns whether a parameter is mirrored.
        made_in_run: a mapping. The recorder adds the name of each parameter that a replica makes inside `run`.

    Attributes:
        changed: whether there may be tensors to mirror. It becomes True when a recorded module gets a parameter, buffer
            or submodule, or has a lazy or "meta" tensor. `Mirroring.mirror_new` resets it.
    """

    def __init__(
        self,
        strategy: AnyStrategy,
        is_mirrored: Callable[[torch.Tensor], bool],
        made_in_run: MutableMapping[torch.Tensor, str],
    ) -> None:
        self._strategy = strategy
        self._is_mirrored = is_mirrored
        self._made_in_run = made_in_run
        self._modules: WeakIdKeyDictionary = WeakIdKeyDictionary()  # as keys, in recorded order
        self.changed = False
        _recorders.add(self)
        _watch_registrations()

    def see(self, module: Module, name: str, value: Any) -> None:
        """Record that `module` gets `value`, a parameter, buffer or submodule, under `name`.

        In the strategy's scope the module is recorded. Elsewhere only recorded modules count; inside `run` other
        parameters are added to `made_in_run`.
        Called by: torch's registration hooks, for every module of the process.
        Raises: ValueError if `module` is a `DistributedDataParallel` or `FullyShardedDataParallel`, and the strategy
            mirrors, or would mirror, `value`.
        """
        mode: Any = per_thread.modes[-1] if per_thread.modes else None
        is_current = mode is not None and mode.strategy is self._strategy
        in_scope = is_current and mode.replica_context is None
        if isinstance(value, Module):
            self._check_wrapper(module, value, in_scope)
        if in_scope or self.knows(module):
            self.changed = True
            self.record(module)
            if isinstance(value, Module):
                self.record(value)
        elif is_current and mode.in_run and isinstance(value, torch.nn.Parameter):
            self._made_in_run[value] = f"{type(module).__name__}.{name}"

    def _check_wrapper(self, parent: Module, module: Module, in_scope: bool) -> None:
        """Check that `parent` does not itself reduce the gradients of its new submodule, `module`.

        Raises: ValueError if `parent` is a `DistributedDataParallel` or `FullyShardedDataParallel`, and this happens in
            the scope, or `module` is recorded or has a mirrored parameter. Not with one replica.
        """
        wrapper = wrapper_of(parent)
        strategy = self._strategy
        if not wrapper or strategy.num_replicas_in_sync == 1:
            return
        is_mirrored = any(self._is_mirrored(parameter) for parameter in module.parameters())
        if in_scope or is_mirrored or self.knows(module):
            refuse_wrapping(wrapper, module, strategy.extended.communicator.rank)

    def record(self, module: Module) -> None:
        self._modules.setdefault(module)

    def knows(self, module: Module) -> bool:
        return module in self._modules

    def roots(self) -> list[Module]:
        """Return the recorded modules that are still alive and in no other recorded module, in recorded order."""
        alive = list(self._modules)
        inside: set[int] = set()
        for module in alive:
            inside.update(id(child) for child in module.modules() if child is not module)
        return [module for module in alive if id(module) not in inside]
