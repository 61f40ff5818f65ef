"""What ranks tell PJRT before its first use, on a host that says it belongs to a TPU slice of two chips."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.harness.mpi_launcher import MPI_NAMES, Launcher

PROGRAM = Path(__file__).parent / "programs" / "start_on_a_slice.py"
HOST = {
    "PJRT_DEVICE": "",
    "TPU_ACCELERATOR_TYPE": "v5litepod-2",
    "TPU_HOST_BOUNDS": "1,1,1",
    "TPU_CHIPS_PER_HOST_BOUNDS": "1,2,1",
    "TPU_WORKER_ID": "0",
}


def started(mpi: str, ranks: int, **changed: str) -> list[tuple[str, dict[str, Any]]]:
    """By rank: what the strategy raised, and the variables then."""
    job = Launcher.named(mpi).run_python(ranks, PROGRAM, seconds=120, env={**HOST, **changed})
    assert job.returncode == 0, job.output
    lines = sorted(json.loads(line) for line in job.stdout.splitlines())
    assert [rank for rank, _, _ in lines] == [*range(ranks)]
    return [(error, variables) for _, error, variables in lines]


@pytest.mark.both_mpis("launching")
@pytest.mark.parametrize("mpi", MPI_NAMES)
def test_two_ranks_have_a_chip_each_and_know_of_each_other(mpi: str) -> None:
    for rank, (error, variables) in enumerate(started(mpi, 2)):
        assert error.startswith("RuntimeError: XLA finds no device: libtpu not found"), error
        assert variables["PJRT_DEVICE"] == "TPU"
        assert variables["TPU_PROCESS_ADDRESSES"] == "localhost:8476,localhost:8477"
        assert variables["TPU_PROCESS_PORT"] == str(8476 + rank)
        assert variables["CLOUD_TPU_TASK_ID"] == variables["TPU_VISIBLE_CHIPS"] == str(rank)
        assert variables["TPU_PROCESS_BOUNDS"] == "1,2,1"
        assert variables["TPU_CHIPS_PER_PROCESS_BOUNDS"] == "1,1,1"


def test_one_rank_has_both_chips() -> None:
    ((error, variables),) = started("MPICH", 1)
    assert "libtpu not found" in error
    assert variables["TPU_VISIBLE_CHIPS"] == "0,1"
    assert variables["TPU_PROCESS_BOUNDS"] == "1,1,1"
    assert variables["TPU_CHIPS_PER_PROCESS_BOUNDS"] == "1,2,1"
    assert variables["TPU_PROCESS_ADDRESSES"] == "localhost:8476"


def test_ranks_that_do_not_fit_the_host_are_an_error_on_all() -> None:
    for error, variables in started("MPICH", 3):
        assert error.startswith("ValueError: 3 ranks run as [3] on the 1 hosts of a v5litepod-2")
        assert "start 1 ranks, one per host, or 2, one per chip" in error
        assert "TPU_PROCESS_ADDRESSES" not in variables


def test_bounds_that_are_not_those_of_the_slice_are_an_error_on_all() -> None:
    for error, _ in started("Open MPI", 2, TPU_CHIPS_PER_HOST_BOUNDS="2,2,1"):
        assert error.startswith("ValueError")
        assert "v5litepod-2 has 2 chips" in error
        assert "have 4" in error


def test_no_tpu_and_nobody_who_knows_of_one() -> None:
    nobody = {"TPU_ACCELERATOR_TYPE": "", "GCE_METADATA_HOST": "127.0.0.1:9"}
    for error, _ in started("MPICH", 2, **nobody):
        assert error.startswith("NotFoundError: rank 0: no TPU found")
        assert "PJRT_DEVICE=CPU" in error


def test_a_device_of_another_name_is_an_error_on_all() -> None:
    for error, _ in started("MPICH", 2, PJRT_DEVICE="cpu"):
        assert error == "ValueError: PJRT_DEVICE must be TPU or CPU, got 'cpu'"
