"""torch's own groups as a transport, on the simulated accelerator: how collectives end, start, hang and fail."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from support.harness.mpi_launcher import Job, Launcher

pytestmark = pytest.mark.usefixtures("simulated_accelerator")

PROGRAM = Path(__file__).parent / "programs" / "native_groups.py"
COLLECTIVES = (
    *("reductions", "rounding_scale_and_out", "reduce_and_reduce_scatter", "copies"),
    *("side_streams", "batch_norm", "captures", "mismatches", "many_calls", "failures"),
)
LIMIT = 2.0
WATCHDOG = "an aborted group waits for its watchdog"  # which no end of a process may wait for


def run(
    launcher: Launcher,
    folder: Path,
    ranks: int,
    *words: str,
    forked: bool = True,
    **settings: str,
) -> Job:
    env = {"SIMULATED_DEVICES": "1", **settings}
    return launcher.run_python(ranks, PROGRAM, *words, env=env, cwd=folder, forked=forked)


def check(job: Job, *cases: str) -> None:
    assert job.returncode == 0, job.output
    lines = job.stdout.splitlines()
    assert [line for line in lines if line.startswith("done")] == [f"done {case}" for case in cases]
    assert WATCHDOG not in job.output, job.output
    assert "Traceback" not in job.output, (
        job.output
    )  # as torch's watchdog prints where a link dies unannounced


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_collectives(launcher: Launcher, tmp_path: Path, ranks: int) -> None:
    """Right results, in order, and the host waits for none; an error of one rank is one of all."""
    check(run(launcher, tmp_path, ranks, "collectives"), *COLLECTIVES)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_starts_that_fail(launcher: Launcher, tmp_path: Path, ranks: int) -> None:
    """All ranks take the same other way, soon. The first says once which rank failed, why, and what to do."""
    job = run(launcher, tmp_path, ranks, "starts", MPISTRAT_START_SECONDS="4")
    check(job, "missing", "constructor", "connect", "sum", "hang")


@pytest.mark.waits
@pytest.mark.parametrize("then", ["end", "raise"])
def test_kernels_that_never_end(launcher: Launcher, tmp_path: Path, then: str) -> None:
    """The call has returned, and the program waits for its device: a stall of that call, at its line."""
    limits = {"MPISTRAT_STALL_SECONDS": f"{LIMIT:g}", "MPISTRAT_ON_STALL": then}
    job = run(launcher, tmp_path, 2, "stall", forked=False, **limits)
    assert job.returncode != 0, job.output
    assert job.stdout.count("returned") == 2, job.output
    assert "all ranks have come to it, but it does not end" in job.output
    call = "all_reduce(sum, float32 on a GPU, (6,), gradients of the model)"
    assert f"ranks 0, 1 wait in collective number 1: {call}\n      at {PROGRAM}:" in job.output
    assert "in synchronize" in job.output
    assert (job.stdout.count("released") > 0) == (then == "raise"), job.output
    assert ("mpistrat.errors.StallError: ranks have waited" in job.output) == (then == "raise")
    assert WATCHDOG not in job.output, job.output
    assert job.left_behind == ()


@pytest.mark.waits
def test_a_kernel_has_one_number(launcher: Launcher, tmp_path: Path) -> None:
    """The rank that was killed and the rank that waits name the same call, by the same number."""
    job = run(launcher, tmp_path, 2, "killed", forked=False, MPISTRAT_STALL_SECONDS="60")
    assert "rank 1 of 2" in job.output, job.output
    assert "was killed by SIGTERM" in job.output, job.output
    assert "it was in collective number 1, entered" in job.output, job.output
    assert "rank 0 waits in collective number 1: all_reduce(sum, float32 on a GPU" in job.output
    assert job.left_behind == ()


class ElasticLauncher(Launcher):
    def command(self, ranks: int, program: Sequence[str]) -> list[str]:
        return super().command(ranks, ["--with-ft", "ulfm", *program])


@pytest.mark.both_mpis("faults")
def test_a_rank_is_lost(tmp_path: Path) -> None:
    """The group is aborted before anybody hears of it: else the others would wait for their devices for ever."""
    launcher = ElasticLauncher.named("Open MPI")
    job = run(launcher, tmp_path, 3, "losses", forked=False)
    assert job.returncode == 0, job.output
    assert job.stdout.count("went on with 2") == 2, job.output
    assert "Traceback" not in job.output, job.output
    assert WATCHDOG not in job.output, job.output
    assert job.left_behind == ()
