"""Programs that print losses and the like: what they print on ranks, and in one process."""

import functools
import re
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from support.forked.jobs import RANK
from support.forked.jobs import job as forks
from support.harness.mpi_launcher import Job, Launcher, run_job

LIBRARIES = (
    *("lightning", "accelerate", "timm", "transformers.models.gpt2.modeling_gpt2"),
    *("torch.utils.tensorboard", "wandb"),
)
IMPORTING = pytest.mark.long("The first imports the libraries, which takes ten seconds.")
SECONDS = 100  # for a run, on a busy machine

Figures = dict[str, list[float]]


def figures(job: Job) -> Figures:
    """What a program has printed, by its name: losses, norms, the sum of the parameters' magnitudes."""
    assert job.returncode == 0, job.output
    assert job.left_behind == ()
    found: Figures = {}
    for name, value in re.findall(r"\b(loss|norm|accuracy|parameters) ([0-9.]+)", job.stdout):
        found.setdefault(name, []).append(float(value))
    assert len(found["parameters"]) == 1, job.output  # rank 0 alone writes
    return found


@functools.cache
def in_one_process(
    program: Path, imported: tuple[str, ...], env: tuple[tuple[str, str], ...] = ()
) -> Figures:
    """By Python alone."""
    with forks(imported) as address:
        command = [sys.executable, "-I", "-S", str(RANK), address, str(program)]
        environment = Launcher.named("MPICH").environment(dict(env))
        return figures(run_job(command, environment, SECONDS))


def on_ranks(
    ranks: int,
    *command: str | Path,
    launcher: Launcher,
    imported: tuple[str, ...],
    env: Mapping[str, str] = {},
) -> Figures:
    job = launcher.run_python(
        ranks, *command, seconds=SECONDS, env=env, forked=True, imported=imported
    )
    return figures(job)


def assert_equal(found: Figures, expected: Figures) -> None:
    assert found.keys() == expected.keys()
    for name, values in found.items():
        assert values == pytest.approx(expected[name], rel=1e-5), name
