"""Models to train, of sizes that people know, in plain torch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

# Of ResNet-50
_BLOCKS = (3, 4, 6, 3)
_EXPANSION = 4  # a block's last convolution has this many times its channels
# Of the transformer
_WIDTH = 256
_HEADS = 4
_LAYERS = 6
_LENGTH = 128
_BYTES = 256


@dataclass(frozen=True)
class Model:
    """A classifier. Its loss is `cross_entropy(module(inputs), targets)`.

    Attributes:
        build: makes and returns a new module, on the CPU.
        input_shape: the shape of one example; for images [channels, height, width].
        classes: the number of classes of a target; the number of tokens if inputs are tokens.
        tokens: whether inputs are integers below `classes`; a target then has a class for each token of its input.
        examples_per_rank: the default number of examples per rank in a batch.
    """

    build: Callable[[], nn.Module]
    input_shape: tuple[int, ...]
    classes: int
    tokens: bool = False
    examples_per_rank: int = 64

    def synthetic_batch(self, examples: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return random inputs and targets for `examples` examples, on the CPU; the same for the same seed.

        For tokens, the target of each token is the token after it. Else a target is one class per example.
        """
        generator = torch.Generator().manual_seed(seed)
        shape = (examples, *self.input_shape)
        if self.tokens:
            shape = (examples, self.input_shape[0] + 1)
            text = torch.randint(self.classes, shape, generator=generator, device="cpu")
            inputs = text[:, :-1]
            targets = text[:, 1:]
            return inputs.contiguous(), targets.contiguous()
        targets = torch.randint(self.classes, (examples,), generator=generator, device="cpu")
        return torch.randn(shape, generator=generator, device="cpu"), targets


def mlp(width: int, layers: int, classes: int = 10) -> nn.Module:
    """Return a multilayer perceptron: large matrices, and little computation for each byte of their gradients."""
    hidden: list[nn.Module] = []
    for _ in range(layers):
        hidden += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(width, classes))


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
            _convolution(inputs, channels, 1),
            nn.ReLU(inplace=True),
            _convolution(channels, channels, 3, stride),
            nn.ReLU(inplace=True),
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
    """Return ResNet-50 v1.5 for ImageNet: He et al., Deep Residual Learning for Image Recognition, arXiv:1512.03385,
    table 1.

    Most benchmarks mean v1.5: a bottleneck that halves the picture's height and width does so in its 3x3 convolution,
    not in the 1x1 convolution before it.
    """
    pool = nn.MaxPool2d(3, 2, padding=1)
    stem = [_convolution(3, 64, 7, 2), nn.ReLU(inplace=True), pool]
    blocks: list[nn.Module] = []
    inputs = 64
    stride = 1
    for stage, count in enumerate(_BLOCKS):
        channels = 64 << stage
        for _ in range(count):
            blocks.append(Bottleneck(inputs, channels, stride))
            inputs = channels * _EXPANSION
            stride = 1
        stride = 2  # of the first block of the next stage
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes)]
    return nn.Sequential(*stem, *blocks, *head)


class Transformer(nn.Module):
    """A small decoder of bytes, with many parameters of many sizes.

    It turns tokens [batch, length] into logits [batch, classes, length]: a score of every byte as the next token.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(_BYTES, _WIDTH)
        self.places = nn.Embedding(_LENGTH, _WIDTH)
        layer = nn.TransformerEncoderLayer(
            _WIDTH, _HEADS, 4 * _WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, _LAYERS, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(_WIDTH)
        self.logits = nn.Linear(_WIDTH, _BYTES)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        positions = torch.arange(length, device=tokens.device)
        x = self.tokens(tokens) + self.places(positions)
        later = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        x = self.layers(x, mask=later, is_causal=True)
        return self.logits(self.norm(x)).transpose(1, 2)


# `command_line.MODEL_NAMES` has the same names
MODELS = {
    "mlp": Model(functools.partial(mlp, 1024, 4), (1, 32, 32), 10),  # 4.2 million parameters
    "mlp-large": Model(functools.partial(mlp, 2048, 6), (1, 32, 64), 10),  # 25.2 million
    "resnet50": Model(resnet50, (3, 224, 224), 1000, examples_per_rank=8),
    "transformer": Model(Transformer, (_LENGTH,), _BYTES, tokens=True, examples_per_rank=16),
}
