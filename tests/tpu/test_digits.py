"""The digits job on torch_xla's CPU device, beside the same job without XLA."""

import functools
import json
import re
import tempfile
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from support.harness.mpi_launcher import MPI_NAMES, Launcher

pytestmark = [
    pytest.mark.long("XLA compiles each graph on every rank before the rank can train."),
    pytest.mark.time_limit(330),
]

ONE_EPOCH = "--one-epoch"
PROGRAM = Path(__file__).parent / "programs" / "trained_digits.py"
# Of each tensor after an epoch, the norm of the difference over that of the tensor: rounding of float64, which grows
# with steps. In float32 a rounding can decide a ReLU: plain torch ends 8 % apart, on some processors, if its initial
# parameters are multiplied by 1 ± 6e-8. Half the gradient makes it 0.5.
WITHIN = 1e-10


class Trained(NamedTuple):
    output: str
    answers: list[dict[str, object]]  # by rank
    tensors: dict[str, torch.Tensor]  # after the first epoch

    def farthest_from(self, other: "Trained") -> float:
        assert self.tensors.keys() == other.tensors.keys()
        return max(
            float((self.tensors[name] - tensor).norm() / tensor.norm())
            for name, tensor in other.tensors.items()
        )


@functools.cache  # tests ask for the same job, whose graphs take most of its time
def train(mpi: str, ranks: int, *arguments: str, devices: int = 1) -> Trained:
    with tempfile.TemporaryDirectory() as folder:
        return _train(
            Launcher.named(mpi), ranks, Path(folder) / "tensors.pt", *arguments, devices=devices
        )


def _train(launcher: Launcher, ranks: int, path: Path, *arguments: str, devices: int) -> Trained:
    environment = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(devices)}
    job = launcher.run_python(
        ranks, PROGRAM, path, *arguments, env=environment, seconds=300, forked=True
    )
    assert job.returncode == 0, job.output
    assert job.left_behind == ()
    lines = [json.loads(line) for line in job.stdout.splitlines() if line.startswith("{")]
    answers = sorted(lines, key=lambda line: line["rank"])
    assert [line["rank"] for line in answers] == [*range(ranks)]
    assert len({line["digest"] for line in answers}) == 1, "the ranks' parameters differ"
    return Trained(job.output, answers, torch.load(path))


TPU = ("--strategy", "tpu", "--explain")


@pytest.mark.parametrize("mpi", MPI_NAMES)
def test_two_ranks_learn_to_read(mpi: str) -> None:
    trained = train(mpi, 2, *TPU)
    assert [line["code"] for line in trained.answers] == [0, 0]
    assert float(re.findall(r"Test accuracy ([0-9.]+)", trained.output)[0]) >= 0.97
    assert trained.output.count("samples/s") == 12
    # Gradients; the first update, which makes Adam's state; the others.
    assert "train_step: 3 graphs for float32[32,1,8,8], int64[32]\n" in trained.output
    assert "test_step: 1 graph for float32[180,1,8,8], int64[180]\n" in trained.output


@pytest.mark.time_limit(930)
def test_an_epoch_is_that_of_ranks_without_xla() -> None:
    hosts = train("MPICH", 2, ONE_EPOCH)
    ranks = train("MPICH", 2, *TPU, ONE_EPOCH)
    cores = train("MPICH", 1, *TPU, ONE_EPOCH, devices=2)
    assert ranks.farthest_from(hosts) < WITHIN
    assert cores.farthest_from(hosts) < WITHIN


def test_one_rank_with_two_devices_learns_to_read() -> None:
    """Its steps go on after those of the test, which write nothing."""
    trained = train("MPICH", 1, *TPU, devices=2)
    assert trained.answers[0]["code"] == 0
    assert "was compiled in" not in trained.output
