"""Records the torch modules that are built inside `scope()`, and the parameters and buffers that they get later.

It needs all three registration hooks of torch. The parameter hook alone misses modules that are deep-copied, such as
the layers of `nn.TransformerEncoder`.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, MutableMapping
from typing import Any

import torch
from torch.nn import Module
from torch.nn.modules import module as hooks

from mpistrat.context import AnyStrategy, per_thread
from mpistrat.pytorch.hooks import before_data_parallel
from mpistrat.pytorch.modules.data_parallel import refuse_wrapping, wrapper_of

_recorders: weakref.WeakSet[Recorder] = weakref.WeakSet()


@functools.cache
def _watch_registrations() -> None:
    """Tell all recorders of each parameter, buffer and submodule that any module gets.

    The hooks are never removed: torch iterates over them, and Python may collect a strategy meanwhile.
    """
    hooks.register_module_parameter_registration_hook(_see)
    hooks.register_module_buffer_registration_hook(_see)
    before_data_parallel(_see)
    hooks.register_module_module_registration_hook(_see)


def _see(module: Module, name: str, value: Any) -> None:
    for recorder in tuple(_recorders):
        recorder.see(module, name, value)


class Recorder:
    """Keeps weak references to modules, in the order of their first registration.

    Args:
        strategy: modules are recorded in the scope of this strategy.
        is_mirrored: tells whether a parameter is mirrored.
        made_in_run: gets the name of each parameter that a replica makes inside `run`.

    Attributes:
        changed: whether there may be something to mirror: a recorded module got a parameter, buffer or submodule, or
            has a tensor without a shape or values so far.
    """

    def __init__(
        self,
        strategy: AnyStrategy,
        is_mirrored: Callable[[torch.Tensor], bool],
        made_in_run: MutableMapping[torch.Tensor, str],
    ) -> None:
        self._strategy, self._is_mirrored, self._made_in_run = strategy, is_mirrored, made_in_run
        self._modules: dict[int, weakref.ref[Module]] = {}  # by the module's id
        self.changed = False
        _recorders.add(self)
        _watch_registrations()

    def see(self, module: Module, name: str, value: Any) -> None:
        """Note that `module` gets `value`, a parameter, buffer or submodule, as its `name`.

        In the scope all modules are recorded. Elsewhere, also inside `run`, only changes of recorded modules count.
        Raises: ValueError if `module` is a wrapper that reduces gradients, and the strategy mirrors `value`.
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
        """Check that `parent` is not a wrapper that reduces the gradients of a mirrored module itself.

        Raises: ValueError if it is one, and `module` is put into it in the scope, is recorded, or has mirrored
            parameters.
        """
        wrapper, strategy = wrapper_of(parent), self._strategy
        if not wrapper or strategy.num_replicas_in_sync == 1:
            return
        if in_scope or self.knows(module) or any(map(self._is_mirrored, module.parameters())):
            refuse_wrapping(wrapper, module, strategy.extended.communicator.rank)

    def record(self, module: Module) -> None:
        if not self.knows(module):
            # A freed module may have had the same id: its place in the order must go.
            self._modules.pop(id(module), None)
            self._modules[id(module)] = weakref.ref(module)

    def knows(self, module: Module) -> bool:
        reference = self._modules.get(id(module))
        return reference is not None and reference() is module

    def roots(self) -> list[Module]:
        """Return the recorded modules that no other recorded module contains, in recorded order."""
        alive = [m for reference in self._modules.values() if (m := reference()) is not None]
        self._modules = {id(module): weakref.ref(module) for module in alive}
        inside = {id(child) for m in alive for child in m.modules() if child is not m}
        return [module for module in alive if id(module) not in inside]
