"""The programs of docs/torch_distributed_guides.md: under `mpistrat run`, unchanged, they do what one process does."""

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from launch import printed_figures
from launch.printed_figures import IMPORTING, LIBRARIES, Figures, assert_equal
from support.harness.mpi_launcher import Launcher

PROGRAMS = Path(__file__).parents[2] / "scripts" / "torch_distributed"
# Those that call torch.distributed themselves need a launcher's environment in one process, too.
OF_TORCH = ("ddp.py", "fsdp2.py", "tensor_parallel.py")
OF_LIBRARIES = (
    *("lightning_fabric.py", "lightning_trainer.py", "hf_accelerate.py", "hf_trainer.py"),
    "timm_train.py",
)
TORCHRUN_OF_ONE = {
    **{"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
    **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"},
}


def imported_by(program: str) -> tuple[str, ...]:
    return LIBRARIES if program in OF_LIBRARIES else ()


def in_one_process(program: str) -> Figures:
    """On torch's own backend."""
    env = tuple(TORCHRUN_OF_ONE.items()) if program in OF_TORCH else ()
    return printed_figures.in_one_process(PROGRAMS / program, imported_by(program), env)


def on_ranks(ranks: int, program: str, launcher: Launcher, env: Mapping[str, str] = {}) -> Figures:
    command = ("-m", "mpistrat", "run", PROGRAMS / program)
    imported = imported_by(program)
    return printed_figures.on_ranks(ranks, *command, launcher=launcher, imported=imported, env=env)


@IMPORTING
@pytest.mark.parametrize("program", [*OF_TORCH, *OF_LIBRARIES])
def test_two_ranks_do_what_one_process_does(launcher: Launcher, program: str) -> None:
    assert_equal(on_ranks(2, program, launcher), in_one_process(program))


@pytest.mark.slow
@pytest.mark.parametrize("program", [*OF_TORCH, *OF_LIBRARIES])
def test_three_ranks_do_what_one_process_does(launcher: Launcher, program: str) -> None:
    assert_equal(on_ranks(3, program, launcher), in_one_process(program))


@pytest.mark.slow
@pytest.mark.parametrize("program", OF_TORCH)
def test_four_ranks_do_what_one_process_does(launcher: Launcher, program: str) -> None:
    """They are a mesh of 2 × 2 in tensor_parallel.py."""
    assert_equal(on_ranks(4, program, launcher), in_one_process(program))


@pytest.mark.slow
@pytest.mark.parametrize("program", ["lightning_fabric.py", "lightning_trainer.py"])
def test_lightning_over_two_nodes(program: str) -> None:
    """Made-up ones, of a rank each: it is told how many nodes there are."""
    found = on_ranks(2, program, Launcher.named("MPICH"), {"MPIR_CVAR_NUM_CLIQUES": "2"})
    assert_equal(found, in_one_process(program))


def test_programs_know_nothing_of_us() -> None:
    programs = {path.name: path.read_text(encoding="utf-8") for path in PROGRAMS.glob("*.py")}
    assert programs.keys() == {*OF_TORCH, *OF_LIBRARIES}
    page = (PROGRAMS.parents[1] / "docs" / "torch_distributed_guides.md").read_text(
        encoding="utf-8"
    )
    for name, text in programs.items():
        assert not re.search(r"^\s*(import|from) mpistrat", text, re.MULTILINE), name
        assert len(text.splitlines()) < 65, name
        assert f"mpirun -n 2 mpistrat run scripts/torch_distributed/{name}" in page, name
