"""`mpistrat verify`: the folders of its runs, and the commands that start them."""

import os
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path

import pytest

from mpistrat.tools.doctor.facts import Launch
from mpistrat.tools.doctor.mpi_library import command_of_ranks
from mpistrat.tools.verify import working_folder
from mpistrat.tools.verify.runs import FailedRunError, start

OPEN_MPI = "mpirun (Open MPI) 5.0.5"


@pytest.mark.parametrize(
    ("launch", "words"),
    [
        (Launch(mpirun="/opt/bin/mpirun", mpirun_version="HYDRA"), "/opt/bin/mpirun"),
        (Launch(mpirun="mpirun", mpirun_version=OPEN_MPI), "mpirun"),
        (Launch(mpirun="mpirun", srun_types=["none", "pmix"]), "srun --mpi=pmix"),
        (Launch(srun_types=["pmi2", "pmix"]), "srun --mpi=pmi2"),
        (
            Launch(mpirun="mpirun", mpirun_version=OPEN_MPI, srun_types=["pmi2", "pmix"]),
            "srun --mpi=pmix",
        ),
    ],
)
def test_the_launcher(launch: Launch, words: str) -> None:
    assert command_of_ranks(launch) == words.split()


def test_no_launcher() -> None:
    asked = Namespace(launch=Launch(srun_types=["none"]), script="train.py")
    with pytest.raises(FailedRunError, match="load the module of your MPI"):
        start(asked, 2)


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """The user's folder with a few files, and a filled folder of a run."""
    source = tmp_path / "user"
    for name in ("data/deep/x.txt", ".git/config", "train.py"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(f"my {name}")
        os.utime(source / name, (0, 0))
    time.sleep(0.05)  # clocks of file systems are coarse
    work = tmp_path / "run" / "files"
    work.mkdir(parents=True)
    working_folder.fill(work, source)
    return source, work


def test_files_are_read_by_relative_paths(folders: tuple[Path, Path]) -> None:
    source, work = folders
    assert (work / "data" / "deep" / "x.txt").read_text() == "my data/deep/x.txt"
    assert (work / ".git").is_symlink()
    (work / "data" / "deep" / "new.txt").write_text("new")
    assert [path.name for path in (source / "data" / "deep").iterdir()] == ["x.txt"]


GUARDED = """
import os, shutil, sys
from mpistrat.tools.verify.recording import Recording
from mpistrat.tools.verify.working_folder import guard

recording = Recording(0)
recording.outside.update(sys.argv[2:])
guard(recording, "..")
try:
    exec(sys.argv[1])
except Exception:
    print("caught")
finally:
    print(recording.refused, sorted(recording.outside))
"""


def guarded(folder: Path, statement: str, *earlier: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-c", GUARDED, statement, *earlier],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout.rstrip("\n")


@pytest.mark.parametrize(
    ("statement", "name"),
    [
        ("open('data/deep/x.txt', 'w')", "data/deep/x.txt"),
        ("open('train.py', 'a')", "train.py"),
        ("os.open('train.py', os.O_RDWR)", "train.py"),
        ("os.truncate('train.py', 0)", "train.py"),
        ("os.remove('SOURCE/train.py')", "train.py"),
        ("shutil.rmtree('SOURCE/data')", "data"),
        ("open('new', 'w').close(); os.replace('new', 'SOURCE/train.py')", "train.py"),
    ],
)
def test_no_file_of_the_user_is_overwritten(
    folders: tuple[Path, Path], statement: str, name: str
) -> None:
    source, work = folders
    code, output = guarded(work, statement.replace("SOURCE", str(source)))
    assert code == 1
    assert output == f"{source / name} []"
    for file in ("data/deep/x.txt", "train.py"):
        assert (source / file).read_text() == f"my {file}"


@pytest.mark.parametrize(
    "statement",
    [
        "open('train.py').read()",
        "open('new', 'w').close(); open('new', 'a')",
        "os.makedirs('out'); open('out/x', 'w')",
        "open('new', 'w').close(); os.replace('new', 'train.py')",
        "os.remove('train.py')",
        "shutil.rmtree('data')",
        "open('/dev/null', 'w')",
    ],
)
def test_the_run_may_write_its_own_files(folders: tuple[Path, Path], statement: str) -> None:
    source, work = folders
    assert guarded(work, statement) == (0, " []")
    assert (source / "train.py").read_text() == "my train.py"


def test_a_large_folder_is_a_link(folders: tuple[Path, Path], tmp_path: Path) -> None:
    source, _ = folders
    work = tmp_path / "other"
    work.mkdir()
    assert working_folder.fill(work, source, 1) == 0
    assert not (work / "data").is_symlink()
    assert (work / "data" / "deep").is_symlink()


def test_new_files_elsewhere_are_noted(folders: tuple[Path, Path]) -> None:
    source, work = folders
    new = source / "log"
    statement = f"open({str(new)!r}, 'w').close(); open({str(new)!r}, 'a').close()"
    assert guarded(work, statement) == (0, f" [{str(new)!r}]")


def test_files_of_earlier_runs_may_be_overwritten(folders: tuple[Path, Path]) -> None:
    source, work = folders
    of_run = str(source / "train.py")
    assert guarded(work, "open('train.py', 'w')", of_run) == (0, f" [{of_run!r}]")
