"""One stage of scripts/test: a command, or a launch of pytest that goes on after a test that ended its job."""

import contextlib
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from support.forked import jobs as forked
from support.harness.hang_watch import stacks_text
from support.harness.mpi_launcher import Launcher, run_job
from support.harness.result_lines import Result, Results

TOP = Path(__file__).parents[3]
SECONDS_PER_LAUNCH = 3600.0  # a last resort: tests have limits of their own
NEW_LAUNCHES = 3  # after a test that ended its job, the tests after it run in a new one
RUN_AGAIN = 3  # so many failed tests of a stage at most: more have a cause in common
NO_TESTS_COLLECTED = 5
SECONDS_TO_BE_GONE = (
    10.0  # for what a job leaves: a fork server of torch's on a busy machine takes seconds to end
)
# What tests with MPI import beside torch, as far as it starts no thread.
IMPORTED = ("pytest", "scipy.stats", "torch.distributed.fsdp")
# Plugins of pytest that they do not use, and that take each rank 0.3 s.
_LEFT_OUT = ("-p", "no:hypothesispytest", "-p", "no:anyio")


@dataclass
class Stage:
    """One command, or one launch of pytest, and what came of it."""

    name: str
    command: Sequence[str] = ()  # a command without tests
    pytest: Sequence[str] = ()  # or the arguments of pytest
    mpi: str = ""
    ranks: int = 0  # 0: without mpiexec
    python: str = sys.executable
    forked: bool = False  # its ranks are forks of a process that has imported torch
    beside_others: bool = False  # it leaves a core to others, or waits a lot
    limit: float = math.inf  # the seconds that all launches may take
    on_line: Callable[[str], object] | None = field(default=None, repr=False)  # gets its lines
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    unsteady: tuple[str, ...] = ()  # tests that failed, and passed when they were run again
    seconds: float = 0.0
    results: dict[str, Result] = field(default_factory=dict, repr=False)  # of each test
    output: str = field(default="", repr=False)

    @property
    def title(self) -> str:
        parts = (self.name, self.mpi, self.ranks)
        return " ".join(str(part) for part in parts if part)

    def run(self) -> None:
        started = time.monotonic()
        self._end = started + self.limit
        if self.command:
            self._run_command()
        else:
            with tempfile.TemporaryDirectory(prefix="mpistrat-") as folder:
                self._run_pytest(Path(folder))
        self.seconds = time.monotonic() - started

    def _run_command(self) -> None:
        code, self.output = self._launch(self.command, dict(os.environ))
        self.failed = int(code != 0)

    def _run_pytest(self, folder: Path) -> None:
        lines = folder / "results"
        command = [self.python, "-m", "pytest", "--quiet", "--color=no", *self.pytest]
        command.append(f"--results={lines}")
        # Threads that share cores with other processes wait for each other most of the time.
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        with contextlib.ExitStack() as stack:
            if self.ranks:
                launcher = Launcher.named(self.mpi)
                if self.forked:
                    address = stack.enter_context(forked.job(IMPORTED))
                    command[:1] = [self.python, *forked.place(address)]
                command += ["--with-mpi", *_LEFT_OUT]
                command = launcher.command(self.ranks, command)
                env = launcher.environment()
            self._launch_pytest(command, env, folder, lines)

    def _launch_pytest(
        self, command: Sequence[str], env: dict[str, str], folder: Path, lines: Path
    ) -> None:
        for _ in range(1 + NEW_LAUNCHES):
            if self._seconds_left() <= 0:
                break
            known = Results.read(lines).of
            output = Path(tempfile.mkdtemp(dir=folder))
            rest = [f"--leave-out={lines}"] if known else []
            code, text = self._launch(
                [*command, *rest], {**env, "MPISTRAT_TEST_OUTPUT": str(output)}
            )
            self.output += text + _stacks_not_printed(output)
            results = Results.read(lines)
            new = [test for test in results.of if test not in known]
            if not new and code not in (0, NO_TESTS_COLLECTED):
                continue  # the launcher itself failed, or the job before its first test
            if not any(results.of[test].outcome == "started" for test in new):
                break  # it got to its end, and pytest has shown what failed
            for test in new:
                result = results.of[test]
                if result.outcome == "failed":
                    self.output += f"\n{f' {test} ':_^100}\n{result.text}\n"
        failed = results.tests("failed", "started")
        if 0 < len(failed) <= RUN_AGAIN and self._seconds_left() > 0:
            output = Path(tempfile.mkdtemp(dir=folder))
            env["MPISTRAT_TEST_OUTPUT"] = str(output)
            code, text = self._launch([*command, f"--run-again={lines}"], env)
            self.output += text + _stacks_not_printed(output)
            results = Results.read(lines)
            passed = results.tests("passed")
            self.unsteady = tuple(test for test in failed if test in passed)
        self.results = results.of
        self.passed = results.count("passed")
        self.skipped = results.count("skipped")
        self.failed = results.count("failed", "started")
        if code not in (0, NO_TESTS_COLLECTED) and not self.failed:
            self.failed = 1  # it died between tests

    def _seconds_left(self) -> float:
        return self._end - time.monotonic()

    def _launch(self, command: Sequence[str], env: dict[str, str]) -> tuple[int, str]:
        """Run a command within what is left of `limit`. Returns: its exit code, and what it wrote."""
        seconds = max(0.0, min(SECONDS_PER_LAUNCH, self._seconds_left()))
        try:
            job = run_job(command, env, seconds, TOP, SECONDS_TO_BE_GONE, self.on_line)
        except subprocess.TimeoutExpired as late:
            texts = [str(text or "") for text in (late.stdout, late.stderr)]
            return 1, "".join(texts) + f"\nkilled after {seconds:.0f} s\n"
        behind = [f"left running: {process}\n" for process in job.left_behind]
        # Open MPI's version string, which pytest-mpi prints, ends with a NUL.
        text = job.output.replace("\0", "") + "".join(behind)
        return job.returncode or int(bool(behind)), text


def _stacks_not_printed(output: Path) -> str:
    """The stacks of a job whose ranks could not print them."""
    folders = [f for f in output.glob("ranks-*") if not (f / "stacks-printed").exists()]
    return "".join(stacks_text(folder) for folder in folders)
