"""The command line of `mpistrat`."""

import subprocess
import sys
from pathlib import Path

import pytest

from mpistrat.__main__ import main
from mpistrat.tools.init import command

COMMANDS = ("run", "doctor", "bench", "trace", "init", "verify")


def test_alone_it_lists_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 2
    listed = capsys.readouterr().err
    assert [name for name in COMMANDS if f"\n    {name} " in listed] == [*COMMANDS]
    assert listed.endswith("\n\nexample: mpirun -n 2 mpistrat run train.py\n")


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_ends_its_help_with_an_example(
    capsys: pytest.CaptureFixture[str], name: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: mpistrat {name} ")
    *_, last = text.rstrip("\n").split("\n\n")
    assert last.startswith("example: ")
    assert f"mpistrat {name}" in " ".join(last.split())


def test_a_script_in_place_of_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["train.py", "--epochs", "3"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith(
        "mpistrat: error: train.py is no command: mpistrat run train.py\n"
    )


def test_run_without_a_script(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["run"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith("are required: SCRIPT or MODULE\n")


def test_bash_completes_the_commands() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "shtab", "--shell", "bash", "mpistrat.__main__.parser"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    ask = "COMP_WORDS=(mpistrat ''); COMP_CWORD=1; _shtab_mpistrat; echo ${COMPREPLY[@]}"
    bash = ["bash", "--norc", "-c", f"{done.stdout}\n{ask}"]
    offered = subprocess.run(bash, capture_output=True, text=True, timeout=60)
    assert set(COMMANDS) <= set(offered.stdout.split()), offered


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Commands of a cluster: two kinds of nodes; its default has GPUs. Its MPI is Open MPI."""
    answers = {
        "sinfo": "short|9|64|(null)\ngpu*|5|32+|gpu:a100:4(S:0-1)",
        "srun": "MPI plugin types are...\nnone\npmix",
        "mpirun": "mpirun (Open MPI) 5.0.5",
    }
    (tmp_path / "bin").mkdir()
    for name, text in answers.items():
        program = tmp_path / "bin" / name
        program.write_text(f"#!/bin/sh\necho '{text}'\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    monkeypatch.setenv("LOADEDMODULES", "gcc/13:openmpi/5")
    return tmp_path


def test_the_batch_script_has_the_facts_of_the_cluster(
    cluster: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = cluster / "new"
    assert main(["init", str(folder)]) == 0
    assert capsys.readouterr().out == (
        f"Wrote train.py, train.sbatch, test_train.py in {folder}. Next, in that folder:\n"
        "  mpirun -n 2 python train.py\n"
        "  pip install pytest\n"
        "  python -m pytest test_train.py\n"
        "  rm -r checkpoints  # else the job goes on from there\n"
        "  sbatch train.sbatch\n"
    )
    lines = (folder / "train.sbatch").read_text().splitlines()
    for expected in (
        "#SBATCH --partition=gpu",
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=4",
        "#SBATCH --gpus-per-node=4",
        "#SBATCH --cpus-per-task=8",
        "module load gcc/13 openmpi/5",
        f"source {sys.prefix}/bin/activate",
        'srun --mpi=pmix --kill-on-bad-exit=0 --wait=60 python train.py "$@"',
    ):
        assert expected in lines, expected
    assert sum(line.startswith("srun ") for line in lines) == 1
    others = ("slurm/", "scripts of this folder", "--kill-on-bad-exit: ")
    assert not any(other in line for other in others for line in lines)
    checked = subprocess.run(
        [Path(sys.executable).parent / "shellcheck", folder / "train.sbatch"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert checked.returncode == 0, checked.stdout


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("gpu*|4+|56|gpu:2g.10gb:8", ("nodes=2", "gpus-per-node=8", "partition=gpu")),
        ("a b*|1|8|fpga:1,gpu:a100-sxm:4(S:0)", ("nodes=1", "gpus-per-node=4", "partition=a b")),
        ("gpu*|3|8|gpu:2,tmpdisk:9", ("nodes=2", "gpus-per-node=2", "partition=gpu")),
        ("cpu*|3|8|(null)", ("nodes=2", "cpus-per-task=4", "partition=cpu")),
        ("slurm_load_partitions: Unable to contact slurm controller", ("nodes=2",)),
    ],
)
def test_answers_of_slurm(cluster: Path, answer: str, expected: tuple[str, ...]) -> None:
    sinfo = cluster / "bin" / "sinfo"
    sinfo.write_text(f"#!/bin/sh\necho 'sinfo: a | warning' >&2\necho '{answer}'\n")
    assert main(["init", str(cluster / "new")]) == 0
    script = (cluster / "new" / "train.sbatch").read_text()
    for option in expected:
        assert f"\n#SBATCH --{option}\n" in script, option
    assert ("--gpus-per-node" in script) == ("gpu:" in answer)


def test_an_environment_with_a_blank_in_its_name(
    cluster: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "prefix", "/home/me/my env")
    assert main(["init", str(cluster / "new")]) == 0
    script = (cluster / "new" / "train.sbatch").read_text()
    assert "\nsource '/home/me/my env'/bin/activate\n" in script


def test_a_file_that_is_there_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").write_text("mine")
    assert main(["init", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert error == (
        f"mpistrat init: there is train.py in {tmp_path} already: move it away, or name another folder\n"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]
    assert (tmp_path / "train.py").read_text() == "mine"


def test_nothing_is_written_half_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full at the third file."""
    real, opened = open, []

    def fails(path: str, *words: str, **more: str) -> object:
        opened.append(path)
        if len(opened) == 3:
            raise OSError(28, "No space left on device", path)
        return real(path, *words, **more)

    monkeypatch.setattr(command, "open", fails, raising=False)
    assert main(["init", str(tmp_path)]) == 1
    assert list(tmp_path.iterdir()) == []
