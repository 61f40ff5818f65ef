"""Ranks that are forks of a process with torch (`support.forked`) are to a program, and to mpiexec, as others are."""

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch.signalled_jobs import signalled_command
from support.forked.jobs import RANK, job
from support.harness.mpi_launcher import Launcher

SEEN = """
import os, sys, torch
from mpi4py import MPI
world = MPI.COMM_WORLD
seen = sys.argv, __name__, __file__, os.getcwd(), os.environ["SOME"], sys.path[0]
print(world.rank, world.size, *seen)
"""


def both_ways(launcher: Launcher, folder: Path, text: str) -> list[tuple[int, list[str], str]]:
    """Exit code, lines and errors of a job of two ranks: of forks, and of processes of their own."""
    program = folder / "program.py"
    program.write_text(text)
    found = []
    for forked in (True, False):
        some = {"SOME": "thing"}
        ended = launcher.run_python(2, program, "word", env=some, cwd=folder, forked=forked)
        assert ended.left_behind == ()
        found.append((ended.returncode, sorted(ended.stdout.splitlines()), ended.stderr))
    return found


def test_a_program_sees_the_same(launcher: Launcher, tmp_path: Path) -> None:
    forked, own = both_ways(launcher, tmp_path, SEEN)
    assert forked == own
    assert forked[0] == 0
    assert forked[1][1].startswith(f"1 2 ['{tmp_path}/program.py', 'word'] __main__ ")


def test_each_rank_draws_its_own_random_numbers(launcher: Launcher) -> None:
    text = "import random, numpy, torch; print(random.random(), numpy.random.rand(), float(torch.rand(())))"
    job = launcher.run_python(2, "-c", text, forked=True)
    first, second = (line.split() for line in job.stdout.splitlines())
    assert len({*first, *second}) == 6


def test_a_program_on_the_command_line_sees_the_same(launcher: Launcher) -> None:
    text = "import sys, torch; print(sys.argv, __name__, sys.path[0] == '')"
    forked, own = (launcher.run_python(2, "-c", text, "word", forked=way) for way in (True, False))
    assert (forked.returncode, forked.stdout) == (own.returncode, own.stdout)
    assert forked.stdout == "['-c', 'word'] __main__ True\n" * 2


@pytest.mark.parametrize(
    ("end", "said"),
    [
        ("sys.exit(3)", ""),
        ("raise ValueError('of one rank')", "ValueError: of one rank"),
        ("os.kill(os.getpid(), 9)", ""),
        ("os._exit(4)", ""),
    ],
)
def test_the_launcher_sees_the_same_end(
    launcher: Launcher, tmp_path: Path, end: str, said: str
) -> None:
    forked, own = both_ways(launcher, tmp_path, f"import os, sys\n{end}\n")
    assert forked[0] == own[0] != 0
    assert said in forked[2]


def test_a_signal_is_passed_on(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import pathlib, signal, sys, time\n"
        "signal.signal(signal.SIGUSR1, lambda number, frame: sys.exit(f'got {number}'))\n"
        f"pathlib.Path({str(tmp_path)!r}, 'ready').touch()\n"
        "time.sleep(60)\n"
    )

    def until_ready() -> None:
        deadline = time.monotonic() + 30
        while not (tmp_path / "ready").exists() and time.monotonic() < deadline:
            time.sleep(0.05)

    mpich = Launcher.named("MPICH")
    with job() as address:
        rank = ["-I", "-S", str(RANK), address, str(program)]
        command = mpich.command(1, [sys.executable, *rank])
        ended, seconds = signalled_command(
            command, mpich.environment(), tmp_path, signal.SIGUSR1, until_ready
        )
    assert ended.stderr == f"got {int(signal.SIGUSR1)}\n"
    assert ended.returncode == 1
    assert seconds < 10


def test_no_rank_is_left_when_its_place_is_killed(launcher: Launcher, tmp_path: Path) -> None:
    """As run_job does with a job that takes too long."""
    program = tmp_path / "program.py"
    program.write_text(
        "import os, pathlib, time\n"
        f"pathlib.Path({str(tmp_path)!r}, f'rank-{{os.getpid()}}').touch()\n"
        "time.sleep(60)\n"
    )
    with pytest.raises(subprocess.TimeoutExpired):
        launcher.run_python(2, program, seconds=6, forked=True)
    ranks = [int(path.name.removeprefix("rank-")) for path in tmp_path.glob("rank-*")]
    assert len(ranks) == 2
    assert [rank for rank in ranks if Path(f"/proc/{rank}").exists()] == []


@pytest.mark.parametrize("sent", [b"", (100).to_bytes(8, "little") + b"{"], ids=["nothing", "half"])
def test_a_place_that_is_killed_as_it_asks_harms_no_other(sent: bytes) -> None:
    with job() as address:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as killed:
            killed.connect(address)
            killed.sendall(sent)
        command = [sys.executable, "-I", "-S", str(RANK), address, "-c", "print('on')"]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (ended.stdout, ended.stderr, ended.returncode) == ("on\n", "", 0)
