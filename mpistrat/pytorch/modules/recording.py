"""Seeing the torch modules that are built inside `scope()`, or change their parameters later.

All three registration hooks are needed: the parameter hook alone misses what is deep-copied, which is
all of `nn.TransformerEncoder`.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.modules import module as hooks
from torch.utils.hooks import RemovableHandle

from mpistrat.context import per_thread


class Recorder:
    """Keeps weak references to modules, in the order in which they were first seen.

    Attributes:
        changed: a module of ours got a parameter, buffer or submodule, or has one whose shape or values
            are not known yet.
    """

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy
        self._modules: list[weakref.ref[torch.nn.Module]] = []
        self._seen: dict[int, weakref.ref[torch.nn.Module]] = {}
        self.changed = False
        hook = _hook_for(weakref.ref(self))
        handles = [
            hooks.register_module_parameter_registration_hook(hook),
            hooks.register_module_buffer_registration_hook(hook),
            hooks.register_module_module_registration_hook(hook),
        ]
        weakref.finalize(self, _remove, handles)

    def see(self, module: torch.nn.Module, value: Any) -> None:
        """A registration hook fired. In our scope any module counts, elsewhere, run included, those known."""
        mode = per_thread.modes[-1] if per_thread.modes else None
        in_scope = (
            mode is not None and mode.replica_context is None and mode.strategy is self._strategy
        )
        if in_scope or self.knows(module):
            self.changed = True
            self.record(module)
            if isinstance(value, torch.nn.Module):
                self.record(value)

    def record(self, module: torch.nn.Module) -> None:
        if not self.knows(module):
            reference = weakref.ref(module)
            self._modules.append(reference)
            self._seen[id(module)] = reference

    def knows(self, module: torch.nn.Module) -> bool:
        reference = self._seen.get(id(module))
        return reference is not None and reference() is module

    def roots(self) -> list[torch.nn.Module]:
        """The recorded modules that are inside no other recorded one, in recorded order."""
        alive = [module for reference in self._modules if (module := reference()) is not None]
        self._modules = [weakref.ref(module) for module in alive]
        self._seen = {id(module): r for module, r in zip(alive, self._modules, strict=True)}
        inside = {id(child) for m in alive for child in m.modules() if child is not m}
        return [module for module in alive if id(module) not in inside]


def _hook_for(recorder: weakref.ref[Recorder]) -> Any:
    def hook(module: torch.nn.Module, name: str, value: Any) -> None:
        target = recorder()
        if target is not None:
            target.see(module, value)

    return hook


def _remove(handles: Sequence[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
