"""Two workers, of which one takes ten times as long for a step: how much of it the fast one feels.

    mpiexec -n 3 python benchmarks/slow_worker.py                       # asynchronous
    mpiexec -n 3 python benchmarks/slow_worker.py --max-staleness 4     # the fast one may be so many steps ahead

Both train by themselves (compat.v1.ParameterServerStrategy) with a variable of 1 MB on a server: a step pulls it,
computes, and pushes as much. The slow worker sleeps instead, so that it takes the fast one no core. Asynchronous, the
fast one takes turns alone and beside it. With a bound it cannot be alone: both take as many steps, and at the beginning
of each of the fast one's it is counted how many more it has ended than the other, whose steps end before they push.
"""

from __future__ import annotations

import bisect
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI
from program import program

import mpistrat as ms
from mpistrat.tools.bench.report import surroundings, table_report
from mpistrat.tools.bench.rounds import all_ranks, medians

# Ranks, which are workers of these numbers.
FAST = 0
SLOW = 1
COMPUTE_SECONDS = 0.005
# With a pull and a push, a step of the fast worker takes about 6.4 ms.
SLOW_SECONDS = 0.063
STEPS = 100  # in a turn of the fast worker
SLOW_STEPS = 50  # with a bound
COUNT = (1 << 20) // 4
TITLE = "a worker beside one that is ten times slower"

# When the computation of a step began and ended: perf_counter, which one machine's ranks share.
Span = tuple[float, float]


def stepper(strategy: Any, busy_seconds: float, idle_seconds: float) -> Callable[[], Span]:
    with strategy.scope():
        zeros = np.zeros(COUNT, np.float32)
        variable = ms.Variable(zeros, aggregation=ms.VariableAggregation.SUM)
    delta = np.ones(COUNT, np.float32)
    matrix = np.ones((64, 64), np.float32)

    def replica_step() -> Span:
        began = time.perf_counter()
        variable.read_value()
        while time.perf_counter() < began + busy_seconds:
            matrix @ matrix
        time.sleep(idle_seconds)
        ended = time.perf_counter()
        variable.assign_add(delta)
        return began, ended

    return lambda: strategy.run(replica_step)


def receive(control: MPI.Intracomm, source: int) -> Any:
    """The next message; whoever waits for it sleeps."""
    while not control.iprobe(source=source):
        time.sleep(0.001)
    return control.recv(source=source)


def fast_alone_and_beside(
    control: MPI.Intracomm, step: Callable[[], Span], num_rounds: int
) -> dict[str, Any]:
    def steps_per_second() -> float:
        started = time.perf_counter()
        for _ in range(STEPS):
            step()
        return STEPS / (time.perf_counter() - started)

    samples: dict[str, list[float]] = {"alone": [], "beside": [], "slow": []}
    steps_per_second()
    for _ in range(num_rounds):
        samples["alone"].append(steps_per_second())
        control.send("go", SLOW)
        receive(control, SLOW)
        samples["beside"].append(steps_per_second())
        control.send("stop", SLOW)
        samples["slow"].append(receive(control, SLOW))
    control.send("end", SLOW)
    middle = medians(samples)
    return {
        "max_staleness": "none",
        "alone, steps per second": middle["alone"],
        "beside the slow one": middle["beside"],
        "beside / alone": middle["beside"] / middle["alone"],
        "the slow one": middle["slow"],
        "samples": samples,
    }


def slow_when_asked(control: MPI.Intracomm, step: Callable[[], Span]) -> None:
    while receive(control, FAST) == "go":
        step()
        control.send("going", FAST)
        started = time.perf_counter()
        steps = 0
        while not control.iprobe(source=FAST):
            step()
            steps += 1
        receive(control, FAST)
        control.send(steps / (time.perf_counter() - started), FAST)


def fast_within_bound(
    control: MPI.Intracomm, step: Callable[[], Span], max_staleness: int
) -> dict[str, Any]:
    spans = [step() for _ in range(SLOW_STEPS)]
    slow: list[Span] = receive(control, SLOW)
    slow_ends = [ended for _, ended in slow]
    ahead = []
    for done, (began, _) in enumerate(spans):
        ahead.append(done - bisect.bisect(slow_ends, began))
    return {
        "max_staleness": max_staleness,
        "fast one, steps per second": SLOW_STEPS / (spans[-1][1] - spans[0][0]),
        "the slow one": SLOW_STEPS / (slow[-1][1] - slow[0][0]),
        "steps ahead at most": max(ahead),
        "wrong": max(ahead) > max_staleness,
        "samples": {"ahead": ahead, "fast": spans, "slow": slow},
    }


def main() -> int:
    parser = program(__doc__)
    parser.add_argument("--max-staleness", type=int)
    arguments = parser.parse_args()
    where = surroundings(all_ranks())
    control = MPI.COMM_WORLD.Dup()
    bound = arguments.max_staleness
    strategy = ms.compat.v1.ParameterServerStrategy(num_ps=1, max_staleness=bound)
    # Only the workers come here.
    if control.rank == SLOW:
        step = stepper(strategy, 0, SLOW_SECONDS)
        if bound is None:
            slow_when_asked(control, step)
        else:
            control.send([step() for _ in range(SLOW_STEPS)], FAST)
        return 0
    step = stepper(strategy, COMPUTE_SECONDS, 0)
    if bound is None:
        row = fast_alone_and_beside(control, step, arguments.rounds)
        name = "slow_worker"
    else:
        row = fast_within_bound(control, step, bound)
        name = f"slow_worker-{bound}"
    report = table_report(TITLE, [row], where)
    report.publish(arguments.json(name))
    return int(report.wrong)


if __name__ == "__main__":
    sys.exit(main())
