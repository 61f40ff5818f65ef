"""The programs of docs/frameworks.md: inside a replica, ranks do what one process does."""

import re
from pathlib import Path

import pytest

from launch.printed_figures import (
    IMPORTING,
    LIBRARIES,
    SECONDS,
    assert_equal,
    in_one_process,
    on_ranks,
)
from support.harness.mpi_launcher import Launcher

PROGRAMS = Path(__file__).parents[2] / "scripts" / "frameworks"
NAMES = (
    *("transformers_trainer.py", "lightning_fit.py", "fabric_loop.py", "accelerate_loop.py"),
    "timm_loop.py",
)
# wandb sends nothing, and takes less time; mlflow's small package can write files alone.
QUIET_LOGGERS = {
    **{"WANDB_SILENT": "true", "WANDB_CONSOLE": "off", "WANDB_DISABLE_GIT": "true"},
    **{"MLFLOW_TRACKING_URI": "file:mlruns", "MLFLOW_ALLOW_FILE_STORE": "true"},
}


def compare(name: str, ranks: int, launcher: Launcher, strategy: str = "") -> None:
    """With `strategy` as an argument of the program's strategy."""
    before, after = (PROGRAMS / name).read_text(encoding="utf-8").split("MirroredStrategy(")
    program = Path(name)
    program.write_text(f"{before}MirroredStrategy({strategy}{after}", encoding="utf-8")
    found = on_ranks(ranks, program, launcher=launcher, imported=LIBRARIES)
    assert_equal(found, in_one_process(PROGRAMS / name, LIBRARIES))


@IMPORTING
@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_do_what_one_process_does(launcher: Launcher, name: str) -> None:
    compare(name, 2, launcher)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "strategy"), [(3, ""), (4, "shared_parameters=True"), (4, "deterministic=True")]
)
@pytest.mark.parametrize("name", NAMES)
def test_more_ranks_do_what_one_process_does(
    launcher: Launcher, name: str, ranks: int, strategy: str
) -> None:
    compare(name, ranks, launcher, strategy)


def test_the_first_rank_alone_logs(launcher: Launcher, tmp_path: Path) -> None:
    program = PROGRAMS / "loggers.py"
    options = {"seconds": SECONDS, "env": QUIET_LOGGERS, "cwd": tmp_path}
    job = launcher.run_python(2, program, forked=True, imported=LIBRARIES, **options)
    assert job.returncode == 0, job.output
    assert job.left_behind == ()
    losses = re.findall(r"epoch \d: loss ([0-9.]+)", job.stdout)
    assert len(losses) == 3

    (events,) = tmp_path.glob("tensorboard/*")
    assert scalars_of(events, "loss") == pytest.approx([*map(float, losses)])
    (run,) = tmp_path.glob("wandb/*run-*/*.wandb")
    written = run.read_bytes()
    assert all(loss.encode() in written for loss in losses)
    (metric,) = tmp_path.glob("mlruns/**/metrics/loss")
    assert [line.split()[1] for line in metric.read_text().splitlines()] == losses


def scalars_of(events: Path, name: str) -> list[float]:
    """What a file of TensorBoard has by this name."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    values = (
        value for event in EventFileLoader(str(events)).Load() for value in event.summary.value
    )
    return [value.tensor.float_val[0] for value in values if value.tag == name]


def test_all_programs_are_tested_and_described() -> None:
    page = (PROGRAMS.parents[1] / "docs" / "frameworks.md").read_text(encoding="utf-8")
    assert {path.name for path in PROGRAMS.glob("*.py")} == {*NAMES, "loggers.py"}
    for name in (*NAMES, "loggers.py"):
        assert f"mpirun -n 2 python scripts/frameworks/{name}" in page, name
        assert len((PROGRAMS / name).read_text(encoding="utf-8").splitlines()) < 65, name
