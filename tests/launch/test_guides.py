"""The programs of scripts/torch_distributed: unchanged under `mpistrat run`, they do what one process does."""

import re
import sys
from pathlib import Path

import pytest

from support.harness.mpi_launcher import Job, Launcher, run_job

PROGRAMS = Path(__file__).parents[2] / "scripts" / "torch_distributed"
SECONDS = 100  # for a run, on a busy machine
TORCHRUN_OF_ONE = {
    **{"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
    **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"},
}
OF_TORCH = ("ddp.py", "fsdp2.py", "tensor_parallel.py")
OF_OTHERS = ("lightning_fabric.py", "lightning_trainer.py", "hf_accelerate.py", "hf_trainer.py")


def figures(job: Job) -> dict[str, list[float]]:
    """What a program has printed, by its name: losses, norms, the sum of the parameters' magnitudes."""
    assert job.returncode == 0, job.output
    assert job.left_behind == ()
    found: dict[str, list[float]] = {}
    for name, value in re.findall(r"\b(loss|norm|accuracy|parameters) ([0-9.]+)", job.stdout):
        found.setdefault(name, []).append(float(value))
    assert len(found["parameters"]) == 1, job.output  # rank 0 alone writes
    return found


def one_process(program: str) -> dict[str, list[float]]:
    """On torch's own backend, without mpistrat."""
    environment = Launcher.named("MPICH").environment(
        TORCHRUN_OF_ONE if program in OF_TORCH else {}
    )
    return figures(run_job([sys.executable, str(PROGRAMS / program)], environment, SECONDS))


def on_ranks(ranks: int, program: str, launcher: Launcher) -> dict[str, list[float]]:
    command = ("-m", "mpistrat", "run", PROGRAMS / program)
    return figures(launcher.run_python(ranks, *command, seconds=SECONDS))


def is_close(found: dict[str, list[float]], expected: dict[str, list[float]]) -> None:
    assert found.keys() == expected.keys()
    for name, values in found.items():
        assert values == pytest.approx(expected[name], rel=1e-5), name


@pytest.mark.parametrize("program", OF_TORCH)
def test_two_ranks_do_what_one_process_does(launcher: Launcher, program: str) -> None:
    is_close(on_ranks(2, program, launcher), one_process(program))


@pytest.mark.parametrize("program", OF_OTHERS)
def test_libraries_on_two_ranks_do_what_they_do_in_one_process(
    launcher: Launcher, program: str
) -> None:
    is_close(on_ranks(2, program, launcher), one_process(program))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [3, 4])
@pytest.mark.parametrize("program", OF_TORCH + OF_OTHERS)
def test_more_ranks_do_what_one_process_does(launcher: Launcher, ranks: int, program: str) -> None:
    """Four ranks make a mesh of 2 × 2 of tensor_parallel.py."""
    is_close(on_ranks(ranks, program, launcher), one_process(program))


def test_programs_are_those_of_any_launcher() -> None:
    names = {path.name for path in PROGRAMS.glob("*.py")}
    assert names == {*OF_TORCH, *OF_OTHERS}
    for name in names:
        assert "import mpistrat" not in (PROGRAMS / name).read_text(encoding="utf-8")
