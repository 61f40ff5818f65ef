"""Models to train, of sizes that people know, written out in plain torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpistrat.tools.bench.models.model import Model

# Of each: its file here (which loads torch), and its name there.
_PLACES = {
    "mlp": ("mlp", "MLP"),
    "mlp-large": ("mlp", "MLP_LARGE"),
    "resnet50": ("resnet50", "RESNET50"),
    "transformer": ("transformer", "TRANSFORMER"),
}
MODELS = tuple(_PLACES)


def model_named(name: str) -> Model:
    """One of `MODELS`."""
    file, attribute = _PLACES[name]
    return getattr(importlib.import_module(f"{__name__}.{file}"), attribute)
