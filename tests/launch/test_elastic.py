"""Ranks are killed, and training goes on with those that are left: under Open MPI's ULFM."""

import itertools
import json
import math
import platform
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from launch.fault_jobs import KERNEL
from mpistrat.checkpoint.directory import Directory
from mpistrat.checkpoint.stored_checkpoint import StoredCheckpoint
from support.clusters import two_nodes
from support.documentation import blocks_of, pattern_of
from support.harness.mpi_launcher import Job, Launcher
from support.trace_rules import valid_trace

pytestmark = pytest.mark.both_mpis("faults")

PROGRAM = Path(__file__).parent / "programs" / "elastic.py"
ENDINGS = PROGRAM.with_name("elastic_endings.py")
SAVING = PROGRAM.with_name("elastic_saving.py")
WORKERS = PROGRAM.with_name("elastic_workers.py")
DEFAULT_GROUP = PROGRAM.with_name("elastic_default_group.py")
RANKS, EXAMPLES, STEPS_OF_EPOCH, EPOCHS = 4, 96, 6, 4
SECONDS = 120.0
# Recovery takes less than a second; a loaded machine may take its time.
SECONDS_TO_GO_ON = 20.0
MEDIAN_SECONDS_TO_GO_ON = 2.0
QUICK_SEEDS = (3, 12, 1)  # in MPI, in a commit, and one more while the others recover
SEEDS = [
    pytest.param(seed, marks=() if seed in QUICK_SEEDS else pytest.mark.slow) for seed in range(20)
]
PLACES = ("forward", "window", "MPI", "overlap", "commit", "recovery")


class ElasticLauncher(Launcher):
    def command(self, ranks: int, program: Sequence[str]) -> list[str]:
        return super().command(ranks, ["--with-ft", "ulfm", *program])


def run(
    folder: Path, ranks: int, *words: str | Path, env: Mapping[str, str] = {}, forked: bool = False
) -> Job:
    """Reports are left in `folder`. The watch may accuse no rank."""
    launcher = ElasticLauncher.named("Open MPI")
    env = {"MPISTRAT_ON_DRIFT": "raise", **env}
    return launcher.run_python(ranks, *words, seconds=SECONDS, env=env, cwd=folder, forked=forked)


@dataclass(frozen=True)
class Trained:
    """What ranks that have come to the end trained: the same on all of them."""

    job: Job
    folder: Path
    ranks: set[int]
    digest: str
    loss: float

    @property
    def deterministic(self) -> bool:
        return json.loads((self.folder / "plan").read_text(encoding="utf-8"))["deterministic"]

    def times(self, name: str) -> list[float]:
        return [float(path.read_text(encoding="utf-8")) for path in self.folder.glob(f"{name}-*")]

    def examples_of_steps(self) -> list[list[int]]:
        """Those that counted: read when the step was done last."""
        steps: dict[int, dict[int, list[int]]] = {}
        for path in self.folder.glob("read-*"):
            for line in path.read_text(encoding="utf-8").splitlines():
                step, time, ids = json.loads(line)
                steps.setdefault(step, {}).setdefault(time, []).extend(ids)
        return [steps[step][max(steps[step])] for step in sorted(steps)]


def train(folder: Path, seed: int | str, *place: str) -> Trained:
    nobody_dies = seed == "-"
    job = run(folder, RANKS, PROGRAM, str(seed), folder, *place, forked=nobody_dies)
    assert job.returncode == 0, job.output
    assert job.left_behind == ()
    results = {
        int(path.name.removeprefix("result-")): json.loads(path.read_text(encoding="utf-8"))
        for path in folder.glob("result-*")
    }
    assert len({result["digest"] for result in results.values()}) == 1, job.output
    first = next(iter(results.values()))
    return Trained(job, folder, set(results), first["digest"], first["loss"])


@pytest.fixture(scope="module")
def recoveries() -> Iterator[list[float]]:
    """How many seconds they took; over all seeds of the slow run the median is small."""
    seconds: list[float] = []
    yield seconds
    if len(seconds) >= len(SEEDS):
        assert statistics.median(seconds) <= MEDIAN_SECONDS_TO_GO_ON, sorted(seconds)


Undisturbed = Callable[[bool], Trained]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """Training of which no rank is killed, deterministic or not."""
    known: dict[bool, Trained] = {}

    def of(deterministic: bool) -> Trained:
        if deterministic not in known:
            folder = tmp_path_factory.mktemp("undisturbed")
            known[deterministic] = train(folder, "-", "deterministic" if deterministic else "")
            assert known[deterministic].ranks == set(range(RANKS))
        return known[deterministic]

    return of


def assert_as_undisturbed(
    trained: Trained,
    undisturbed: Undisturbed,
    recoveries: list[float],
    record: Callable[[str, object], None],
) -> None:
    killed, went_on = trained.times("killed"), trained.times("went-on")
    assert killed, "nobody was killed"
    assert len(trained.ranks) == RANKS - len(killed)
    # How it died is known since Linux 6.15 only.
    assert trained.job.output.count("the others go on without it") == len(killed), (
        trained.job.output
    )
    seconds = max(went_on) - max(killed)
    record("seconds to go on", seconds)
    recoveries.append(seconds)
    assert seconds < SECONDS_TO_GO_ON
    if len(killed) == 1 and KERNEL >= (6, 15):  # an older one may forget how a process died
        (shown,) = (b.text for b in blocks_of("docs/elastic.md") if b.language == "text")
        # The page says that either line comes first: the node's observer prints one, a rank the other.
        for line in ("mpistrat:" + rest for rest in shown.split("mpistrat:")[1:]):
            line = line.replace("node7", platform.node())
            assert re.search(pattern_of(line), trained.job.stderr), trained.job.output
    left = " and ".join(sorted(map(str, trained.ranks)))
    assert re.search(
        rf"{len(trained.ranks)} of 4 ranks go on after step \d+ without", trained.job.output
    ), left
    steps = trained.examples_of_steps()
    assert len(steps) == STEPS_OF_EPOCH * EPOCHS
    for first in range(0, len(steps), STEPS_OF_EPOCH):
        epoch = itertools.chain.from_iterable(steps[first : first + STEPS_OF_EPOCH])
        assert sorted(epoch) == list(range(EXAMPLES))
    expected = undisturbed(trained.deterministic)
    if trained.deterministic:
        assert trained.digest == expected.digest
    else:
        assert math.isclose(trained.loss, expected.loss, rel_tol=1e-3)


@pytest.mark.long("Four ranks share the cores, and train twice: without a fault, and with one.")
@pytest.mark.parametrize("seed", SEEDS)
def test_a_rank_is_killed_somewhere(
    tmp_path: Path,
    undisturbed: Undisturbed,
    recoveries: list[float],
    record_property: Callable[[str, object], None],
    seed: int,
) -> None:
    """Where, when and which the seed says; also a second one while the others recover."""
    assert_as_undisturbed(train(tmp_path, seed), undisturbed, recoveries, record_property)


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_a_rank_is_killed(
    tmp_path: Path,
    undisturbed: Undisturbed,
    recoveries: list[float],
    record_property: Callable[[str, object], None],
    place: str,
) -> None:
    assert_as_undisturbed(train(tmp_path, 0, place), undisturbed, recoveries, record_property)


@pytest.mark.slow
@pytest.mark.parametrize("feature", ["shared parameters", "sentinel", "replica"])
def test_a_rank_is_killed_with(
    tmp_path: Path,
    undisturbed: Undisturbed,
    recoveries: list[float],
    record_property: Callable[[str, object], None],
    feature: str,
) -> None:
    trained = train(tmp_path, 0, "forward", feature)
    assert_as_undisturbed(trained, undisturbed, recoveries, record_property)


@pytest.mark.slow
def test_a_rank_is_killed_whose_loader_has_workers(tmp_path: Path) -> None:
    """The examples of the step that is lost are read again by the others' workers; the dead one's end, too."""
    job = run(tmp_path, 3, WORKERS)
    assert job.returncode == 0, job.output
    assert "2 of 3 ranks go on after step 3 without rank 1" in job.output
    assert job.stdout.split() == [str(float(sum(i * i for i in range(48))))] * 2
    assert job.left_behind == ()


@pytest.mark.parametrize(
    "who",
    ["strategy", *(pytest.param(who, marks=pytest.mark.slow) for who in ("program", "train"))],
)
def test_a_rank_is_killed_of_a_default_group(tmp_path: Path, who: str) -> None:
    """The others wait for it in a collective of torch.distributed; the next ones are over those that are left."""
    job = run(tmp_path, 3, DEFAULT_GROUP, who)
    assert job.returncode == 0, job.output
    assert "2 of 3 ranks go on after step 3 without rank 1" in job.output
    assert job.stdout.splitlines() == ["3 3 3 2 2 2"] * 2
    assert job.left_behind == ()


@pytest.mark.parametrize(
    "how", ["an earlier strategy", pytest.param("exit handlers", marks=pytest.mark.slow)]
)
def test_a_rank_is_killed_that_is_traced(tmp_path: Path, how: str) -> None:
    """The others' timelines are whole; of strategies that the lost one was in, clocks are compared no more."""
    job = run(tmp_path, 3, ENDINGS, how, env={"MPISTRAT_TRACE": str(tmp_path / "trace")})
    assert job.returncode == 7, job.output
    assert "Traceback" not in job.output
    assert "the part has no end of rank 1" in job.output
    assert job.left_behind == ()
    events = valid_trace(tmp_path / "trace" / "trace.json")
    # The barrier at the end of run_elastic is the last call.
    assert sum("end of run_elastic" in str(event.get("args")) for event in events) >= 2


def over_two_nodes(folder: Path, how: str) -> Job:
    """Two ranks on each, of which the last, or all of the second node, are killed."""
    if reason := two_nodes.why_not():
        pytest.skip(reason)
    launcher = ElasticLauncher.named("Open MPI")
    with two_nodes.two_nodes(folder) as nodes:
        return nodes.run_python(launcher, 2, ENDINGS, how, seconds=SECONDS)


@pytest.mark.slow
def test_a_rank_is_killed_on_one_of_two_nodes(tmp_path: Path) -> None:
    job = over_two_nodes(tmp_path, "rank-3")
    assert job.returncode == 0, job.output
    assert "3 of 4 ranks go on after step 5 without rank 3" in job.output
    assert job.stdout.split() == ["10"] * 3
    assert job.left_behind == ()


@pytest.mark.slow
def test_a_node_is_lost(tmp_path: Path) -> None:
    """Open MPI 5.0's launcher gives up, whatever the ranks could do: there is nothing to go on with."""
    job = over_two_nodes(tmp_path, "node-2")
    assert "PRTE has lost communication with a remote daemon" in job.output
    assert job.stdout.split() == []
    assert job.left_behind == ()


KILLS_WHILE_SAVING = [
    pytest.param(victim, step, where, marks=marks)
    for victim, step, where, marks in (
        (0, 6, "half-way", ()),
        (0, 8, "before it is complete", pytest.mark.slow),
        (0, 8, "half-way", pytest.mark.slow),
        (0, 6, "before it is complete", pytest.mark.slow),
        (1, 6, "half-way", pytest.mark.slow),
        (1, 6, "before the note", pytest.mark.slow),
        (1, 8, "before the note", ()),
        (1, 10, "half-way", pytest.mark.slow),
    )
]


@pytest.mark.parametrize(("victim", "step", "where"), KILLS_WHILE_SAVING)
def test_a_rank_is_killed_while_it_saves(
    tmp_path: Path, victim: int, step: int, where: str
) -> None:
    """Rank 0, which holds the lock and completes what all have written, or another, for whose note rank 0 waits.

    The save is given up, nothing of it stays, and the next ones are complete.
    """
    directory = tmp_path / "saved"
    job = run(tmp_path, 3, SAVING, directory, str(victim), str(step), where)
    assert job.returncode == 0, job.output
    assert job.left_behind == ()
    message = rf"2 of 3 ranks go on after step \d+ without rank {victim}"
    assert re.search(message, job.output), job.output
    whole, wrong = Directory(directory).checkpoints()
    assert wrong == []
    saved = [manifest.step for _, manifest in whole]
    assert len(saved) == 2
    assert saved[-1] == (8 if step == 10 else 10)
    assert step not in saved
    for path, manifest in whole:
        stored = StoredCheckpoint(path, dict.fromkeys(("total", "own")))
        stored.verify_ranks(0, 1)
        assert (stored.state["common"]["total"]["value"] == manifest.step).all()
        assert len(stored.state["ranks"]) == manifest.ranks == (3 if manifest.step < step else 2)
        assert all(
            (own["own"]["step"] == manifest.step).all() for own in stored.state["ranks"].values()
        )
    left = {path.name for path in directory.iterdir()}
    assert left == {".lock"} | {Path(path).name for path, _ in whole}


def test_another_rank_is_killed_while_they_agree_on_a_step(tmp_path: Path) -> None:
    job = run(tmp_path, 5, ENDINGS, "another while they agree")
    assert job.returncode == 0, job.output
    assert "3 of 5 ranks go on after step 5 without ranks 1, 2" in job.output
    assert job.left_behind == ()


def test_a_rank_is_killed_when_all_are_done(tmp_path: Path) -> None:
    """The others end as after any loss: MPI_Finalize might wait for it."""
    job = run(tmp_path, 3, ENDINGS, "after the last step")
    assert job.returncode == 0, job.output
    assert job.stdout.split() == ["10", "10"]
    assert "the others go on without it" in job.output
    assert job.left_behind == ()


def test_too_few_replicas_are_left(tmp_path: Path) -> None:
    job = run(tmp_path, 2, ENDINGS, "too few")
    assert job.returncode != 0
    assert "TooFewReplicasError: 1 replicas are left, and min_replicas=2 are wanted" in job.output
    assert job.left_behind == ()


@pytest.mark.parametrize("how", ["raises", "leaves"])
def test_what_is_no_loss_ends_the_job(tmp_path: Path, how: str) -> None:
    """An error of a rank's own, and a rank that returns while others wait for it."""
    job = run(tmp_path, 3, ENDINGS, how)
    assert job.returncode != 0
    assert job.left_behind == ()
    messages = {"raises": "KeyError: 'of its own'", "leaves": "rank 1: barrier(end of run_elastic)"}
    assert messages[how] in job.output
    assert "go on" not in job.output


def test_a_rank_does_not_come_to_run_elastic(tmp_path: Path) -> None:
    job = run(tmp_path, 2, ENDINGS, "does not come")
    assert job.returncode != 0
    assert "waited 2 s in the duplication of a communicator for the other ranks" in job.output
    assert job.left_behind == ()


@pytest.mark.parametrize("how", ["exit handlers", "an earlier strategy", "SystemExit in train"])
def test_what_is_to_run_at_exit_is_run_once_after_a_loss(tmp_path: Path, how: str) -> None:
    """Though MPI_Finalize is not: Python's handlers in their order, threads, and the exit code."""
    job = run(tmp_path, 3, ENDINGS, how)
    assert job.returncode == 7, job.output
    lines = sorted(re.findall(r"^rank \d: .*$", job.stdout, re.M))
    assert lines == [
        f"rank {rank}: the thread, then the second handler, then the first" for rank in (0, 2)
    ]
    assert "Ending the job" not in job.output
    assert "Traceback" not in job.output
    assert job.left_behind == ()


def test_an_mpi_that_loses_no_ranks_says_so(launcher: Launcher) -> None:
    job = launcher.run_python(2, ENDINGS, "nothing")
    assert job.returncode == 0, job.output
    lines = re.findall(r"^mpistrat: a rank that is lost ends this job: .*$", job.stderr, re.M)
    assert len(lines) == 1, job.output
    reason = {"Open MPI": "--with-ft ulfm", "MPICH": "Open MPI 5 does"}[launcher.name]
    assert reason in lines[0]
    assert job.stdout.split() == ["10", "10"]
