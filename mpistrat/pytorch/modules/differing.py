"""The modules that may differ between ranks, because the program says so by `mpistrat.may_differ`."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.nn import Module

_declared: weakref.WeakSet[Module] = weakref.WeakSet()


def declare(module: Module) -> None:
    """Let `module` and its submodules differ between ranks. Does the work of `mpistrat.may_differ`."""
    _declared.add(module)


def may_differ() -> set[int]:
    """Return the `id` of each module that may differ, and of each parameter in it."""
    found: set[int] = set()
    for root in list(_declared):
        for value in (*root.modules(), *root.parameters()):
            found.add(id(value))
    return found
