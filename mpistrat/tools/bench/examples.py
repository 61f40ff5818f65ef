"""Real input for a training benchmark: pictures with labels, or the bytes of a file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from mpistrat.strategy import Strategy
from mpistrat.tools.bench.models import Model
from mpistrat.tools.bench.rounds import UsageError, first_reason

DIGITS = "digits"
Batch = tuple[torch.Tensor, torch.Tensor]


class Pictures(Dataset[Batch]):
    """A dataset of `images` [examples, height, width(, channels)] with labels. It resizes an image when it is read.

    An example is a float32 image of the model's `shape` [channels, height, width], scaled to at most 1, and its label.
    """

    def __init__(self, images: np.ndarray, labels: np.ndarray, shape: tuple[int, ...]) -> None:
        self._images = images if images.ndim == 4 else images[..., None]
        self._scale = 1.0 / max(1.0, float(images.max()))
        self._labels = labels
        self._shape = shape

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> Batch:
        height, width = self._shape[1:]
        pixels = self._images[index].astype(np.float32)
        image = torch.from_numpy(pixels).permute(2, 0, 1)
        resized = functional.interpolate(
            image[None].mul_(self._scale), (height, width), mode="bilinear", align_corners=False
        )[0]
        label = torch.tensor(int(self._labels[index]), device="cpu")
        return resized.expand(self._shape), label


class Text(Dataset[Batch]):
    """A dataset of a file's bytes, `length` at a time. Inputs are bytes as tokens; targets are the bytes after them.

    Both are int64 tensors of shape [length].
    """

    def __init__(self, file: Path, length: int) -> None:
        self._bytes = np.memmap(file, np.uint8, mode="r")
        self._length = length

    def __len__(self) -> int:
        return (len(self._bytes) - 1) // self._length

    def __getitem__(self, index: int) -> Batch:
        first = index * self._length
        last = first + self._length
        tokens = self._bytes[first : last + 1].astype(np.int64)
        piece = torch.from_numpy(tokens)
        return piece[:-1], piece[1:]


def batches(
    strategy: Strategy, model: Model, source: str, batch_size: int
) -> Iterator[Batch] | None:
    """Return an endless iterator over this rank's parts of shuffled global batches. Called by: every rank.

    Args:
        source: "synthetic", "digits", or a file's path.
        batch_size: the examples of all ranks together.
    Returns: None for synthetic input: the step then keeps its random batch.
    Raises: UsageError on all ranks, if this model cannot read `source`, or `source` has less than one batch.
    """
    if source == "synthetic":
        return None
    dataset = None
    mistake = ""
    try:
        dataset = _dataset(model, source)
        if len(dataset) < batch_size:
            mistake = (
                f"the {len(dataset)} examples of {source} are less than a batch of {batch_size}"
            )
    except (UsageError, ImportError, OSError, ValueError, KeyError) as error:
        mistake = f"--input {source}: {error}"
    mistake = first_reason(mistake)
    if mistake or dataset is None:
        raise UsageError(mistake)
    order = torch.Generator().manual_seed(0)
    loader = DataLoader(dataset, batch_size, shuffle=True, drop_last=True, generator=order)
    distributed = strategy.experimental_distribute_dataset(loader)
    return _epochs(distributed)


def _epochs(dataset: Iterable[Batch]) -> Iterator[Batch]:
    while True:
        yield from dataset


def _dataset(model: Model, source: str) -> Pictures | Text:
    if model.tokens:
        if source == DIGITS:
            raise UsageError("this model reads text; give a file: its bytes are the tokens")
        return Text(Path(source), model.input_shape[0])
    if source == DIGITS:
        from sklearn.datasets import load_digits  # the ImportError names the missing package

        digits = load_digits()
        return Pictures(digits.images, digits.target, model.input_shape)
    with np.load(source) as arrays:
        images = arrays["images"]
        labels = arrays["labels"]
    if images.ndim not in (3, 4) or labels.shape != images.shape[:1]:
        raise UsageError(
            f"images of shape {list(images.shape)} and labels of shape {list(labels.shape)}; expected "
            "[examples, height, width(, channels)] and [examples]"
        )
    if not 0 <= labels.min() <= labels.max() < model.classes:
        raise UsageError(
            f"labels from {labels.min()} to {labels.max()}; this model has classes 0 to {model.classes - 1}"
        )
    return Pictures(images, labels, model.input_shape)
