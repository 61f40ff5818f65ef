"""Runs every stage of scripts/test or test-tpu, whatever the ones before it did, and adds them up in one table."""

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from support.harness.hang_watch import stacks_text
from support.harness.mpi_launcher import MPI_NAMES, Launcher, run_job
from support.harness.result_lines import Results

TOP = Path(__file__).parents[3]
SECONDS_PER_LAUNCH = 3600.0  # a last resort: tests have limits of their own
NEW_LAUNCHES = 3  # after a test that ended its job, the tests after it run in a new one
RUN_AGAIN = 3  # so many failed tests of a stage at most: more have a cause in common
NO_TESTS_COLLECTED = 5
XLA_PREFIX = "MPISTRAT_TEST_XLA"  # the environment that holds torch_xla


@dataclass
class Stage:
    """One command, or one launch of pytest, and what came of it."""

    name: str
    command: Sequence[str] = ()  # a command without tests
    pytest: Sequence[str] = ()  # or the arguments of pytest
    mpi: str = ""
    ranks: int = 0  # 0: without mpiexec
    python: str = sys.executable
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    unsteady: tuple[str, ...] = ()  # tests that failed, and passed when they were run again
    seconds: float = 0.0
    output: str = field(default="", repr=False)

    def run(self) -> None:
        started = time.monotonic()
        if self.command:
            self._run_command()
        else:
            with tempfile.TemporaryDirectory(prefix="mpistrat-") as folder:
                self._run_pytest(Path(folder))
        self.seconds = time.monotonic() - started

    def _run_command(self) -> None:
        code, self.output = _launch(self.command, dict(os.environ))
        self.failed = int(code != 0)

    def _run_pytest(self, folder: Path) -> None:
        lines = folder / "results"
        command = [self.python, "-m", "pytest", "--quiet", "--color=no", *self.pytest]
        command += [f"--results={lines}", f"--leave-out={lines}"]
        env = dict(os.environ)
        if self.ranks:
            launcher = Launcher.named(self.mpi)
            command = launcher.command(self.ranks, [*command, "--with-mpi"])
            env = launcher.environment()
        for _ in range(1 + NEW_LAUNCHES):
            known = Results.read(lines).outcomes
            output = Path(tempfile.mkdtemp(dir=folder))
            code, text = _launch(command, {**env, "MPISTRAT_TEST_OUTPUT": str(output)})
            self.output += text + _stacks_not_printed(output)
            results = Results.read(lines)
            new = [test for test in results.outcomes if test not in known]
            if not new and code not in (0, NO_TESTS_COLLECTED):
                continue  # the launcher itself failed, or the job before its first test
            if not any(results.outcomes[test] == "started" for test in new):
                break  # it got to its end, and pytest has shown what failed
            for test in new:
                if results.outcomes[test] == "failed":
                    self.output += f"\n{f' {test} ':_^100}\n{results.texts[test]}\n"
        if 0 < len(failed := results.tests("failed", "started")) <= RUN_AGAIN:
            output = Path(tempfile.mkdtemp(dir=folder))
            again = [argument for argument in command if argument != f"--leave-out={lines}"]
            env["MPISTRAT_TEST_OUTPUT"] = str(output)
            code, text = _launch([*again, f"--run-again={lines}"], env)
            self.output += text + _stacks_not_printed(output)
            results = Results.read(lines)
            self.unsteady = tuple(test for test in failed if results.outcomes[test] == "passed")
        self.passed, self.skipped = results.count("passed"), results.count("skipped")
        self.failed = results.count("failed", "started")
        if code not in (0, NO_TESTS_COLLECTED) and not self.failed:
            self.failed = 1  # it died between tests


def _launch(command: Sequence[str], env: dict[str, str]) -> tuple[int, str]:
    try:
        job = run_job(command, env, SECONDS_PER_LAUNCH, TOP)
    except subprocess.TimeoutExpired as late:
        texts = [text or "" for text in (late.stdout, late.stderr)]
        return 1, "".join(map(str, texts)) + f"\nkilled after {SECONDS_PER_LAUNCH:g} s\n"
    left = [f"left running: {process}\n" for process in job.left_behind]
    # Open MPI's version string, which pytest-mpi prints, ends with a NUL.
    return job.returncode or int(bool(left)), job.output.replace("\0", "") + "".join(left)


def _stacks_not_printed(output: Path) -> str:
    """The stacks of a job whose ranks could not print them."""
    folders = [f for f in output.glob("ranks-*") if not (f / "stacks-printed").exists()]
    return "".join(stacks_text(folder) for folder in folders)


def stages(mode: str) -> Iterator[Stage]:
    scripts = [
        "quickstart",
        "test",
        "test-gpu",
        "test-tpu",
        "benchmark",
        "mini-slurm",
        "environment.sh",
    ]
    scripts = [*(f"scripts/{name}" for name in scripts), ".ci/run"]
    scripts += sorted(str(path.relative_to(TOP)) for path in (TOP / "slurm").glob("*.sbatch"))
    yield Stage("format", ["ruff", "format", "--check", "."])
    yield Stage("lint", ["ruff", "check", "."])
    yield Stage("types", ["mypy"])
    yield Stage("shell", ["shellcheck", "--external-sources", *scripts])

    choice = {"quick": "not slow", "usual": "not slow", "full": ""}[mode]
    yield Stage("unit", pytest=["tests/unit", "-m", choice])
    sizes = {"MPICH": (2,)} if mode == "quick" else dict.fromkeys(MPI_NAMES, (1, 2, 3, 4, 8))
    for mpi, all_ranks in sizes.items():
        for ranks in all_ranks:
            yield Stage("mpi", pytest=["tests/mpi", "-m", choice], mpi=mpi, ranks=ranks)
    launch = "quick and not slow" if mode == "quick" else choice
    yield Stage("launch", pytest=["tests/launch", "-m", launch])

    yield Stage("conformance", pytest=["tests/conformance", "-m", choice], ranks=0)
    if mode != "quick":
        for mpi in MPI_NAMES:
            for ranks in (2, 3, 4):
                conformance = ["tests/conformance", "-m", choice]
                yield Stage("conformance", pytest=conformance, mpi=mpi, ranks=ranks)
        yield from xla_stages(choice)


def xla_stages(choice: str) -> Iterator[Stage]:
    """The tests that are marked mpi under both MPIs, the others without; none where there is no torch_xla."""
    if XLA_PREFIX not in os.environ:
        return
    python = str(Path(os.environ[XLA_PREFIX], "bin", "python"))
    yield Stage("xla", pytest=["tests/tpu", "-m", _both(choice, "not mpi")], python=python)
    for mpi in MPI_NAMES:
        for ranks in (1, 2):
            chosen = ["tests/tpu", "-m", _both(choice, "mpi")]
            yield Stage("xla", pytest=chosen, mpi=mpi, ranks=ranks, python=python)


def _both(choice: str, other: str) -> str:
    return f"{choice} and {other}" if choice else other


def report(stage: Stage) -> None:
    """A failed stage in full; of the others their last line."""
    mark = "FAILED" if stage.failed else "ok"
    title = f"{stage.name} {stage.mpi} {stage.ranks or ''}".strip()
    lines = stage.output.strip().splitlines()
    if stage.pytest:  # below pytest's last line a launcher may have the last word
        lines = [line for line in lines if re.search(r" in [0-9.]+s\b", line)]
    if stage.failed or stage.unsteady:
        width = shutil.get_terminal_size((100, 24)).columns
        print(f" {title} ".center(width, "="), stage.output.strip(), sep="\n")
    print(f"{mark:6}  {title:24}  {stage.seconds:6.1f} s  {lines[-1] if lines else ''}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mode", choices=["quick", "usual", "full", "xla"])
    mode: str = parser.parse_args().mode
    done = list(xla_stages("not slow") if mode == "xla" else stages(mode))
    for stage in done:
        stage.run()
        report(stage)

    print(f"\n{'stage':<13}{'MPI':<10}{'ranks':>5}{'passed':>8}{'failed':>8}{'seconds':>9}")
    for stage in done:
        counts = f"{stage.passed if stage.pytest else '':>8}{stage.failed:>8}{stage.seconds:>9.1f}"
        print(f"{stage.name:<13}{stage.mpi or '-':<10}{stage.ranks or '-':>5}{counts}")
    print(f"{'all':<28}{'':>16}{sum(stage.seconds for stage in done):>9.1f}\n")
    if mode != "quick" and XLA_PREFIX not in os.environ:
        here = f"Python {platform.python_version()} on {platform.machine()}"
        print(f"left out: tests/tpu: torch_xla has no release for {here}")
    passed, failed = (sum(getattr(stage, what) for stage in done) for what in ("passed", "failed"))
    skipped = sum(stage.skipped for stage in done)
    for test in (test for stage in done for test in stage.unsteady):
        print(f"unsteady: {test} failed, and passed when it was run again")
    print(f"{passed} passed, {failed} failed" + (f", {skipped} skipped" if skipped else ""))
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
