"""Multilayer perceptrons: large matrices, and little computation for each byte of their gradients."""

from __future__ import annotations

import functools

from torch import nn

from mpistrat.tools.bench.models.model import Model


def mlp(width: int, layers: int, classes: int = 10) -> nn.Module:
    hidden: list[nn.Module] = []
    for _ in range(layers):
        hidden += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(width, classes))


MODELS = {
    "mlp": Model(functools.partial(mlp, 1024, 4), (1, 32, 32), 10),  # 4.2 million parameters
    "mlp-large": Model(functools.partial(mlp, 2048, 6), (1, 32, 64), 10),  # 25.2 million
}
