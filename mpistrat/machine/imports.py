"""Run actions when a program has loaded a library that mpistrat itself does not want to load."""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


class _WhenLoaded(importlib.abc.MetaPathFinder):
    """Calls functions when the process has loaded a module. It is an entry of `sys.meta_path`.

    Attributes:
        actions: for each module that is not loaded yet, the functions to call, in order.
    """

    def __init__(self) -> None:
        self.actions: dict[str, list[Callable[[], None]]] = {}

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname not in self.actions:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_act(module: ModuleType) -> None:
                execute(module)
                for action in self.actions.pop(fullname, []):
                    action()

            spec.loader.exec_module = execute_and_act  # type: ignore[method-assign]
        return spec


_loading = _WhenLoaded()


def when_loaded(module: str, action: Callable[[], None]) -> None:
    """Call `action` once, in the thread that imports `module`, when the import has ended; at once if it is loaded.

    Actions of a module are called in the order of the calls of `when_loaded`. mpistrat itself does not import `module`.
    """
    if module in sys.modules and module not in _loading.actions:
        action()
        return
    _loading.actions.setdefault(module, []).append(action)
    if _loading not in sys.meta_path:
        sys.meta_path.insert(0, _loading)
