"""Parameter servers beside TensorFlow's on loopback: dense and sparse pulls and pushes, and empty closures.

    mpiexec -n 3 python benchmarks/parameter_server.py      # a chief, a worker and a server

TensorFlow runs in three processes of its own (tensorflow_parameter_server.py), which wait while mpistrat's ranks have
their turn, and the other way round. Steps of a turn are scheduled at once. *Copy*: the chief copies as many bytes as
are pulled, once, in its own memory.
"""

from __future__ import annotations

import itertools
import json
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from program import program
from tensorflow_parameter_server import ROWS, TOUCHED, WIDTH, Work, seconds_of

import mpistrat as ms
from mpistrat.tools.bench.report import surroundings, table_report
from mpistrat.tools.bench.rounds import SECONDS_PER_TURN, all_ranks, medians, take_turns

OURS = "mpistrat"
PEER = "TensorFlow"
COPY = "copy"
SECONDS_PER_ANSWER = 60.0


def dense(coordinator: Any, nbytes: int) -> Work:
    """As tensorflow_parameter_server.dense."""
    delta = np.ones(nbytes // 4, np.float32)
    with coordinator.strategy.scope():
        variable = ms.Variable(np.zeros_like(delta))

    def step(deltas: Any) -> float:
        value = variable.read_value()
        variable.assign_add(next(deltas))
        return float(value[0])

    def wrong(steps: int) -> bool:
        return bool((np.asarray(variable.read_value()) != steps).any())

    def deltas() -> Iterator[Any]:
        return itertools.repeat(delta)

    ones = coordinator.create_per_worker_dataset(deltas)
    return step, (iter(ones),), wrong


def sparse(coordinator: Any, _: int) -> Work:
    """As tensorflow_parameter_server.sparse."""
    indices = np.random.default_rng(0).choice(ROWS, TOUCHED, replace=False)
    delta = np.ones((TOUCHED, WIDTH), np.float32)
    with coordinator.strategy.scope():
        rows = ms.Variable(np.zeros((ROWS, WIDTH), np.float32))

    def step(batches: Any) -> float:
        places, deltas = next(batches)
        value = rows.sparse_read(places)
        rows.scatter_sub(ms.IndexedSlices(deltas, places))
        return float(value[0, 0])

    def wrong(steps: int) -> bool:
        there = np.asarray(rows.read_value())
        right = bool((there[indices] == -steps).all())
        return not right or int(np.count_nonzero(there)) != TOUCHED * WIDTH

    def batches() -> Iterator[Any]:
        return itertools.repeat((indices, delta))

    dataset = coordinator.create_per_worker_dataset(batches)
    return step, (iter(dataset),), wrong


def empty(coordinator: Any, _: int) -> Work:
    def nothing() -> None:
        pass

    return nothing, (), lambda steps: False


WORKS = {"dense": dense, "sparse": sparse, "empty": empty}
# Work, bytes that are pulled, what to call it.
ROWS_OF_TABLE = (
    ("dense", 1 << 20, "pull + push of 1 MB"),
    ("dense", 1 << 24, "pull + push of 16 MB"),
    ("dense", 1 << 26, "pull + push of 64 MB"),
    ("sparse", TOUCHED * WIDTH * 4, f"{TOUCHED:,} of {ROWS:,} rows x {WIDTH}"),
    ("empty", 0, "an empty closure"),
)


class Ours:
    """Takes steps of one work, and knows how many it has taken."""

    def __init__(self, coordinator: Any, name: str, nbytes: int) -> None:
        self.coordinator = coordinator
        self.work = WORKS[name](coordinator, nbytes)
        self.taken = 0

    def take(self, steps: int) -> float:
        self.taken += steps
        return seconds_of(self.coordinator, self.work, steps)

    def wrong(self) -> bool:
        _, _, wrong = self.work
        return wrong(self.taken)


class TensorFlow:
    """Its processes, asked by lines."""

    def __init__(self, python: str) -> None:
        self._noise = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process: Any = subprocess.Popen(
            [python, str(Path(__file__).with_name("tensorflow_parameter_server.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._noise,
            text=True,
        )
        self.left_out = self._answer().get("left_out")

    def ask(self, **request: Any) -> dict[str, Any]:
        print(json.dumps(request), file=self._process.stdin, flush=True)
        return self._answer()

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(SECONDS_PER_ANSWER)

    def _answer(self) -> dict[str, Any]:
        output = self._process.stdout
        ready, _, _ = select.select([output], [], [], SECONDS_PER_ANSWER)
        line = output.readline() if ready else ""
        if not line:
            self._process.kill()
            self._noise.seek(0)
            raise RuntimeError(f"TensorFlow gave no answer: {self._noise.read()[-2000:]}")
        return json.loads(line)


Take = Callable[[int], float]  # the seconds that so many steps take


def copying(nbytes: int) -> Take:
    source = np.ones(nbytes // 4, np.float32)
    target = source.copy()

    def take(steps: int) -> float:
        started = time.perf_counter()
        for _ in range(steps):
            np.copyto(target, source)
        return time.perf_counter() - started

    return take


def turn_of(take: Take) -> Callable[[], float]:
    """Microseconds per step, of as many steps as make a turn."""
    steps = 1
    take(steps)  # the first is prepared for
    while take(steps) < SECONDS_PER_TURN:
        steps *= 2
    return lambda: take(steps) / steps * 1e6


def row(
    coordinator: Any, peer: TensorFlow | None, work: str, nbytes: int, name: str, num_rounds: int
) -> dict[str, Any]:
    ours = Ours(coordinator, work, nbytes)
    contestants: dict[str, Take] = {OURS: ours.take}
    asked = {"work": work, "nbytes": nbytes}
    if peer is not None:
        contestants[PEER] = lambda steps: peer.ask(**asked, steps=steps)["seconds"]
    if nbytes:
        contestants[COPY] = copying(nbytes)
    turns = {who: turn_of(take) for who, take in contestants.items()}
    rounds = take_turns(turns, num_rounds)
    times = medians(rounds)
    wrong = ours.wrong()
    if peer is not None and not wrong:
        wrong = peer.ask(**asked, steps=0)["wrong"]
    per_second = {OURS: 1e6 / times[OURS]}
    ratios: dict[str, Any] = {f"{PEER} / {OURS}": "-", f"{OURS} / {COPY}": "-"}
    if peer is not None:
        per_second[PEER] = 1e6 / times[PEER]
        ratios[f"{PEER} / {OURS}"] = times[PEER] / times[OURS]
    if nbytes:
        ratios[f"{OURS} / {COPY}"] = times[OURS] / times[COPY]
    return {
        "step": name,
        **{f"{contestant} us": us for contestant, us in times.items()},
        **{f"{contestant} per second": steps for contestant, steps in per_second.items()},
        **ratios,
        "wrong": wrong,
        "samples": rounds,
    }


def main() -> int:
    parser = program(__doc__)
    parser.add_argument("--works", nargs="+", choices=WORKS, default=[*WORKS])
    parser.add_argument(
        "--tensorflow", metavar="PYTHON", default=sys.executable, help="which has TensorFlow (this)"
    )
    arguments = parser.parse_args()
    where = surroundings(all_ranks())
    strategy = ms.ParameterServerStrategy(num_ps=1)
    coordinator = ms.coordinator.ClusterCoordinator(strategy)  # only the chief comes here
    tensorflow = TensorFlow(arguments.tensorflow)
    peer = tensorflow if tensorflow.left_out is None else None
    left_out = {PEER: tensorflow.left_out} if tensorflow.left_out else {}
    rows = [
        row(coordinator, peer, work, nbytes, name, arguments.rounds)
        for work, nbytes, name in ROWS_OF_TABLE
        if work in arguments.works
    ]
    tensorflow.close()
    report = table_report("parameter server", rows, where, left_out)
    report.publish(arguments.json("parameter_server"))
    return int(report.wrong)


if __name__ == "__main__":
    sys.exit(main())
