"""Models to train, of sizes that people know, in plain torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpistrat.tools.bench.models.model import Model

# The part before the first "-" is the name of the model's file. That file loads torch.
MODELS = ("mlp", "mlp-large", "resnet50", "transformer")


def model_named(name: str) -> Model:
    """Return the model `name`, one of `MODELS`. This loads torch."""
    file = name.partition("-")[0]
    return importlib.import_module(f"{__name__}.{file}").MODELS[name]
