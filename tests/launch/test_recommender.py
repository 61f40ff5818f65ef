"""The recommender example: workers that train each by itself, or together, with embeddings on servers."""

import re
import sys
from pathlib import Path

import pytest

from support.harness.mpi_launcher import Job, Launcher, run_job

TRAIN = Path(__file__).parents[2] / "scripts" / "train_recommender.py"
SECONDS = 300  # for a run, on a busy machine
EPOCHS, STEPS = 6, 6 * 87
# Than the root mean square error of the means, 0.894: ten asynchronous runs were so by 0.0125 to 0.0151.
BETTER_BY = 0.01


def losses(job: Job) -> list[float]:
    return [float(loss) for loss in re.findall(r"^epoch .* loss ([0-9.]+)", job.stdout, re.M)]


def errors_in_test(job: Job) -> tuple[float, float]:
    """Of the model, and of the means."""
    found = re.findall(r"^Test RMSE ([0-9.]+); ([0-9.]+) by the means", job.stdout, re.M)
    ((error, by_means),) = found
    return float(error), float(by_means)


@pytest.mark.long("A server and workers train together, until the error can be compared.")
@pytest.mark.time_limit(SECONDS + 30)
@pytest.mark.parametrize(("servers", "arguments"), [(1, ()), (2, ("--max-staleness", "0"))])
def test_it_learns(launcher: Launcher, servers: int, arguments: tuple[str, ...]) -> None:
    """More than how high people rate, and films are rated; worker 0 tells how all workers fare."""
    options = ["--epochs", str(EPOCHS), "--num-ps", str(servers), *arguments]
    shown = ["--display", "lines", "--every", "1"]
    job = launcher.run_python(4, TRAIN, *options, *shown, seconds=SECONDS, forked=True)
    assert job.returncode == 0, job.output
    assert job.left_behind == ()

    curve = losses(job)
    assert len(curve) == EPOCHS
    assert curve[-1] < curve[0]
    error, by_means = errors_in_test(job)
    assert by_means == pytest.approx(0.8944, abs=1e-4)
    assert error < by_means - BETTER_BY

    workers = [f"worker {i} (rank {i})" for i in range(4 - servers)]
    lines = [line for line in job.stdout.splitlines() if re.search(r": step \d+/", line)]
    assert len(lines) > 1
    # Of each worker at its own end: the curve ends when worker 0 does, which may be far ahead of the others.
    last = [float(loss) for loss in re.findall(rf"step {STEPS}/{STEPS}, loss ([0-9.]+)", lines[-1])]
    assert len(last) == len(workers)
    assert sum(last) / len(last) < 0.85 * by_means**2
    for line in lines:
        assert re.findall(r"(worker \d \(rank \d\)): step \d+/522, loss [0-9.]+", line) == workers
    for worker in workers:
        assert f"{worker}: step {STEPS}/{STEPS}, loss " in lines[-1]
        (numbers,) = re.findall(
            rf"^{re.escape(worker)}: {STEPS} steps, at most (\d+) ahead of the slowest; "
            r"([0-9.]+) MB/s pulled, ([0-9.]+) MB/s pushed$",
            job.stdout,
            re.M,
        )
        lead, pulled, pushed = map(float, numbers)
        assert lead == 0 or not arguments
        assert lead < STEPS
        assert pulled > 0.01
        assert pushed > 0.01


@pytest.mark.time_limit(SECONDS + 30)
def test_bars_are_redrawn_on_a_terminal() -> None:
    """Though ranks write to pipes. After too little training, the program fails."""
    launcher = Launcher.named("MPICH")
    in_terminal = (
        "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"
    )
    program = launcher.command(3, [sys.executable, str(TRAIN), "--epochs", "1"])
    job = run_job([sys.executable, "-c", in_terminal, *program], launcher.environment(), SECONDS)
    assert job.returncode == 1, job.output
    assert "That is no better than the means." in job.stdout
    assert job.left_behind == ()
    for worker in ("worker 0 (rank 0)", "worker 1 (rank 1)"):
        assert len(re.findall(rf"{re.escape(worker)}: .*?/87 \[.*?step/s", job.stdout)) > 1
    assert "\x1b[A" in job.stdout  # one line up
    assert ": step " not in job.stdout
