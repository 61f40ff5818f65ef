"""The recording of a rank: its optimizer steps, as plain data that one process writes and another reads."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
MOST_ELEMENTS = 512  # of a tensor are kept; a larger tensor gives elements at equal distances


@dataclass
class Sample:
    """A part of a tensor, and measures of all of it.

    Attributes:
        values: at most `MOST_ELEMENTS` elements, float64.
        size: number of elements of the tensor.
        norm: the norm of the whole tensor.
        digest: checksum of the bytes of the whole tensor.
        exact: whether it has integers, so that rounding cannot change it.
    """

    values: Array
    size: int
    norm: float
    digest: int
    exact: bool


@dataclass
class Step:
    """An optimizer step of a rank, or a round of assignments to variables.

    Attributes:
        rates: the learning rates, one for each group of parameters.
        tensors: samples by kind and key. The kinds are "before" (the parameters before the step), "gradients",
            "buffers" and "values" (the parameters, or variables, after the step).
        losses: (loss, weight of this rank in the loss of all ranks) of each `backward()` since the last step.
        examples: checksum of each example that the model got since the last step.
        inputs: the sum of the sizes of all numbers that the model got since the last step.
        calls: number of calls of modules since the last step.
        draws: whether torch's random numbers were drawn between a forward and its `backward()`.
    """

    rates: list[float] = field(default_factory=list)
    tensors: dict[str, dict[str, Sample]] = field(default_factory=dict)
    losses: list[tuple[float, float]] = field(default_factory=list)
    examples: list[int] = field(default_factory=list)
    inputs: float = 0.0
    calls: int = 0
    draws: bool = False


@dataclass
class Recording:
    """The steps of one rank of a run, and facts about the program.

    Attributes:
        rank: the number of the rank.
        steps: the optimizer steps; without an optimizer, the rounds of assignments to variables.
        labels: names of tensors for people, by their keys in `Step.tensors`.
        norms: classes of batch norms that computed the statistics of this rank's part alone.
        hooks: names of parameters and modules with hooks that see gradients.
        switched_off: whether a dropout was switched off.
        outside: new files outside the run's folder that the program has written.
        refused: the existing file that the program wanted to overwrite; "" if none.
        epsilon: the largest machine epsilon of the numbers that the training computes with.
        by_files: whether the program read a dataset whose files are dealt out to the ranks.
    """

    rank: int
    steps: list[Step] = field(default_factory=list)
    labels: dict[str, str] = field(default_factory=dict)
    norms: set[str] = field(default_factory=set)
    hooks: set[str] = field(default_factory=set)
    switched_off: bool = False
    outside: set[str] = field(default_factory=set)
    refused: str = ""
    epsilon: float = 0.0
    by_files: bool = False


def sample(array: Array) -> Sample:
    """Return the `Sample` of an array of numbers."""
    flat = np.ascontiguousarray(array).reshape(-1)
    is_exact = flat.dtype.kind not in "fc"
    numbers = flat.view(flat.real.dtype).astype(np.float64)
    stride = math.ceil(numbers.size / MOST_ELEMENTS) or 1
    norm = float(np.linalg.norm(numbers))
    return Sample(numbers[::stride].copy(), numbers.size, norm, zlib.crc32(flat.data), is_exact)
