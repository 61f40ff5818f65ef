"""Ranks of jobs with parameter servers are killed: under Open MPI's ULFM the others go on, elsewhere the job ends."""

import contextlib
import os
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from launch.fault_jobs import DIED
from support.clusters import two_nodes
from support.harness.mpi_launcher import Job, Launcher

pytestmark = [pytest.mark.both_mpis("faults"), pytest.mark.alone("shared memory")]

PROGRAM = Path(__file__).parent / "programs" / "parameter_server_faults.py"
RESTART = PROGRAM.with_name("parameter_server_restart.py")
SAVING = PROGRAM.with_name("parameter_server_saving.py")
WORKERS, SERVERS = 6, 2
REPLICATED_SERVERS = 3
KILLS = WORKERS - 1  # in a job: one worker goes on
SECONDS = 90.0  # for a job, on a busy machine; each rank shows its stack before
SECONDS_TO_BE_REMOVED = 10.0
SECONDS_TO_END = 20.0  # with starting it


class FaultTolerant(Launcher):
    def command(self, ranks: int, program: Sequence[str]) -> list[str]:
        return super().command(ranks, ["--with-ft", "ulfm", *program])


@pytest.fixture(autouse=True)
def nothing_is_left_in_memory() -> Iterator[None]:
    before = in_memory()
    yield
    end = time.monotonic() + SECONDS_TO_BE_REMOVED
    while left := in_memory() - before - mapped_by_somebody():
        assert time.monotonic() < end, left
        time.sleep(0.1)


def in_memory() -> set[str]:
    """Files in shared memory, those of the jobs' folders, too."""
    return {str(path) for path in Path("/dev/shm").rglob("*") if not path.is_dir()}


def mapped_by_somebody() -> set[str]:
    """Of those: other jobs may run on this machine."""
    found: set[str] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            found |= set(re.findall(r"/dev/shm/\S+", maps.read_text(errors="replace")))
    folders = {os.path.dirname(path) for path in found} - {"/dev/shm"}
    locks = {f"{folder}.lock" for folder in folders}
    return {
        file for file in in_memory() if file in found | locks or os.path.dirname(file) in folders
    }


def run(folder: Path, ranks: int, *words: str | int, forked: bool = False) -> Job:
    launcher = FaultTolerant.named("Open MPI")
    arguments = [str(word) for word in words]
    job = launcher.run_python(
        ranks, PROGRAM, *arguments, seconds=SECONDS, cwd=folder, forked=forked
    )
    assert job.left_behind == (), job.output
    return job


def went_on(folder: Path, what: str, seed: int, kills: int, workers: int = WORKERS) -> Job:
    """A job of which so many workers were killed, each of which is told of once."""
    servers = REPLICATED_SERVERS if what.startswith("replicated") else SERVERS
    ranks = workers + servers + what.endswith("closures")
    folder = folder / str(seed)
    folder.mkdir()
    job = run(folder, ranks, what, seed, kills)
    assert job.returncode == 0, job.output
    assert "Traceback" not in job.output, job.output
    deaths = re.findall(r"worker (\d) \(rank \d\) has died", job.stderr)
    assert len(deaths) == len(set(deaths)) == kills, job.output
    return job


@pytest.mark.parametrize(
    "kills", [3, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.time_limit(7200)])]
)
def test_workers_of_a_coordinator_are_killed(tmp_path: Path, kills: int) -> None:
    """Every closure's updates are applied once, whoever dies in it, wherever."""
    for seed, killed in enumerate(range(0, kills, KILLS)):
        now = min(KILLS, kills - killed)
        job = went_on(tmp_path, "closures", seed, now)
        assert f"{now} workers killed: all is exact" in job.stdout, job.output


@pytest.mark.parametrize(
    "kills", [3, pytest.param(100, marks=[pytest.mark.slow, pytest.mark.time_limit(3600)])]
)
def test_workers_that_train_by_themselves_are_killed(tmp_path: Path, kills: int) -> None:
    """The others are not held back, and what was answered is applied."""
    for seed, killed in enumerate(range(0, kills, KILLS)):
        now = min(KILLS, kills - killed)
        job = went_on(tmp_path, "steps", seed, now)
        assert job.stdout.count(f"is done after {now} deaths") == WORKERS - now, job.output


@pytest.mark.parametrize("what", ["closures", "steps"])
def test_workers_are_killed_whose_messages_go_by_mpi(
    tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As between nodes: the death is known by MPI, and what was sent may come after it."""
    monkeypatch.setenv("MPISTRAT_SHARED_MB", "0")
    went_on(tmp_path, what, 100, 3)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_workers_on_two_nodes_are_killed(tmp_path: Path, seed: int) -> None:
    if reason := two_nodes.why_not():
        pytest.skip(reason)
    words = PROGRAM, "closures", str(seed), "4"
    with two_nodes.two_nodes(tmp_path) as nodes:
        job = nodes.run_python(FaultTolerant.named("Open MPI"), 4, *words, seconds=SECONDS)
    assert job.returncode == 0, job.output
    assert job.left_behind == ()
    assert "4 workers killed: all is exact" in job.stdout, job.output


def test_the_chief_is_killed(tmp_path: Path) -> None:
    job = run(tmp_path, 5, "chief", 0)
    assert job.returncode != 0
    assert job.seconds < SECONDS_TO_END
    assert "Traceback" not in job.output, job.output
    message = rf"rank 0 of 5 .* ({DIED})|chief 0 \(rank 0\) has died"
    assert re.search(message, job.stderr), job.output


def test_a_server_is_killed(tmp_path: Path) -> None:
    """What is scheduled fails, and names what is lost; the program may still end as it likes."""
    job = run(tmp_path, 5, "server", 0)
    assert job.returncode == 0, job.output
    said = "ps 0 (rank 3) has died, and with it 'first': the job must be started again"
    said += ", and it has no checkpoint of a CheckpointManager"
    assert job.stdout.count(f"UnavailableError: {said}") == 3, job.output
    assert "the chief goes on" in job.stdout
    assert job.stderr.count(said) == 1, job.output


def test_a_server_of_workers_that_train_by_themselves_is_killed(tmp_path: Path) -> None:
    """Reading and pushing what it kept fails, on every worker; the rest is there."""
    job = run(tmp_path, 5, "server of steps", 0)
    assert job.returncode == 0, job.output
    said = "UnavailableError: ps 1 (rank 4) has died, and with it 'second'"
    assert job.stdout.count(said) == 3, job.output
    assert job.stdout.count("the worker goes on") == 3


@pytest.mark.parametrize("who", ["coordinator", "workers"])
def test_a_job_of_which_a_server_was_killed_goes_on_from_its_checkpoint(
    tmp_path: Path, who: str
) -> None:
    """It names that, and so does the job that is started again, with three servers instead of two."""
    launcher = FaultTolerant.named("Open MPI")
    job, again = (
        launcher.run_python(ranks, RESTART, who, servers, kill, seconds=SECONDS, cwd=tmp_path)
        for ranks, servers, kill in ((4, "2", "1"), (5, "3", "0"))
    )
    assert job.returncode == 0, job.output
    path = tmp_path / "checkpoints" / "step-00000000"
    said = re.escape(f"the job must be started again, from its last checkpoint, {path}") + "$"
    programs = 1 if who == "coordinator" else 2
    messages = re.findall(
        rf"^UnavailableError: ps 1 .* has died, and with it .*: {said}", job.stdout, re.M
    )
    assert len(messages) == programs, job.output
    assert len(re.findall(rf"^mpistrat: ps 1 .* has died, .*: {said}", job.stderr, re.M)) == 1
    assert again.returncode == 0, again.output
    assert again.stderr == f"mpistrat: the job goes on from {path}, with 3 parameter servers\n"
    counts = [20.0 * number for number in range(7)]
    assert again.stdout.count(f"goes on with {counts}\n") == programs, again.output


@pytest.mark.parametrize("kills", [1, 2])
def test_another_worker_saves_when_the_one_that_did_is_killed(tmp_path: Path, kills: int) -> None:
    launcher = FaultTolerant.named("Open MPI")
    job, again = (
        launcher.run_python(4, SAVING, str(number), seconds=SECONDS, cwd=tmp_path)
        for number in (kills, 0)
    )
    assert job.returncode == 0, job.output
    for worker in range(kills):
        others = f"{2 - worker} other worker{'s' * (worker == 0)}"
        message = (
            f"worker {worker} (rank {worker}) has died; the job goes on with {others}, and nobody reads its share of "
            f"the data; worker {worker + 1} (rank {worker + 1}) saves checkpoints from now on\n"
        )
        assert job.stderr.count(message) == 1, job.output
    (steps,) = re.findall(rf"worker {kills} has saved (\d+) steps", job.stdout)
    assert again.returncode == 0, again.output
    for worker in range(3):
        assert f"worker {worker} goes on after {steps} steps" in again.stdout, again.output
    assert f"worker {kills} goes on after {steps} steps, {steps}\n" in again.stdout, again.output


def test_all_workers_are_killed(tmp_path: Path) -> None:
    job = run(tmp_path, 5, "all workers", 0)
    assert job.returncode == 0, job.output
    assert job.stdout.count("UnavailableError: no worker is left") == 3, job.output
    assert "the chief goes on" in job.stdout


@pytest.mark.parametrize("jobs", [1, pytest.param(20, marks=pytest.mark.slow)])
def test_closures_that_train_are_executed_once(tmp_path: Path, jobs: int) -> None:
    for seed in range(jobs):
        job = went_on(tmp_path, "training closures", seed, 2, workers=3)
        assert "2 workers killed: all is exact" in job.stdout, job.output


SERVER_GOES_ON = r"ps \d \(rank \d\) has died; ps \d \(rank \d\) goes on with .*, of which there is no other copy now"


@pytest.mark.parametrize("what", ["replicated closures", "replicated steps"])
@pytest.mark.parametrize(
    "jobs", [2, pytest.param(40, marks=[pytest.mark.slow, pytest.mark.time_limit(3600)])]
)
def test_a_server_with_a_replica_and_workers_are_killed(
    tmp_path: Path, what: str, jobs: int
) -> None:
    """At any moment, one after the other: every count is exact."""
    for seed in range(jobs):
        job = went_on(tmp_path, what, seed, 2, workers=3)
        assert len(re.findall(SERVER_GOES_ON, job.stderr)) == 1, job.output
        message = (
            "2 workers killed: all is exact" if "closures" in what else "is done after 3 deaths"
        )
        assert job.stdout.count(message) == 1, job.output


@pytest.mark.parametrize("what", ["replicated closures", "replicated steps"])
def test_a_server_is_killed_whose_messages_go_by_mpi(
    tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MPISTRAT_SHARED_MB", "0")
    job = went_on(tmp_path, what, 100, 1, workers=3)
    assert len(re.findall(SERVER_GOES_ON, job.stderr)) == 1, job.output


def test_training_goes_on_with_the_same_bits_when_a_server_is_killed(tmp_path: Path) -> None:
    """The replica has the optimizer's state, too."""
    weights = set()
    for kills in (0, 1):
        folder = tmp_path / str(kills)
        folder.mkdir()
        job = run(folder, 5, "training", 3, kills, forked=kills == 0)
        assert job.returncode == 0, job.output
        digests = re.findall(r"^weights (\w+)$", job.stdout, re.M)
        assert len(digests) == 3, job.output
        weights.update(digests)
        assert bool(re.search(SERVER_GOES_ON, job.stderr)) == bool(kills), job.output
    assert len(weights) == 1


@pytest.mark.parametrize(
    "jobs", [2, pytest.param(40, marks=[pytest.mark.slow, pytest.mark.time_limit(3600)])]
)
def test_what_is_saved_while_a_server_is_killed_was_so_at_one_time(
    tmp_path: Path, jobs: int
) -> None:
    for seed in range(jobs):
        job = run(tmp_path, 6, "looks", seed, 1)
        assert job.returncode == 0, job.output
        assert "updates, none torn" in job.stdout, job.output
        assert re.search(SERVER_GOES_ON, job.stderr), job.output


def test_a_server_and_its_replica_are_killed(tmp_path: Path) -> None:
    """What only these two had is lost, and named; the rest is there."""
    job = run(tmp_path, 6, "both copies", 0)
    assert job.returncode == 0, job.output
    said = r"UnavailableError: ps [01] \(rank [34]\) has died, and with it 'first': the job must be started again"
    assert len(re.findall(said, job.stdout)) == 3, job.output
    assert job.stdout.count("the worker goes on with 3") == 3, job.output
    assert "what is lost is saved" not in job.stdout


@pytest.mark.parametrize("what", ["closures", "steps"])
def test_without_fault_tolerant_mpi_the_job_ends(
    launcher: Launcher, tmp_path: Path, what: str
) -> None:
    job = launcher.run_python(5, PROGRAM, what, "0", "1", seconds=SECONDS, cwd=tmp_path)
    assert job.returncode != 0
    assert job.seconds < SECONDS_TO_END
    assert job.left_behind == ()
    assert "Traceback" not in job.output, job.output
    assert re.search(rf"rank \d of 5 .* ({DIED})", job.stderr), job.output
