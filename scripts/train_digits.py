"""Train a small CNN on scikit-learn's 1,797 scans of handwritten digits.

The same script on any number of ranks: `python scripts/train_digits.py`, `mpirun -n 4 python …`, `srun python …`;
`--strategy tpu` is for TPUs, and runs without one where PJRT_DEVICE=CPU is set.
It ends with exit code 1 if fewer than 97 % of the test scans are read right.
"""

import argparse
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

import mpistrat as ms
from mpistrat.wire_formats import TopK

REQUIRED_ACCURACY = 0.97
STRATEGIES = {"multi-worker": ms.MultiWorkerMirroredStrategy, "tpu": ms.TPUStrategy}
Batch = tuple[torch.Tensor, ...]


def build_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def load_data(batch_size: int, seed: int) -> tuple[DataLoader[Batch], DataLoader[Batch]]:
    """Loaders of GLOBAL batches, in the same order on every rank, for training and for the test."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).div(16).unsqueeze(1)
    labels = torch.tensor(digits.target)
    chosen, held_out = train_test_split(
        range(len(labels)), test_size=0.2, stratify=digits.target, random_state=seed
    )
    train = TensorDataset(images[chosen], labels[chosen])
    test = TensorDataset(images[held_out], labels[held_out])
    order = torch.Generator().manual_seed(seed)
    return (
        DataLoader(train, batch_size, shuffle=True, drop_last=True, generator=order),
        DataLoader(test, batch_size=len(test)),
    )


def main() -> int:
    options = parse_arguments()
    torch.manual_seed(options.seed)
    strategy = STRATEGIES[options.strategy](
        communication_options=ms.CommunicationOptions(
            wire_dtype=options.wire_dtype,
            wire_format=None if options.top_k is None else TopK(options.top_k),
        )
    )
    resolver = strategy.cluster_resolver
    first_rank = resolver is None or resolver.topology().rank == 0

    with strategy.scope():
        model = build_model()
        optimizer = torch.optim.Adam(model.parameters(), lr=options.lr)
    train_loader, test_loader = load_data(options.batch_size, options.seed)
    steps = options.epochs * len(train_loader)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.lr, total_steps=steps)

    def train_step(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        images, labels = batch
        logits = model(images)
        loss = ms.compute_average_loss(
            functional.cross_entropy(logits, labels, reduction="none"),
            global_batch_size=options.batch_size,
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        return loss, count_right(logits, labels)

    def test_step(batch: Batch) -> torch.Tensor:
        images, labels = batch
        return count_right(model(images), labels)

    def train_epoch(epoch: int) -> tuple[float, float]:
        model.train()
        batches = strategy.experimental_distribute_dataset(train_loader)
        bar = progress(batches, len(train_loader), f"epoch {epoch}/{options.epochs}", first_rank)
        losses, right = 0.0, 0
        for batch in bar:
            results = strategy.run(train_step, args=(batch,))
            loss, correct = strategy.reduce(ms.ReduceOp.SUM, results, axis=None)
            losses += loss.item()
            right += int(correct)
        return losses / len(train_loader), right / (len(train_loader) * options.batch_size)

    @torch.no_grad()
    def test_accuracy() -> float:
        model.eval()
        right = 0
        for batch in strategy.experimental_distribute_dataset(test_loader):
            correct = strategy.run(test_step, args=(batch,))
            right += int(strategy.reduce(ms.ReduceOp.SUM, correct, axis=None))
        return right / len(test_loader.dataset)  # type: ignore[arg-type]

    history = []
    accuracy = 0.0
    for epoch in range(1, options.epochs + 1):
        started = time.perf_counter()
        loss, train_accuracy = train_epoch(epoch)
        speed = len(train_loader) * options.batch_size / (time.perf_counter() - started)
        accuracy = test_accuracy()
        history.append((loss, train_accuracy, accuracy))
        if first_rank:
            print(
                f"epoch {epoch:2}/{options.epochs}  loss {loss:.4f}  "
                f"accuracy {train_accuracy:.4f} training, {accuracy:.4f} test  "
                f"{speed:,.0f} samples/s",
                flush=True,
            )

    if first_rank:
        if options.explain:
            print(strategy.extended.explain())
        plot(history, options.out, strategy.num_replicas_in_sync)
        print(f"Test accuracy {accuracy:.4f}; learning curve in {options.out}")
        if accuracy < REQUIRED_ACCURACY:
            print(f"That is below the {REQUIRED_ACCURACY} that is expected.", file=sys.stderr)
    strategy.barrier()  # a rank that exits with 1 while rank 0 still plots would end the job
    return int(accuracy < REQUIRED_ACCURACY)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--strategy", choices=STRATEGIES, default="multi-worker")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=64, help="global: all ranks together")
    parser.add_argument("--lr", type=float, default=5e-3, help="highest learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("learning_curve.png"))
    wire = parser.add_mutually_exclusive_group()
    wire.add_argument("--wire-dtype", help="in which gradients cross a network: bfloat16, float16")
    wire.add_argument("--top-k", type=float, help="fraction of them that crosses, the largest")
    parser.add_argument("--explain", action="store_true", help="print how values travelled")
    return parser.parse_args()


def count_right(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (logits.argmax(dim=1) == labels).sum()


def progress(batches: Iterable[Batch], steps: int, title: str, first_rank: bool) -> Iterable[Batch]:
    """A bar on rank 0 only; it goes when the epoch's line is printed."""
    bar: Iterable[Batch] = tqdm(
        batches, title, steps, leave=False, unit="step", disable=not first_rank
    )
    return bar


def plot(history: Sequence[tuple[float, float, float]], path: Path, replicas: int) -> None:
    import matplotlib as mpl

    mpl.use("Agg")  # no screen on a compute node
    from matplotlib import pyplot as plt

    epochs = range(1, len(history) + 1)
    losses, train, test = zip(*history, strict=True)
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    left.plot(epochs, losses, marker="o")
    left.set(xlabel="epoch", ylabel="cross-entropy", title="Training loss", yscale="log")
    right.plot(epochs, train, marker="o", label="training")
    right.plot(epochs, test, marker="s", label="test")
    right.axhline(REQUIRED_ACCURACY, color="grey", linestyle="--", label=f"{REQUIRED_ACCURACY:.0%}")
    right.set(xlabel="epoch", ylabel="scans read right", title="Accuracy")
    right.yaxis.set_major_formatter(mpl.ticker.PercentFormatter(1))
    right.legend()
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.xaxis.get_major_locator().set_params(integer=True)
    figure.suptitle(f"Handwritten digits, {replicas} replica{'s'[: replicas > 1]} in sync")
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    sys.exit(main())
