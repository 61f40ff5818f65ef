"""Modules that programs may have imported and that moved: the old name still works, and warns."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# What is public of a module is also in `mpistrat` itself, or in one of its public packages.
MOVED = {
    "mpistrat.batch_norm": "mpistrat.pytorch.conversion",
    "mpistrat.bench": "mpistrat.tools.bench",
    "mpistrat.coordinator.cluster_coordinator": "mpistrat.parameter_server.coordinator.cluster_coordinator",
    "mpistrat.coordinator.per_worker": "mpistrat.parameter_server.coordinator.per_worker",
    "mpistrat.coordinator.remote_value": "mpistrat.parameter_server.coordinator.remote_value",
    "mpistrat.doctor": "mpistrat.tools.doctor",
    "mpistrat.losses": "mpistrat.replicas.losses",
    "mpistrat.multi_step": "mpistrat.replicas.multi_step",
    "mpistrat.partitioners": "mpistrat.variables.partitioners",
    "mpistrat.replica_context": "mpistrat.replicas.replica_context",
    "mpistrat.sharded_variable": "mpistrat.variables.sharded",
    "mpistrat.strategy_extended": "mpistrat.replicas.extended",
    "mpistrat.tpu_topology": "mpistrat.xla.topology",
}


class MovedModules(MetaPathFinder, Loader):
    """Comes last in `sys.meta_path`: it is asked for modules that nobody else finds."""

    def __init__(self) -> None:
        self._specs: dict[str, ModuleSpec | None] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        for old, new in MOVED.items():
            if fullname == old or fullname.startswith(f"{old}."):
                moved = importlib.util.find_spec(new + fullname.removeprefix(old))
                is_package = moved is not None and moved.submodule_search_locations is not None
                return moved and ModuleSpec(fullname, self, is_package=is_package)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        old = next(old for old in MOVED if f"{spec.name}.".startswith(f"{old}."))
        new = MOVED[old] + spec.name.removeprefix(old)
        warnings.warn(f"{spec.name} is now {new}", DeprecationWarning, stacklevel=2)
        module = importlib.import_module(new)
        self._specs[new] = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """The module has run under its new name, and keeps the spec of that, which the import has replaced."""
        module.__spec__ = self._specs.pop(module.__name__)

    def get_code(self, fullname: str) -> Any:
        """For `python -m`."""
        spec = self.find_spec(fullname, None)
        if spec is None:
            return None
        module = self.create_module(spec)
        return module.__spec__.loader.get_code(module.__name__)  # type: ignore[union-attr]


def install() -> None:
    """Called by: the package, once."""
    sys.meta_path.append(MovedModules())
