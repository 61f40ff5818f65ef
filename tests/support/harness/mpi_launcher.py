"""Starts ranks under a chosen MPI, as scripts/test and the tests in tests/launch do."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from support.forked.jobs import job as forks
from support.forked.jobs import place

_PREFIX_VARIABLES = {"MPICH": "MPISTRAT_TEST_MPICH", "Open MPI": "MPISTRAT_TEST_OPENMPI"}
MPI_NAMES = tuple(_PREFIX_VARIABLES)
_JOB_VARIABLE = "MPISTRAT_TEST_JOB"

_SETTINGS = {
    "MPICH": {},
    "Open MPI": {
        # Test machines and containers have few cores and run as root.
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        # The wheel has no UCX device to find and says so at every window.
        "OMPI_MCA_osc": "^ucx",
        # It has no libfabric device either, and takes a second of every start to find that out.
        "OMPI_MCA_btl": "^ofi",
        # Cores are few: a rank that waits leaves its core to those that work. MPICH does that by itself; with its
        # MPIR_CVAR_ENABLE_HEAVY_YIELD the tests of 3 and 4 ranks take a quarter longer.
        "OMPI_MCA_mpi_yield_when_idle": "1",
    },
}


@dataclass(frozen=True)
class Job:
    """A finished `mpiexec`: its exit code, what it wrote, how long it took, and what it left running."""

    returncode: int
    stdout: str
    stderr: str
    seconds: float
    left_behind: tuple[str, ...]

    @property
    def output(self) -> str:
        return self.stdout + self.stderr


@dataclass(frozen=True)
class Launcher:
    """One installed MPI: `prefix` holds its bin/mpiexec and lib/libmpi.so."""

    name: str
    prefix: Path

    @classmethod
    def named(cls, name: str) -> "Launcher":
        prefix = os.environ.get(_PREFIX_VARIABLES[name])
        if not prefix:
            raise RuntimeError(
                f"{_PREFIX_VARIABLES[name]} is not set: give the folder that holds {name}'s bin/mpiexec, "
                "or run scripts/test, which installs both MPIs and sets it"
            )
        return cls(name, Path(prefix))

    def command(self, ranks: int, program: Sequence[str]) -> list[str]:
        mpiexec = str(self.prefix / "bin" / "mpiexec")
        return [mpiexec, "-n", str(ranks), *program]

    def environment(self, extra: Mapping[str, str] = {}) -> dict[str, str]:
        return {
            **os.environ,
            **_SETTINGS[self.name],
            "PATH": f"{self.prefix / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "MPI4PY_LIBMPI": str(self.library()),
            "OMP_NUM_THREADS": "1",
            **extra,
        }

    def library(self) -> Path:
        """The shared library itself: in the wheels `libmpi.so` is a linker script, which cannot be loaded."""
        found = sorted((self.prefix / "lib").glob("libmpi.so.*"))
        if not found:
            raise RuntimeError(
                f"no lib/libmpi.so.* in {self.prefix}, which should hold {self.name}"
            )
        return found[0]

    def run_python(
        self,
        ranks: int,
        *arguments: str | Path,
        seconds: float = 60.0,
        env: Mapping[str, str] = {},
        cwd: Path | None = None,
        forked: bool = False,
        imported: tuple[str, ...] = (),
        gone_within: float = 3.0,
    ) -> Job:
        """Run `mpiexec -n ranks python arguments…` to its end; at `seconds` it is killed and TimeoutExpired raised.

        With `forked`, ranks are forks of a process that has imported torch (`support.forked`): for programs that need
        torch, and are about neither how ranks start nor how they die. It has imported the modules `imported`, too.
        What is still there `gone_within` seconds after the end is left behind.
        """
        with forks(imported) if forked else contextlib.nullcontext() as address:
            program = [sys.executable]
            if address:
                program += place(address)
            program += [str(argument) for argument in arguments]
            command = self.command(ranks, program)
            return run_job(command, self.environment(env), seconds, cwd, gone_within)


def run_job(
    command: Sequence[str],
    env: Mapping[str, str],
    seconds: float,
    cwd: Path | None = None,
    gone_within: float = 3.0,
    on_line: Callable[[str], object] | None = None,
) -> Job:
    """Run a command that starts processes of its own, and account for all of them.

    Args: on_line: gets each line of stdout as it comes.
    """
    with tempfile.TemporaryDirectory(prefix="mpi-job-", ignore_cleanup_errors=True) as sessions:
        # A killed launcher of Open MPI leaves a folder with its process's number in its name; a later launcher that
        # gets this number cannot start there.
        return _run_job(
            command,
            {**env, "PRTE_MCA_prte_tmpdir_base": sessions},
            seconds,
            cwd,
            gone_within,
            on_line,
        )


def _run_job(
    command: Sequence[str],
    env: Mapping[str, str],
    seconds: float,
    cwd: Path | None,
    gone_within: float,
    on_line: Callable[[str], object] | None,
) -> Job:
    mark = uuid.uuid4().hex
    started = time.monotonic()
    lines = None if on_line is None else _Lines(on_line)
    process = subprocess.Popen(
        command,
        # Unbuffered, Python writes a line and its end in two pieces, between which other ranks' output can come.
        env={**env, _JOB_VARIABLE: mark, "PYTHONUNBUFFERED": ""},
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE if lines is None else lines.write_end,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    if lines is not None:
        lines.start()
    try:
        stdout, stderr = process.communicate(timeout=seconds)
        took = time.monotonic() - started
        left = _wait_until_gone(mark, gone_within)
    except subprocess.TimeoutExpired as late:
        _kill(mark)
        stdout, stderr = process.communicate()
        if lines is not None:
            stdout = lines.text()
        raise subprocess.TimeoutExpired(command, seconds, stdout, stderr) from late
    finally:
        _kill(mark)
    if lines is not None:
        stdout = lines.text()
    return Job(process.returncode, stdout, stderr, took, left)


class _Lines(threading.Thread):
    """Reads what is written to `write_end`, line by line, once it is started."""

    def __init__(self, on_line: Callable[[str], object]) -> None:
        super().__init__(daemon=True)
        self._read_end, self.write_end = os.pipe()
        self._on_line = on_line
        self._lines: list[str] = []

    def start(self) -> None:
        """To be called when a process has its copy of `write_end`."""
        os.close(self.write_end)
        super().start()

    def run(self) -> None:
        with open(self._read_end, errors="replace") as stream:
            for line in stream:
                self._lines.append(line)
                self._on_line(line.rstrip("\n"))

    def text(self) -> str:
        """All of it, once the processes that write have been killed or have ended."""
        self.join()
        return "".join(self._lines)


def _marked(mark: str) -> dict[int, str]:
    """Processes that carry a job's mark in their environment: daemons and children that left its session, too."""
    wanted = f"{_JOB_VARIABLE}={mark}".encode()
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                found[int(folder.name)] = command.strip()
        except OSError:
            continue  # ended meanwhile, or belongs to another user
    return found


def _wait_until_gone(mark: str, seconds: float) -> tuple[str, ...]:
    end = time.monotonic() + seconds
    while (left := _marked(mark)) and time.monotonic() < end:
        time.sleep(0.05)
    return tuple(left.values())


def _kill(mark: str) -> None:
    for pid in _marked(mark):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
