"""What a benchmark must know of a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Model:
    """A classifier: `cross_entropy(module(inputs), targets)` is its loss.

    Attributes:
        build: makes the module, on the CPU.
        input_shape: of one example; images are [channels, height, width].
        classes: of a target; of each token where inputs are tokens.
        tokens: inputs are whole numbers below `classes`, and a target is as long as its input.
        examples_per_rank: in a batch, by default.
    """

    build: Callable[[], torch.nn.Module]
    input_shape: tuple[int, ...]
    classes: int
    tokens: bool = False
    examples_per_rank: int = 64

    def synthetic_batch(self, examples: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets drawn at random, the same for the same seed."""
        generator = torch.Generator().manual_seed(seed)
        shape = (examples, *self.input_shape)
        if self.tokens:
            shape = (examples, self.input_shape[0] + 1)
            text = torch.randint(self.classes, shape, generator=generator, device="cpu")
            return text[:, :-1].contiguous(), text[:, 1:].contiguous()
        targets = torch.randint(self.classes, (examples,), generator=generator, device="cpu")
        return torch.randn(shape, generator=generator, device="cpu"), targets
