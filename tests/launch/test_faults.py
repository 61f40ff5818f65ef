"""One rank of a real job goes wrong, where a seed says: the job ends in time and tells who, where and why."""

import json
import random
import re
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from launch.fault_jobs import HOST_AND_PID, KERNEL, LIMIT, SECONDS_TO_END, reports_in
from support.fault_table import fault_table
from support.harness.mpi_launcher import Job, Launcher

pytestmark = pytest.mark.waits

PROGRAM = Path(__file__).parent / "programs" / "faults.py"
TABLE = {row.name: row for row in fault_table()}
SLOW_TRAINING = PROGRAM.with_name("slow_training.py")
BOTH_MPIS = pytest.mark.both_mpis("faults")
# The first place is tried under both MPIs; at the others the MPIs take turns.
SEEDS = [
    pytest.param(0, marks=BOTH_MPIS),
    *(1, 2),
    *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 23)),
]
QUICK = [pytest.param(0, marks=[BOTH_MPIS, pytest.mark.quick]), *SEEDS[1:]]


@dataclass(frozen=True)
class Fault:
    """A job that has ended, and what its victim wrote down before the fault."""

    job: Job
    ranks: int
    victim: int
    line: int
    others_line: int
    shared_files: tuple[str, ...]
    seconds: float  # from the fault to the end
    reports: tuple[str, ...]

    @property
    def output(self) -> str:
        return self.job.output

    @property
    def who(self) -> str:
        """The victim as messages name it, for a regular expression."""
        return f"rank {self.victim} of {self.ranks}{HOST_AND_PID}"

    def says(self, pattern: str) -> None:
        assert re.search(pattern, self.output), f"{pattern}\nnot in\n{self.output}"


def start(launcher: Launcher, folder: Path, ranks: int, *words: str | int, **settings: str) -> Job:
    env = {"MPISTRAT_STALL_SECONDS": f"{LIMIT:g}", **settings}
    arguments: list[str | Path] = [PROGRAM, *map(str, words), folder]
    return launcher.run_python(ranks, *arguments, seconds=45.0, env=env, cwd=folder)


def inject(launcher: Launcher, folder: Path, name: str, seed: int) -> Fault:
    """Run the job with the fault; it must end in time with an exit code other than 0, and leave nothing behind."""
    ranks = random.Random(f"{name} {seed} ranks").choice((2, 3, 4))
    began = time.time()
    job = start(launcher, folder, ranks, name, seed)
    fault = judged(job, folder, ranks, began)
    if row := TABLE.get(name):
        fault.says(row.printed)
        assert fault.seconds < row.seconds(LIMIT) + SECONDS_TO_END, job.output
    return fault


def judged(job: Job, folder: Path, ranks: int, began: float, *, caught: bool = False) -> Fault:
    assert (folder / "event").exists(), job.output
    event = json.loads((folder / "event").read_text(encoding="utf-8"))
    fault = Fault(
        job,
        ranks,
        event["victim"],
        event["line"],
        event["others_line"],
        tuple(event["shared_files"]),
        began + job.seconds - event["time"],
        reports_in(folder),
    )
    assert job.returncode != 0, job.output
    limits = 2 if caught else 1  # who caught the error waits for the others as long again
    assert fault.seconds < limits * LIMIT + SECONDS_TO_END, job.output
    assert job.left_behind == ()  # no rank, no observer
    assert [path for path in fault.shared_files if Path(path).exists()] == []
    return fault


def assert_mismatch(fault: Fault) -> None:
    """The message shows what the victim did and what all others did, once."""
    assert "CollectiveMismatchError: the ranks did not call the same collective" in fault.output
    message = fault.output[fault.output.index("CollectiveMismatchError: ") :]
    pattern = r"\n  ranks? (\d+)(?:-(\d+))?: (.+)\n      at \S+faults\.py:(\d+) in \w+(?=\n)"
    sides: dict[int, tuple[str, int]] = {}
    for first, last, call, line in re.findall(pattern, message):
        for rank in range(int(first), int(last or first) + 1):
            sides[rank] = call, int(line)
    assert sorted(sides) == list(range(fault.ranks)), fault.output
    victims = sides.pop(fault.victim)
    assert victims[1] == fault.line, fault.output
    assert len(set(sides.values())) == 1, fault.output
    others = sides.popitem()[1]
    assert others[1] == fault.others_line, fault.output
    assert victims[0] != others[0]
    assert fault.reports == ()


def assert_is_told(report: str, stderr: str) -> None:
    """The report stands in one piece. The line on its file comes later: the launcher's words may stand between."""
    text = f"\nmpistrat: {report}mpistrat: Ending the job.\n"
    assert text in stderr
    assert "mpistrat: This report is in " in stderr.partition(text)[2]


def assert_stall(fault: Fault, state: str) -> None:
    """One report, which names the victim as the one that is missing and says what it does."""
    assert fault.seconds > LIMIT, fault.output
    assert len(fault.reports) == 1, fault.output
    (report,) = fault.reports
    assert_is_told(report, fault.job.stderr)
    assert re.match(
        r"ranks have waited \d+\.\d s in a collective \(MPISTRAT_STALL_SECONDS allows 3 s\): "
        rf"rank {fault.victim} has not come to it\n"
        rf"  {fault.who} {state}; it had finished collective number \d+, entered ",
        report,
    ), fault.output
    others = ", ".join(str(rank) for rank in range(fault.ranks) if rank != fault.victim)
    assert re.search(
        rf"\n  ranks? {others} waits? in collective number \d+: .+\n"
        rf"      at \S+faults\.py:{fault.others_line} in ",
        report,
    ), fault.output


def assert_death(fault: Fault, how: str) -> None:
    """One report, which names the victim as the one that died first, and where it was last."""
    assert len(fault.reports) == 1, fault.output
    (report,) = fault.reports
    assert_is_told(report, fault.job.stderr)
    if KERNEL < (6, 15):  # it may forget how a process died as soon as the launcher knows
        how = rf"({how}|died without a word \(killed, or ended by os\._exit\))"
    assert re.match(
        rf"{fault.who} {how}.*\n"
        r"  it had finished collective number \d+, entered \d+\.\d s ago: .+\n"
        rf"      at \S+faults\.py:{fault.line} in ",
        report,
    ), fault.output


@pytest.mark.parametrize("seed", QUICK)
def test_another_shape(launcher: Launcher, tmp_path: Path, seed: int) -> None:
    assert_mismatch(inject(launcher, tmp_path, "shape", seed))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ["skip", "swap", "dtype"])
def test_another_call(launcher: Launcher, tmp_path: Path, name: str, seed: int) -> None:
    assert_mismatch(inject(launcher, tmp_path, name, seed))


@pytest.mark.parametrize("seed", SEEDS)
def test_the_last_call_skipped(launcher: Launcher, tmp_path: Path, seed: int) -> None:
    fault = inject(launcher, tmp_path, "skip_last", seed)
    fault.says(
        rf"mpistrat: ending the job: {fault.who} came to its end.* but another rank waits for it"
    )
    fault.says(
        rf"  rank \d of {fault.ranks}{HOST_AND_PID}: in collective number \d+, .+\n"
        rf"      at \S+faults\.py:{fault.others_line} in "
    )


@pytest.mark.parametrize("seed", QUICK)
def test_killed(launcher: Launcher, tmp_path: Path, seed: int) -> None:
    assert_death(inject(launcher, tmp_path, "kill", seed), "was killed by SIGKILL")


@pytest.mark.parametrize("seed", SEEDS)
def test_ended_by_os_exit(launcher: Launcher, tmp_path: Path, seed: int) -> None:
    fault = inject(launcher, tmp_path, "os_exit", seed)
    assert_death(fault, "ended with exit code 0 and without MPI_Finalize")


@pytest.mark.parametrize("seed", SEEDS)
def test_an_exception(launcher: Launcher, tmp_path: Path, seed: int) -> None:
    fault = inject(launcher, tmp_path, "raises", seed)
    fault.says(rf"mpistrat: {fault.who} failed; ending the job\nTraceback")
    fault.says(rf'File ".*faults\.py", line {fault.line}, in raises\n')
    assert fault.output.count("\nValueError: wrong on this rank only\n") == 1
    assert fault.reports == ()


@pytest.mark.parametrize("seed", SEEDS)
def test_an_early_exit(launcher: Launcher, tmp_path: Path, seed: int) -> None:
    fault = inject(launcher, tmp_path, "exits", seed)
    fault.says(
        rf"mpistrat: ending the job: {fault.who} called sys\.exit\(0\) at \S+faults\.py:{fault.line} in exits"
        ", but another rank waits for it in a collective"
    )
    fault.says(rf"\n      at \S+faults\.py:{fault.others_line} in ")
    assert fault.reports == ()


@pytest.mark.parametrize("seed", SEEDS)
def test_stopped(launcher: Launcher, tmp_path: Path, seed: int) -> None:
    fault = inject(launcher, tmp_path, "stop", seed)
    assert_stall(fault, r"is stopped \(state T.*\)")
    last = r"it had finished collective number \d+, entered \d+\.\d s ago: .+\n"
    fault.says(rf"{fault.who} .*{last}      at \S+faults\.py:{fault.line} in ")


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ["gil", "slow"])
def test_too_slow(launcher: Launcher, tmp_path: Path, name: str, seed: int) -> None:
    """In a loop in C that never lets go of the GIL, or asleep: its stack says where."""
    fault = inject(launcher, tmp_path, name, seed)
    assert_stall(fault, r"is (busy|idle) \(\d+ % of a core\)")
    fault.says(rf"{fault.who} is {'busy' if name == 'gil' else 'idle'}")
    fault.says(
        rf"and stands \(innermost call first\)\n      \S+faults\.py:{fault.line} in {name}\n"
        r"      \S+faults\.py:\d+ in goes_wrong\n"
    )


@BOTH_MPIS
@pytest.mark.parametrize("seed", [0, 1], ids=["late", "never"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_stall_that_is_caught(launcher: Launcher, tmp_path: Path, ranks: int, seed: int) -> None:
    """The ranks that wait get an error that names the missing one. The job fails even if all then end normally."""
    began = time.time()
    job = start(launcher, tmp_path, ranks, "catches_a_stall", seed, MPISTRAT_ON_STALL="raise")
    fault = judged(job, tmp_path, ranks, began, caught=True)
    for rank in range(ranks - 1):
        fault.says(rf"rank {rank} caught ranks have waited \d+\.\d s .*: rank {ranks - 1} has not")
    fault.says(rf"faults\.py:{fault.line} in catches_a_stall\n")
    fault.says("Raising StallError on the ranks that wait")
    assert len(fault.reports) == 1


@BOTH_MPIS
def test_two_communicators_in_different_orders(launcher: Launcher, tmp_path: Path) -> None:
    """Each rank waits in the one that the others have not come to; the report is on the one waited in for longest."""
    fault = inject(launcher, tmp_path, "two_orders", 0)
    call = (
        r"collective number \d+(, entered \d+\.\d s ago)?: all_reduce\(sum, float32, \(\), SUM\)\n"
    )
    sites = [
        (fault.ranks - 1, rf"faults\.py:{fault.line} in two_orders"),
        (0, rf"faults\.py:{fault.others_line} in "),
    ]
    for rank, site in sites:
        waits = rf"  ranks? {rank}.* waits? in {call}      at \S+{site}"
        elsewhere = rf"  rank {rank} of .*\n.*\n    of another communicator it is in {call}      at \S+{site}"
        fault.says(f"({waits}|{elsewhere})")
    assert len(fault.reports) == 1


@BOTH_MPIS
def test_the_users_own_mpi_call(launcher: Launcher, tmp_path: Path) -> None:
    fault = inject(launcher, tmp_path, "in_own_mpi_call", 0)
    assert_stall(fault, r"is (busy|idle) \(\d+ % of a core\)")
    fault.says(
        r"and stands \(innermost call first\)\n"
        rf"      \S+faults\.py:{fault.line} in in_own_mpi_call\n"
    )


@BOTH_MPIS
def test_a_stall_inside_mpi_cannot_be_caught(launcher: Launcher, tmp_path: Path) -> None:
    """Then the job ends as it would without MPISTRAT_ON_STALL=raise."""
    began = time.time()
    words = ("catches_a_stall", "unchecked")
    job = start(launcher, tmp_path, 3, *words, MPISTRAT_ON_STALL="raise")
    fault = judged(job, tmp_path, 3, began)
    fault.says(
        rf"rank \d of 3{HOST_AND_PID} cannot raise StallError inside MPI, at \S+faults\.py:{fault.others_line} in "
    )
    assert " caught " not in fault.output
    assert len(fault.reports) == 1


@BOTH_MPIS
def test_a_limit_that_is_no_number(launcher: Launcher, tmp_path: Path) -> None:
    job = start(launcher, tmp_path, 2, "skip", 0, MPISTRAT_STALL_SECONDS="nonsense")
    assert job.returncode != 0
    assert job.left_behind == ()
    assert re.search(r"TopologyError: MPISTRAT_STALL_SECONDS='nonsense'", job.output), job.output


@pytest.mark.parametrize(
    "seconds",
    [
        12,
        pytest.param(
            1800, marks=[pytest.mark.slow, pytest.mark.time_limit(2100)], id="half an hour"
        ),
    ],
)
@pytest.mark.long("Nothing may be reported in so many seconds.")
def test_slow_steps_within_the_limit(launcher: Launcher, tmp_path: Path, seconds: int) -> None:
    """Nothing is reported of healthy training in which one rank after the other is slow."""
    env = {"MPISTRAT_STALL_SECONDS": f"{LIMIT:g}"}
    job = launcher.run_python(
        3, SLOW_TRAINING, str(seconds), tmp_path, seconds=seconds + 60, env=env, cwd=tmp_path
    )
    assert job.returncode == 0, job.output
    steps = re.findall(r"rank \d made (\d+) steps", job.stdout)
    assert len(steps) == 3, job.output
    assert int(steps[0]) >= seconds, job.output
    assert "ranks have waited" not in job.output
    assert job.left_behind == ()
    assert reports_in(tmp_path) == ()


@BOTH_MPIS
@pytest.mark.alone("A rank that gets no core meanwhile is killed by the launcher.")
@pytest.mark.parametrize("ranks", [2, 4])
def test_all_ranks_end_by_os_exit(launcher: Launcher, tmp_path: Path, ranks: int) -> None:
    """At different moments. Open MPI's own launcher takes that for a failure."""
    job = start(launcher, tmp_path, ranks, "all_exit_at_once", 0)
    assert "mpistrat" not in job.stderr
    assert job.left_behind == ()
    assert reports_in(tmp_path) == ()
    if launcher.name == "MPICH":
        assert (job.returncode, job.stderr) == (0, "")
