"""Train a small transformer to write the documentation of Python, one character after the other.

The same script on any number of ranks: `python scripts/train_text.py`, `mpirun -n 4 python …`, `srun python …`.
The text comes with every Python (`pydoc_data.topics`, 0.5 MB) and is written to files, of which a rank reads its own.
Run it again after an interruption, on as many ranks as you like: it goes on from its checkpoint.
"""

import argparse
import math
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from tqdm import tqdm

import mpistrat as ms
from mpistrat.wire_formats import TopK

WINDOW = 64  # characters that the model sees
TRAINING_FILES = 16  # a rank reads whole files: no fewer than there are ranks
LEARNING_RATE, WARM_UP = 3e-3, 100

Batch = tuple[
    torch.Tensor, torch.Tensor
]  # windows, and the same one character on; int64[examples, WINDOW]


class Transformer(nn.Module):
    """Says for each character of a text what the next one may be."""

    def __init__(self, characters: int, width: int = 128, layers: int = 3, heads: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, width)
        self.position = nn.Parameter(torch.zeros(WINDOW, width))
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(
            layer, layers, nn.LayerNorm(width), enable_nested_tensor=False
        )
        self.head = nn.Linear(width, characters)
        nn.init.zeros_(self.head.weight)  # begins with all characters equally likely
        nn.init.zeros_(self.head.bias)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        length = text.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, text.device)
        x = self.embedding(text) + self.position[:length]
        logits: torch.Tensor = self.head(self.layers(x, mask, is_causal=True))
        return logits


class Text:
    """The folder of text files: `train-*.txt`, `validation.txt`, and `characters.txt` with each that occurs."""

    def __init__(self, folder: Path) -> None:
        self.training = sorted(folder.glob("train-*.txt"))
        self.validation = folder / "validation.txt"
        self.characters = (folder / "characters.txt").read_text(encoding="utf-8")
        self._numbers = {character: i for i, character in enumerate(self.characters)}

    def encode(self, text: str) -> torch.Tensor:
        return torch.tensor([self._numbers[character] for character in text])

    def decode(self, numbers: list[int]) -> str:
        return "".join(self.characters[number] for number in numbers)

    def windows(self, file: Path) -> Batch:
        """All that a file holds, but for less than a window at its end."""
        text = self.encode(file.read_text(encoding="utf-8"))
        end = (len(text) - 1) // WINDOW * WINDOW
        return text[:end].view(-1, WINDOW), text[1 : end + 1].view(-1, WINDOW)

    def shuffled_windows(self, file: Path) -> Iterator[Batch]:
        """One by one, in an order that is the file's own: to go on after a restart, those read before are skipped."""
        windows, following = self.windows(file)
        order = np.random.default_rng(zlib.crc32(file.name.encode())).permutation(len(windows))
        return ((windows[i], following[i]) for i in order)


def write_text(folder: Path) -> None:
    """Write the topics into `folder`, which appears when it is complete; if it is there already, leave it."""
    if folder.exists():
        return
    held_out = sorted(topics)[::10]
    validation = "".join(topics[name] for name in held_out)
    files = [""] * TRAINING_FILES
    for topic in sorted((topics[name] for name in topics if name not in held_out), key=len)[::-1]:
        shortest = min(range(TRAINING_FILES), key=lambda i: len(files[i]))
        files[shortest] += topic

    unfinished = folder.with_name(f"{folder.name}.unfinished-{os.getpid()}")
    unfinished.mkdir(parents=True)
    for i, text in enumerate(files):
        (unfinished / f"train-{i:02}.txt").write_text(text, encoding="utf-8")
    (unfinished / "validation.txt").write_text(validation, encoding="utf-8")
    characters = sorted(set("".join(topics.values())))
    (unfinished / "characters.txt").write_text("".join(characters), encoding="utf-8")
    unfinished.rename(folder)


def main() -> None:
    options = parse_arguments()
    torch.manual_seed(options.seed)
    strategy = ms.MultiWorkerMirroredStrategy(
        communication_options=ms.CommunicationOptions(
            wire_dtype=options.wire_dtype,
            wire_format=None if options.top_k is None else TopK(options.top_k),
        )
    )
    communicator = strategy.extended.communicator
    first_rank = communicator.rank == 0

    # Rank 0 writes what the others read.
    folder = options.data or options.checkpoint.with_name(options.checkpoint.name + "_data")
    if first_rank:
        write_text(folder)
    communicator.barrier(label="files of text")

    text = Text(folder)
    with strategy.scope():
        model = Transformer(len(text.characters))
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up_then_decay)
    training = strategy.experimental_distribute_dataset(
        ms.input.FileDataset(
            text.training,
            text.shuffled_windows,
            options.batch_size,
            shuffle=True,
            seed=options.seed,
        )
    )
    validation = strategy.experimental_distribute_dataset(
        ms.input.BatchedDataset(text.windows(text.validation), options.batch_size)
    )
    checkpoint = ms.checkpoint.Checkpoint(
        model=model, optimizer=optimizer, schedule=schedule, data=training
    )
    manager = ms.checkpoint.CheckpointManager(checkpoint, options.checkpoint, keep=1)
    resumed = options.resume and manager.restore_or_initialize() is not None
    done = schedule.last_epoch  # steps

    def bits(batch: Batch) -> torch.Tensor:
        """Per example. A rank whose files are read to the end gets batches of no examples until all are."""
        windows, following = batch
        logits = model(windows).transpose(1, 2)
        losses = functional.cross_entropy(logits, following, reduction="none").mean(dim=1)
        return losses / math.log(2)

    def train_step(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        per_example = bits(batch)
        loss = ms.compute_average_loss(per_example, global_batch_size=options.batch_size)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        return sum_and_count(per_example)

    def validation_step(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        return sum_and_count(bits(batch))

    def total(step: Callable[[Batch], Any], batch: Batch) -> tuple[float, int]:
        """Bits per character, summed over the examples of all ranks, and how many examples they were."""
        results = strategy.run(step, args=(batch,))
        summed, count = strategy.reduce(ms.ReduceOp.SUM, results, axis=None)
        return summed.item(), int(count)

    @torch.no_grad()
    def validate() -> float:
        return mean([total(validation_step, batch) for batch in validation])

    bar = tqdm(total=options.steps, initial=done, unit="step", disable=not first_rank)

    def report(step: int, figures: str) -> None:
        if first_rank:
            bar.write(f"step {step:4}/{options.steps}  {figures} bits per character")

    if resumed:
        report(done, f"resumed, validation {validate():.3f}")
    else:
        report(0, f"validation {validate():.3f}")
    since_report: list[tuple[float, int]] = []
    for step, batch in zip(range(done + 1, options.steps + 1), forever(training), strict=False):
        since_report.append(total(train_step, batch))
        bar.set_postfix_str(f"{mean(since_report[-1:]):.2f} bits/character", refresh=False)
        bar.update()
        if step % options.every == 0 or step == options.steps:
            report(step, f"training {mean(since_report):.3f}, validation {validate():.3f}")
            since_report.clear()
            manager.save(step, wait=False)
    bar.close()
    if first_rank:
        if options.explain:
            print(strategy.extended.explain())
        print(f"A sample:\n{text.decode(sample(model, 300, options.seed))}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000, help="those before a restart included")
    parser.add_argument("--batch-size", type=int, default=32, help="global: all ranks together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--every", type=int, default=100, help="steps between validations, and between checkpoints"
    )
    parser.add_argument("--checkpoint", type=Path, default=Path("train_text"), help="folder")
    parser.add_argument(
        "--resume",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="go on from the checkpoint if there is one (default), or begin anew",
    )
    parser.add_argument(
        "--data",
        type=Path,
        help="folder of the text files, on all nodes; default: by the checkpoint",
    )
    wire = parser.add_mutually_exclusive_group()
    wire.add_argument("--wire-dtype", help="in which gradients cross a network: bfloat16, float16")
    wire.add_argument("--top-k", type=float, help="fraction of them that crosses, the largest")
    parser.add_argument("--explain", action="store_true", help="print how values travelled")
    return parser.parse_args()


def warm_up_then_decay(step: int) -> float:
    """Of the learning rate; it does not depend on --steps, so that more of them may follow later."""
    return min((step + 1) / WARM_UP, math.sqrt(WARM_UP / (step + 1)))


def sum_and_count(per_example: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return per_example.detach().sum(), torch.tensor(len(per_example))


def mean(totals: Sequence[tuple[float, int]]) -> float:
    return sum(summed for summed, _ in totals) / sum(count for _, count in totals)


def forever(epochs: Iterable[Batch]) -> Iterator[Batch]:
    while True:
        batch = None
        for batch in epochs:
            yield batch
        if batch is None:
            raise ValueError("no file is as long as a window: there is nothing to train on")


@torch.no_grad()
def sample(model: nn.Module, length: int, seed: int) -> list[int]:
    """Characters drawn one by one, as the model expects them after those before, beginning with a new line."""
    generator = torch.Generator().manual_seed(seed)
    drawn = [0]
    while len(drawn) <= length:
        logits = model(torch.tensor([drawn[-WINDOW:]]))[0, -1]
        drawn += torch.multinomial(logits.softmax(0), 1, generator=generator).tolist()
    return drawn[1:]


if __name__ == "__main__":
    main()
