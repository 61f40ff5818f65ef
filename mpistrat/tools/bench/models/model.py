"""The facts about a model that a benchmark needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


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

    build: Callable[[], torch.nn.Module]
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
            return text[:, :-1].contiguous(), text[:, 1:].contiguous()
        targets = torch.randint(self.classes, (examples,), generator=generator, device="cpu")
        return torch.randn(shape, generator=generator, device="cpu"), targets
