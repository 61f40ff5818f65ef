"""ResNet-50 v1.5 for ImageNet: He et al., Deep Residual Learning for Image Recognition, arXiv:1512.03385, table 1.

Most benchmarks mean v1.5: a bottleneck that halves the picture's height and width does so in its 3x3 convolution, not
in the 1x1 convolution before it.
"""

from __future__ import annotations

import torch
from torch import nn

from mpistrat.tools.bench.models.model import Model

_BLOCKS = (3, 4, 6, 3)
_EXPANSION = 4  # a block's last convolution has this many times its channels


def _convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False),
        nn.BatchNorm2d(outputs),
    )


class Bottleneck(nn.Module):
    def __init__(self, inputs: int, channels: int, stride: int) -> None:
        super().__init__()
        outputs = channels * _EXPANSION
        self.residual = nn.Sequential(
            *(_convolution(inputs, channels, 1), nn.ReLU(inplace=True)),
            *(_convolution(channels, channels, 3, stride), nn.ReLU(inplace=True)),
            _convolution(channels, outputs, 1),
        )
        self.shortcut = (
            nn.Identity()
            if inputs == outputs and stride == 1
            else _convolution(inputs, outputs, 1, stride)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.residual(x) + self.shortcut(x))


def resnet50(classes: int = 1000) -> nn.Module:
    stem = [_convolution(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, padding=1)]
    blocks: list[nn.Module] = []
    inputs = 64
    for stage, count in enumerate(_BLOCKS):
        channels = 64 << stage
        for i in range(count):
            blocks.append(Bottleneck(inputs, channels, stride=2 if stage > 0 and i == 0 else 1))
            inputs = channels * _EXPANSION
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes)]
    return nn.Sequential(*stem, *blocks, *head)


MODELS = {"resnet50": Model(resnet50, (3, 224, 224), 1000, examples_per_rank=8)}
