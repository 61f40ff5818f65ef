"""Lets a program import torchvision, as timm does, beside a build of torch that torchvision was not compiled for.

Its wheel loads its operators only into the torch of the same index; elsewhere `import torchvision` fails on the first
that it describes to torch. Declared, they can be described, and all else of torchvision works.
"""

import importlib.abc
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

_DESCRIBED = ("nms", "qnms")
_declarations: list[Any] = []  # which end with their Library


class _Finder(importlib.abc.MetaPathFinder):
    """Finds no module, but sees the first that asks for torchvision."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> None:
        if name == "torchvision":
            sys.meta_path.remove(self)
            _declare_if_missing()


def declare_when_imported() -> None:
    """Nothing is done in a program that does not import torchvision, or whose torchvision has its operators."""
    sys.meta_path.insert(0, _Finder())


def _declare_if_missing() -> None:
    import torch

    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in _DESCRIBED:
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _declarations.append(library)
