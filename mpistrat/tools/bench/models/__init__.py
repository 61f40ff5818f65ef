"""Models to train, of sizes that people know, written out in plain torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpistrat.tools.bench.models.model import Model

# Each is in the file whose name it begins with; that file loads torch.
MODELS = ("mlp", "mlp-large", "resnet50", "transformer")


def model_named(name: str) -> Model:
    """One of `MODELS`."""
    file = name.partition("-")[0]
    return importlib.import_module(f"{__name__}.{file}").MODELS[name]
